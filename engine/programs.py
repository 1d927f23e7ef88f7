"""The two programs of a step, for each bucket of batch shapes: `forward` and `sample`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from inferax.engine.params import MAX_LOGPROBS
from inferax.models import decoder
from inferax.models.config import ModelConfig
from inferax.models.decoder import Params
from inferax.ops.batch import Batch, BatchShape
from inferax.ops.cache import Cache
from inferax.ops.sample import SamplerRows, sample

TOKEN_LADDER = (1, 4, 16, 64, 256, 1024)
ROW_LADDER = (1, 4, 16, 64, 256)
_SCORE_TILE = 16

# One row of the sampler's metadata. Floats travel as their bits.
ROW_INTS = ("slot", "top_k", "sample_index", "position", "seed_low", "seed_high", "logprobs", "shaped", "may_end")
ROW_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
ROW_WIDTH = len(ROW_INTS) + len(ROW_FLOATS)


def rung(ladder: tuple[int, ...], count: int) -> int:
    """The smallest bucket that holds `count`."""
    for size in ladder:
        if size >= count:
            return size
    raise ValueError(f"{count} is more than the largest bucket {ladder[-1]}")


def clipped(ladder: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The ladder up to `most`, which becomes its last rung."""
    return (*(size for size in ladder if size < most), most)


def forward(
    config: ModelConfig, shape: BatchShape, params: Params, packed: Int32[Array, " n"], cache: Cache, state: Any
) -> tuple[Float32[Array, "R D"], Cache]:
    """Hidden states of the sampled rows, and the new cache.

    A negative token -(slot + 1) stands for the token last sampled in that slot, which only the device knows yet.
    """
    batch, hidden, cache = _hidden(config, shape, params, packed, cache, state)
    return hidden[batch.sample_rows], cache


def _hidden(
    config: ModelConfig, shape: BatchShape, params: Params, packed: Int32[Array, " n"], cache: Cache, state: Any
) -> tuple[Batch, Float32[Array, "T D"], Cache]:
    batch = shape.unpack(packed)
    waiting = batch.tokens < 0
    tokens = jnp.where(waiting, state["last_tokens"][jnp.where(waiting, -batch.tokens - 1, 0)], batch.tokens)
    hidden, cache = decoder.forward(config, params, replace(batch, tokens=tokens), cache)
    return batch, hidden, cache


def forward_all(
    config: ModelConfig, shape: BatchShape, params: Params, packed: Int32[Array, " n"], cache: Cache, state: Any
) -> tuple[Float32[Array, "R D"], Float32[Array, "T D"], Cache]:
    """`forward`, with the hidden states of all rows besides, for requests that want their prompt scored."""
    batch, hidden, cache = _hidden(config, shape, params, packed, cache, state)
    return hidden[batch.sample_rows], hidden, cache


