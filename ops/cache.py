"""The paged KV cache: a tuple with one leaf per layer, donated to each step and never copied.

The dtype of a leaf says how it holds a position's keys and values. float32, bfloat16 and float16 hold the numbers
themselves. int8 and float8_e4m3fn hold each head's E numbers as codes with one float32 scale, whose four bytes follow
them in the same row (in the machine's byte order): keys and values have scales of their own, and what is read back is
code * scale, in float32.

- scale = largest magnitude * (1 / limit), with limit 127 for int8 and 448 for float8_e4m3fn.
- code = x * (limit / largest magnitude), rounded to the nearest code, ties to even. No code is beyond the limit, and
  float8's code for NaN is not used.
- A head whose scale would be below 2**-100 is written as zeros with scale 0; a head with an infinity or a NaN in it as
  zeros with scale NaN, so that it reads back as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32, Num

# W: E, or E + 4 where each head's scale follows its codes.
CacheLeaf = Num[Array, "pages page_size 2 K W"]
Cache = tuple[CacheLeaf, ...]

_LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}
_SMALLEST_SCALE = 2.0**-100  # nothing that is divided or multiplied by it becomes subnormal
_SCALE_BYTES = 4
# XLA's CPU scatter and gather convert a whole pool of the narrow floats, so it sees integers instead.
_CARRIERS = {"bfloat16": jnp.uint16, "float16": jnp.uint16, "float8_e4m3fn": jnp.uint8}


def cache_shape(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: Any) -> tuple[int, ...]:
    """Shape of one layer's leaf of that dtype: K and V of a position stand together."""
    scale = _SCALE_BYTES if jnp.dtype(dtype).name in _LIMITS else 0
    return (num_pages, page_size, 2, num_kv_heads, head_dim + scale)


def empty_cache(shapes: Sequence[tuple[int, ...]], dtype: Any) -> Cache:
    """Zeroed leaves of the given shapes."""
    return tuple(jnp.zeros(shape, dtype) for shape in shapes)


def _carried(pool: Array) -> Array:
    carrier = _CARRIERS.get(pool.dtype.name)
    return pool if carrier is None else jax.lax.bitcast_convert_type(pool, carrier)


def _encode(x: Float32[Array, "*rows E"], dtype: jnp.dtype) -> Num[Array, "*rows W"]:
    """Rows as a leaf of `dtype` holds them, in the type that carries it."""
    if dtype.name not in _LIMITS:
        return _carried(x.astype(dtype))
    # A constant divisor would be multiplied by its inverse, on some platforms only.
    limit, inverse_limit = jnp.float32(_LIMITS[dtype.name]), jnp.float32(1 / _LIMITS[dtype.name])
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)  # XLA's maximum may lose a NaN on CPU
    scale = largest * inverse_limit
    known = finite & (scale >= _SMALLEST_SCALE)
    codes = jnp.where(known, x * (limit / largest), 0.0)
    codes = _carried((jnp.round(codes) if dtype == jnp.int8 else codes).astype(dtype))
    scale = jnp.where(known, scale, jnp.where(finite, 0.0, jnp.float32(jnp.nan)))
    scale_bytes = jax.lax.bitcast_convert_type(scale[..., 0], codes.dtype)
    return jnp.concatenate([codes, scale_bytes], axis=-1)


def write_kv(cache: CacheLeaf, kv: Float32[Array, "T 2 K E"], slots: Int32[Array, " T"]) -> CacheLeaf:
    """Writes row t of `kv` at `slots[t]` (page * page_size + offset); a negative slot writes nothing.

    Into a cache of codes no gradient flows.
    """
    pages, page_size, *tail = cache.shape
    pool = _carried(cache.reshape(pages * page_size, *tail))
    index = jnp.where(slots < 0, pages * page_size, slots)
    pool = pool.at[index].set(_encode(kv, cache.dtype), mode="drop", unique_indices=False)
    if pool.dtype != cache.dtype:
        pool = jax.lax.bitcast_convert_type(pool, cache.dtype)
    return pool.reshape(cache.shape)


def read_kv(cache: CacheLeaf, pages: Int[Array, "*batch"]) -> Float32[Array, "*batch page_size 2 K E"]:
    """The numbers that those pages hold."""
    if cache.dtype.name not in _LIMITS:
        return cache[pages].astype(jnp.float32)
    rows = _carried(cache)[pages]
    codes, scale_bytes = rows[..., :-_SCALE_BYTES], rows[..., -_SCALE_BYTES:]
    if codes.dtype != cache.dtype:
        codes = jax.lax.bitcast_convert_type(codes, cache.dtype)
    return codes.astype(jnp.float32) * jax.lax.bitcast_convert_type(scale_bytes, jnp.float32)[..., None]
