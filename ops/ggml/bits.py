"""Pieces that the block decoders share. All work on the last axis and keep the leading ones.

Every float product below is exact in float32 (an 11-bit float16 scale times integers of at most 13 bits in all), so a
value is rounded at most once, in the addition of a minimum. No fusion or contraction of XLA's can change a bit of it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def half(x: Array) -> Array:
    """uint8[..., 2 n] -> float32[..., n]: little-endian float16 numbers."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)


def words(x: Array, dtype: type[jnp.uint16] | type[jnp.uint32] | type[jnp.int32]) -> Array:
    """uint8[..., n * itemsize] -> dtype[..., n]: little-endian integers."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, size), dtype)


def signed(x: Array) -> Array:
    """uint8[..., n] -> int32[..., n], the bytes read as int8."""
    return lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32)


def planes(x: Array, bits: int, width: int) -> Array:
    """uint8[..., n] -> uint8[..., n * 8 // bits]: the codes of `bits` bits in `x`.

    Each run of `width` bytes holds the codes of its low bits first, then those of the next higher bits, and so on;
    with `width` 1 the codes of one byte are neighbours.
    """
    runs = x.reshape(*x.shape[:-1], -1, width)
    codes = [(runs >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return jnp.stack(codes, axis=-2).reshape(*x.shape[:-1], -1)


def scaled(scale: Array, q: Array, offset: Array | None = None) -> Array:
    """scale * q + offset: float32[..., G], int[..., n], float32[..., G] -> float32[..., n].

    Each scale and offset serves n // G neighbouring codes.
    """
    runs = scale[..., None] * q.astype(jnp.float32).reshape(*scale.shape, -1)
    if offset is not None:
        runs = runs + offset[..., None]
    return runs.reshape(q.shape)


def scaled_by_bits(bits: Array, q: Array) -> Array:
    """The float32 number with the bit pattern `bits` times `q`: int32[..., 1], int32[..., n] -> float32[..., n].

    Right also where the scale is subnormal, which XLA on CPU would take as zero: there the product is made in integers
    (|q| <= 128, so it fits) and rounded by the conversion.
    """
    product = (bits & 0x7FFFFF) * q  # in units of 2**-149
    size = jnp.abs(product)
    rounded = lax.bitcast_convert_type(size.astype(jnp.float32), jnp.int32) - (149 << 23)
    size = jnp.where(size < 1 << 23, size, rounded)
    sign = (bits ^ q) & jnp.int32(-(2**31))
    subnormal = lax.bitcast_convert_type(size | sign, jnp.float32)
    normal = lax.bitcast_convert_type(bits, jnp.float32) * q.astype(jnp.float32)
    return jnp.where((bits >> 23) & 0xFF == 0, subnormal, normal)
