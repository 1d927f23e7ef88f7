"""The paged KV cache: a tuple with one leaf per layer, donated to each step and never copied."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

Cache = tuple[Float[Array, "pages page_size 2 K E"], ...]

_CARRIER = {1: jnp.uint8, 2: jnp.uint16}


def cache_shape(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of one layer's leaf: K and V of a position stand together."""
    return (num_pages, page_size, 2, num_kv_heads, head_dim)


def empty_cache(shapes: Sequence[tuple[int, ...]], dtype: jnp.dtype) -> Cache:
    """Zeroed leaves of the given shapes."""
    return tuple(jnp.zeros(shape, dtype) for shape in shapes)


def write_kv(
    cache: Float[Array, "pages page_size 2 K E"], kv: Float[Array, "T 2 K E"], slots: Int32[Array, " T"]
) -> Float[Array, "pages page_size 2 K E"]:
    """Writes row t of `kv` at `slots[t]` (page * page_size + offset); a negative slot writes nothing.

    Types narrower than float32 are written through an integer view of the pool: XLA's CPU scatter would otherwise
    convert the whole pool to float32 and back.
    """
    pages, page_size, *tail = cache.shape
    values = kv.astype(cache.dtype)
    carrier = _CARRIER.get(cache.dtype.itemsize)
    pool = cache.reshape(pages * page_size, *tail)
    if carrier is not None:
        pool = jax.lax.bitcast_convert_type(pool, carrier)
        values = jax.lax.bitcast_convert_type(values, carrier)
    index = jnp.where(slots < 0, pages * page_size, slots)
    pool = pool.at[index].set(values, mode="drop", unique_indices=False)
    if carrier is not None:
        pool = jax.lax.bitcast_convert_type(pool, cache.dtype)
    return pool.reshape(cache.shape)
