"""The two programs of a step, for each bucket of batch shapes: `forward` and `sample`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from inferax.engine.sampler import logprob_tables
from inferax.models import decoder
from inferax.models.config import ModelConfig
from inferax.models.decoder import Params
from inferax.ops.batch import Batch, BatchShape
from inferax.ops.cache import Cache

TOKEN_LADDER = (1, 4, 16, 64, 256, 1024)
ROW_LADDER = (1, 4, 16, 64, 256)
_SCORE_TILE = 16


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
        logits = decoder.logits(config, params, given[0])
        return logprob_tables(config, params, given[0], logits, given[1], jnp.zeros((tile, 0), jnp.int32))

    found = jax.lax.map(one, (rows, wanted))
    return {k: v.reshape(tiles * tile, *v.shape[2:])[: hidden.shape[0]] for k, v in found.items()}


@dataclass(frozen=True)
class EngineShape:
    """The static sizes of one engine: sequence slots, tokens per step, page size, pages per sequence and in all."""

    max_seqs: int
    max_batched_tokens: int
    page_size: int
    pages_per_seq: tuple[int, ...]
    num_pages: tuple[int, ...]

    @property
    def context(self) -> int:
        """Tokens that one sequence can have."""
        return min(self.pages_per_seq) * self.page_size

    @property
    def row_ladder(self) -> tuple[int, ...]:
        ladder = clipped(ROW_LADDER, self.max_seqs)
        return ladder if len(ladder) <= len(ROW_LADDER) else ladder[:1] + ladder[2:]  # at most 12 programs in all

    def batch_shape(self, tokens: int) -> BatchShape:
        """The bucket for a step of `tokens` tokens; it samples as many rows as it can hold sequences."""
        return self._batch_shapes[rung(self.token_ladder, tokens)]

    @cached_property
    def token_ladder(self) -> tuple[int, ...]:
        return clipped(TOKEN_LADDER, self.max_batched_tokens)

    @cached_property
    def _batch_shapes(self) -> dict[int, BatchShape]:
        rows = {size: rung(self.row_ladder, min(size, self.max_seqs)) for size in self.token_ladder}
        return {size: BatchShape(size, self.max_seqs, self.pages_per_seq, rows[size]) for size in self.token_ladder}


def sampler_params(config: ModelConfig, params: Params) -> Params:
    """The part of params that `sample_step` reads."""
    names = ("embed" if config.tied_head else "head", "norms", "norm_biases")
    return {name: params[name] for name in names if name in params}
