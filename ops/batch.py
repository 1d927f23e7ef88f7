"""`Batch`: one ragged, flattened batch for prefill chunks and decode rows alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """What one forward step works on. Rows from `num_tokens` on, and sequences from `num_seqs` on, are padding.

    A sequence's tokens of this step are rows `query_start[s] : query_start[s + 1]`, at the end of
    its context.
    """

    tokens: Int32[Array, " T"]  # token ids; filled by the engine
    positions: Int32[Array, " T"]  # position in the sequence, from 0; padding 0
    query_start: Int32[Array, " S1"]  # [S + 1]; from num_seqs on it repeats num_tokens
    context_len: Int32[Array, " S"]  # tokens in the cache after this step; padding 0
    prompt_len: Int32[Array, " S"]  # the request's prompt; picks length-dependent rotary frequencies (ops/rotary.py)
    num_tokens: Int32[Array, ""]
    num_seqs: Int32[Array, ""]
    page_table: tuple[Int32[Array, "S P"], ...]  # per cache group; entries past a context are 0 and never read
    slots: tuple[Int32[Array, " T"], ...]  # per cache group: page * page_size + offset written by each row; padding -1
    state_slot: Int32[Array, " S"]  # the engine's slot of each sequence; padding is the spare last slot
    sample_rows: Int32[Array, " R"]  # rows whose hidden states are wanted; padding 0
    input_embeds: Float32[Array, "T D"] | None = None  # replaces the embedding of `tokens` where given

    @property
    def num_seq_slots(self) -> int:
        """S: how many sequences this batch's shape can hold."""
        return int(self.context_len.shape[0])

    def sequence_of_row(self) -> Int32[Array, " T"]:
        """The sequence that each row belongs to; padding rows give the last one."""
        rows = jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
        found = jnp.searchsorted(self.query_start[1:], rows, side="right").astype(jnp.int32)
        return jnp.minimum(found, self.num_seq_slots - 1)


_GROUPED = ("page_table", "slots")


@dataclass(frozen=True)
class BatchShape:
    """The static sizes of a batch: T rows, S sequences, P pages per sequence for each cache group, R sampled rows."""

    tokens: int
    seqs: int
    pages: tuple[int, ...]
    rows: int

    def _sizes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        t, s, r = self.tokens, self.seqs, self.rows
        groups = len(self.pages)
        return {
            "tokens": ((t,),),
            "positions": ((t,),),
            "query_start": ((s + 1,),),
            "context_len": ((s,),),
            "prompt_len": ((s,),),
            "num_tokens": ((),),
            "num_seqs": ((),),
            "page_table": tuple((s, p) for p in self.pages),
            "slots": ((t,),) * groups,
            "state_slot": ((s,),),
            "sample_rows": ((r,),),
        }

    @cached_property
    def _layout(self) -> dict[str, list[tuple[int, int, tuple[int, ...]]]]:
        """Where each array stands in the packed one: from, to, and its shape."""
        layout: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {}
        at = 0
        for name, shapes in self._sizes().items():
            layout[name] = []
            for shape in shapes:
                layout[name].append((at, at + prod(shape), shape))
                at += prod(shape)
        return layout

    @cached_property
    def packed_size(self) -> int:
        """How many int32 the packed metadata of such a batch holds."""
        return sum(prod(shape) for shapes in self._sizes().values() for shape in shapes)

    def empty(self) -> dict[str, list[np.ndarray]]:
        """Host arrays for every field, as views of one packed int32 array under the key "packed"."""
        packed = np.zeros(self.packed_size, np.int32)
        views = {
            name: [packed[start:stop].reshape(shape) for start, stop, shape in places]
            for name, places in self._layout.items()
        }
        views["packed"] = [packed]
        for slots in views["slots"]:
            slots.fill(-1)
        return views

    def unpack(self, packed: Int32[Array, " n"]) -> Batch:
        """The batch that `packed` holds; traceable."""
        values: dict[str, Any] = {}
        for name, places in self._layout.items():
            parts = [packed[start:stop].reshape(shape) for start, stop, shape in places]
            values[name] = tuple(parts) if name in _GROUPED else parts[0]
        return Batch(**values)