def score(
    config: ModelConfig, params: Params, hidden: Float32[Array, "T D"], ids: Int32[Array, " T"]
) -> dict[str, Array]:
    """Log-probabilities of `ids` after each row, their ranks and the most likely tokens; a few rows at a time, so that
    no [T, V] is ever held."""
    tile = min(_SCORE_TILE, hidden.shape[0])
    tiles = -(-hidden.shape[0] // tile)
    pad = tiles * tile - hidden.shape[0]
    rows = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(tiles, tile, -1)
    wanted = jnp.pad(ids, (0, pad)).reshape(tiles, tile)

    def one(given: tuple[Array, Array]) -> dict[str, Array]:
        return _logprobs(config, params, given[0], decoder.logits(config, params, given[0]), given[1])

    found = jax.lax.map(one, (rows, wanted))
    return {k: v.reshape(tiles * tile, *v.shape[2:])[: hidden.shape[0]] for k, v in found.items()}


def sample_step(
    config: ModelConfig, params: Params, rows: Float32[Array, "R D"], packed: Int32[Array, "R W"], state: Any
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The next token of each row, its log-probabilities where asked for, and the new sampler state.

    `state["last_tokens"]` is [slots + 1]; padding rows write to the spare last slot.
    """
    ints = {name: packed[:, i] for i, name in enumerate(ROW_INTS)}
    floats = {
        name: jax.lax.bitcast_convert_type(packed[:, len(ROW_INTS) + i], jnp.float32)
        for i, name in enumerate(ROW_FLOATS)
    }
    logits = decoder.logits(config, params, rows)
    slot = ints["slot"]
    shaped = jax.lax.cond(
        jnp.any(ints["shaped"] > 0), partial(_shape, logits, state, slot, ints, floats), lambda: logits
    )
    unsigned = {
        name: jax.lax.bitcast_convert_type(ints[name], jnp.uint32)
        for name in ("sample_index", "position", "seed_low", "seed_high")
    }
    tokens = sample(
        shaped,
        SamplerRows(
            temperature=floats["temperature"],
            top_k=ints["top_k"],
            top_p=floats["top_p"],
            min_p=floats["min_p"],
            seed=jnp.stack([unsigned["seed_low"], unsigned["seed_high"]], axis=1),
            sample_index=unsigned["sample_index"],
            position=unsigned["position"],
        ),
    )
    out = {"tokens": tokens}
    out |= jax.lax.cond(
        jnp.any(ints["logprobs"] >= 0),
        partial(_logprobs, config, params, rows, logits, tokens),
        partial(_no_logprobs, logits, tokens),
    )
    return out, state | {
        "last_tokens": state["last_tokens"].at[slot].set(tokens),
        "counts": state["counts"].at[slot, tokens].add(1),
    }


def empty_state(slots: int, vocab_size: int) -> dict[str, Array]:
    """The sampler's state by sequence slot, with a spare last one for padding rows. Donated to each step.

    last_tokens: the token sampled last. counts: how often each token came in the answer. The other leaves are read only
    for rows whose request shapes its logits: in_prompt, bias (added; -inf forbids), ends (forbidden while the answer
    may not end).
    """
    shape = (slots + 1, vocab_size)
    return {
        "last_tokens": jnp.zeros(slots + 1, jnp.int32),
        "counts": jnp.zeros(shape, jnp.int16),
        "in_prompt": jnp.zeros(shape, jnp.bool_),
        "bias": jnp.zeros(shape, jnp.float32),
        "ends": jnp.zeros(shape, jnp.bool_),
    }


def load_slot(state: dict[str, Array], slot: Int32[Array, ""], row: dict[str, Array]) -> dict[str, Array]:
    """The state with one slot's leaves replaced, whatever ran in the slot before."""
    return state | {name: state[name].at[slot].set(value) for name, value in row.items()}


def _shape(
    logits: Float32[Array, "R V"],
    state: dict[str, Array],
    slot: Int32[Array, " R"],
    ints: dict[str, Array],
    floats: dict[str, Array],
) -> Float32[Array, "R V"]:
    """Bias, then penalties, for the rows that ask for them."""
    counts = state["counts"][slot]
    out = logits + state["bias"][slot]
    early = (ints["position"] < ints["may_end"])[:, None]
    out = jnp.where(early & state["ends"][slot], -jnp.inf, out)
    seen = state["in_prompt"][slot] | (counts > 0)
    repetition = floats["repetition_penalty"][:, None]
    out = jnp.where(seen, jnp.where(out > 0, out / repetition, out * repetition), out)
    out = out - floats["frequency_penalty"][:, None] * counts.astype(jnp.float32)
    out = out - floats["presence_penalty"][:, None] * (counts > 0)
    return jnp.where((ints["shaped"] > 0)[:, None], out, logits)


def _num_top(logits: Array) -> int:
    return min(MAX_LOGPROBS, int(logits.shape[1]))


def _logprobs(
    config: ModelConfig,
    params: Params,
    rows: Float32[Array, "R D"],
    logits: Float32[Array, "R V"],
    tokens: Int32[Array, " R"],
) -> dict[str, Array]:
    # The op's log-sum-exp, whose order of summation does not depend on the bucket.
    _, lse = decoder.logprobs(config, params, rows, tokens[:, None])
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    top, ids = jax.lax.top_k(logits, _num_top(logits))
    return {
        "logprob": chosen[:, 0] - lse,
        "rank": 1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32),
        "top_logprobs": top - lse[:, None],
        "top_ids": ids.astype(jnp.int32),
    }


def _no_logprobs(logits: Float32[Array, "R V"], tokens: Int32[Array, " R"]) -> dict[str, Array]:
    rows, top = tokens.shape[0], _num_top(logits)
    return {
        "logprob": jnp.zeros(rows, jnp.float32),
        "rank": jnp.zeros(rows, jnp.int32),
        "top_logprobs": jnp.zeros((rows, top), jnp.float32),
        "top_ids": jnp.zeros((rows, top), jnp.int32),
    }


@dataclass(frozen=True)
class EngineShape:
    """The static sizes of one engine: sequence slots, tokens per step, page size, pages per sequence and in all."""

    max_seqs: int
    max_batched_tokens: int
    page_size: int
    pages_per_seq: tuple[int, ...]
    num_pages: tuple[int, ...]

    @property
    def token_ladder(self) -> tuple[int, ...]:
        return clipped(TOKEN_LADDER, self.max_batched_tokens)

    @property
    def row_ladder(self) -> tuple[int, ...]:
        return clipped(ROW_LADDER, self.max_seqs)

    def batch_shape(self, tokens: int) -> BatchShape:
        """The bucket for a step of `tokens` tokens; it samples as many rows as it can hold sequences."""
        size = rung(self.token_ladder, tokens)
        return BatchShape(size, self.max_seqs, self.pages_per_seq, rung(self.row_ladder, min(size, self.max_seqs)))


def sampler_params(config: ModelConfig, params: Params) -> Params:
    """The part of params that `sample_step` reads."""
    names = ("embed" if config.tied_head else "head", "norms", "norm_biases")
    return {name: params[name] for name in names if name in params}


def float_bits(value: float) -> int:
    """A float32's bits as int32."""
    return int(np.float32(value).view(np.int32))
