"""What `sample` is told of each row: one int32 vector per row, in which floats travel as their bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int16, Int32, UInt32
from jaxtyping import Float32 as F32

# The stages of the chain, in their default order.
STAGES = ("penalties", "dry", "top_n_sigma", "temperature", "typical_p", "min_p", "top_k", "top_p", "xtc")
OWN_CONTEXT = -2  # of penalty_last_n: presence and frequency count the answer, repetition prompt and answer

# Each field with its neutral value. The native kernel has the same order in kernels/cpu/tier.h, and refuses another.
INTS: dict[str, int] = {
    "slot": 0,  # of the memory
    "position": 0,  # of the token to be sampled
    "seed_low": 0,
    "seed_high": 0,
    "sample_index": 0,  # which of a request's n samples
    "top_k": 0,
    "penalty_last_n": OWN_CONTEXT,  # or how many of the last tokens count; -1: all
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
} | {f"stage_{i}": i for i in range(len(STAGES))}  # the stage that comes in that place, -1: none
FLOATS: dict[str, float] = {
    "temperature": 1.0,  # 0 is greedy
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "mirostat_tau": 0.0,  # 0: no mirostat
    "mirostat_eta": 0.1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
}
_COLUMN = {name: i for i, name in enumerate((*INTS, *FLOATS))}
ROW_WIDTH = len(_COLUMN)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerRows:
    """The fields of `INTS` and `FLOATS` for each of R rows; `rows["top_k"]` is a column."""

    packed: Int32[Array, "R W"]

    def __getitem__(self, name: str) -> Array:
        column = self.packed[:, _COLUMN[name]]
        return jax.lax.bitcast_convert_type(column, jnp.float32) if name in FLOATS else column

    def unsigned(self, name: str) -> UInt32[Array, " R"]:
        return jax.lax.bitcast_convert_type(self[name], jnp.uint32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerMemory:
    """What rows read of the tokens before, by slot. `history` is [slots, C], of which a row reads [0, position)."""

    history: Int32[Array, "M C"]
    counts: Int16[Array, "M V"]  # of each token in the answer
    in_prompt: UInt32[Array, "M W"]  # a bit for each token
    breaks: UInt32[Array, "M W"]  # a bit for each token at which DRY's repetitions end
    mu: F32[Array, " M"]  # mirostat's, in bits


def pack_row(**values: Any) -> np.ndarray:
    """One row as int32 [W]; fields that are not named are neutral, "samplers" is a sequence of names of stages."""
    ints, floats = dict(INTS), dict(FLOATS)
    for name, value in values.items():
        if name == "samplers":
            ints |= dict.fromkeys((n for n in INTS if n.startswith("stage_")), -1)
            ints |= {f"stage_{i}": STAGES.index(stage) for i, stage in enumerate(value)}
        elif name == "seed":
            words = np.array([value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32)
            ints["seed_low"], ints["seed_high"] = (int(w) for w in words)
        elif name in floats:
            floats[name] = value
        elif name in ints:
            ints[name] = value
        else:
            raise KeyError(name)
    row = np.empty(ROW_WIDTH, np.int32)
    row[: len(ints)] = list(ints.values())
    row[len(ints) :] = np.array(list(floats.values()), np.float32).view(np.int32)
    return row


def sampler_rows(count: int, **values: Any) -> SamplerRows:
    """Rows for research: each value is one for all rows, or a list or array of one for each row.

    Names and neutral values are those of `INTS` and `FLOATS`; besides "seed" (an int), "samplers" (a tuple of stages).
    """
    rows = []
    for i in range(count):
        mine = {n: v[i] if isinstance(v, list | np.ndarray) else v for n, v in values.items()}
        rows.append(pack_row(**mine))
    return SamplerRows(jnp.asarray(np.stack(rows)))


def words_for(vocab_size: int) -> int:
    """How many 32-bit words hold a bit for each token."""
    return -(-vocab_size // 32)


def pack_bits(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """uint32 [W] with a bit for each token, set for those named: token t in bit t % 32 of word t // 32."""
    bits = np.zeros(words_for(vocab_size) * 32, np.bool_)
    bits[np.asarray(tokens, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def unpack_bits(words: UInt32[Array, "R W"], vocab_size: int) -> Array:
    """The bits as bool [R, V]."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] > 0
