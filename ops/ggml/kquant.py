"""K-quants: 256 weights with a float16 super-scale over integer scales of 16 or 32 weights each."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from inferax.ops.ggml.bits import half, planes, scaled, signed


def q2_k(b: Array) -> Array:
    scales, qs, d, dmin = b[..., :16], b[..., 16:80], half(b[..., 80:82]), half(b[..., 82:])
    scale = d * (scales & 15).astype(jnp.float32)
    minimum = dmin * (scales >> 4).astype(jnp.float32)
    return scaled(scale, planes(qs, 2, 32), -minimum)


def q3_k(b: Array) -> Array:
    high, qs, scales, d = b[..., :32], b[..., 32:96], b[..., 96:108], half(b[..., 108:])
    scale = planes(scales[..., :8], 4, 8) | (planes(scales[..., 8:], 2, 4) << 4)
    q = planes(qs, 2, 32) | (planes(high, 1, 32) << 2)
    return scaled(d * (scale.astype(jnp.int32) - 32).astype(jnp.float32), q.astype(jnp.int32) - 4)


def _scale_and_min(b: Array) -> tuple[Array, Array]:
    """Head of Q4_K and Q5_K: two float16, then eight 6-bit scales and eight 6-bit minimums in 12 bytes."""
    low, mid, mixed = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = jnp.concatenate([low & 63, (mixed & 15) | ((low >> 6) << 4)], axis=-1)
    minimum = jnp.concatenate([mid & 63, (mixed >> 4) | ((mid >> 6) << 4)], axis=-1)
    return half(b[..., :2]) * scale.astype(jnp.float32), half(b[..., 2:4]) * minimum.astype(jnp.float32)


def q4_k(b: Array) -> Array:
    scale, minimum = _scale_and_min(b)
    return scaled(scale, planes(b[..., 16:], 4, 32), -minimum)


def q5_k(b: Array) -> Array:
    scale, minimum = _scale_and_min(b)
    q = planes(b[..., 48:], 4, 32) | (planes(b[..., 16:48], 1, 32) << 4)
    return scaled(scale, q, -minimum)


def q6_k(b: Array) -> Array:
    low, high, scales, d = b[..., :128], b[..., 128:192], b[..., 192:208], half(b[..., 208:])
    q = planes(low, 4, 64) | (planes(high, 2, 32) << 4)
    return scaled(d * signed(scales).astype(jnp.float32), q.astype(jnp.int32) - 32)
