"""Ragged batches for tests: shuffled pages, padding rows and sequences, and NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import RaggedShape
from inferax.ops.batch import Batch
from tests.ops.oracles import encode_kv


@dataclass(frozen=True)
class Paged:
    """A batch of one cache group, and the cache before the step: random where tokens are cached, NaN elsewhere."""

    batch: Batch
    cache: Any


def leaf_of(numbers: np.ndarray, dtype: Any) -> Any:
    """A leaf that holds these numbers; where they are NaN, every code and scale is NaN, in types that have one."""
    leaf = encode_kv(numbers, np.dtype(dtype))
    if leaf.dtype.itemsize == 1:
        leaf.view(np.uint8)[np.isnan(numbers[..., 0])] = 0xFF
    return jnp.asarray(leaf)


def paged(
    ragged: RaggedShape,
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    spare_rows: int = 3,
    spare_seqs: int = 2,
    spare_pages: int = 3,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> Paged:
    """Lays a ragged shape out. `spare_…` is padding: rows, sequences, and pages that belong to nobody."""
    rng = np.random.default_rng(seed)
    tokens, seqs = ragged.num_tokens + spare_rows, len(ragged.chunks) + spare_seqs
    pages_each = [-(-(cached + new) // page_size) for cached, new in ragged.chunks]
    pool = rng.permutation(sum(pages_each) + spare_pages)
    table = np.zeros((seqs, max(pages_each, default=0) + 1), np.int32)
    positions, slots = np.zeros(tokens, np.int32), np.full(tokens, -1, np.int32)
    query_start, context_len = np.zeros(seqs + 1, np.int32), np.zeros(seqs, np.int32)
    prompt_len = np.zeros(seqs, np.int32)
    cache = np.full((len(pool), page_size, 2, num_kv_heads, head_dim), np.nan, np.float32)
    row = used = 0
    for s, ((cached, new), count) in enumerate(zip(ragged.chunks, pages_each, strict=True)):
        mine = pool[used : used + count]
        used += count
        table[s, :count] = mine
        for position in range(cached):
            page, offset = mine[position // page_size], position % page_size
            cache[page, offset] = rng.standard_normal((2, num_kv_heads, head_dim), np.float32)
        where = np.arange(cached, cached + new)
        positions[row : row + new] = where
        slots[row : row + new] = mine[where // page_size] * page_size + where % page_size
        row += new
        query_start[s + 1] = row
        context_len[s] = prompt_len[s] = cached + new
    query_start[len(ragged.chunks) + 1 :] = row
    batch = Batch(
        tokens=jnp.asarray(rng.integers(0, 100, tokens, dtype=np.int32)),
        positions=jnp.asarray(positions),
        query_start=jnp.asarray(query_start),
        context_len=jnp.asarray(context_len),
        prompt_len=jnp.asarray(prompt_len),
        num_tokens=jnp.int32(row),
        num_seqs=jnp.int32(len(ragged.chunks)),
        page_table=(jnp.asarray(table),),
        slots=(jnp.asarray(slots),),
        state_slot=jnp.arange(seqs, dtype=jnp.int32),
        sample_rows=jnp.zeros(1, jnp.int32),
    )
    return Paged(batch, leaf_of(cache, dtype))
