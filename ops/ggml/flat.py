"""Types with one level of scales: a float scale, for some a minimum, and the codes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inferax.ops.ggml.bits import half, planes, scaled, scaled_by_bits, signed, words

# Non-uniform 4-bit code book of IQ4_NL and IQ4_XS.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# Twice the numbers of FP4 E2M1 (OCP Microscaling Formats, 5.3.3); the scales below are halved in turn.
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def lookup(values: np.ndarray, codes: Array) -> Array:
    """values[codes]: int8[n, *entry], integer[...] -> int32[..., *entry]."""
    return jnp.take(jnp.asarray(values), codes.astype(jnp.int32), axis=0, mode="clip").astype(jnp.int32)


def q1_0(b: Array) -> Array:
    return scaled(half(b[..., :2]), 2 * planes(b[..., 2:], 1, 1).astype(jnp.int32) - 1)


def q2_0(b: Array) -> Array:
    return scaled(half(b[..., :2]), planes(b[..., 2:], 2, 1).astype(jnp.int32) - 1)


def q4_0(b: Array) -> Array:
    return scaled(half(b[..., :2]), planes(b[..., 2:], 4, 16).astype(jnp.int32) - 8)


def q4_1(b: Array) -> Array:
    return scaled(half(b[..., :2]), planes(b[..., 4:], 4, 16), half(b[..., 2:4]))


def q5_0(b: Array) -> Array:
    q = planes(b[..., 6:], 4, 16) | (planes(b[..., 2:6], 1, 1) << 4)
    return scaled(half(b[..., :2]), q.astype(jnp.int32) - 16)


def q5_1(b: Array) -> Array:
    q = planes(b[..., 8:], 4, 16) | (planes(b[..., 4:8], 1, 1) << 4)
    return scaled(half(b[..., :2]), q, half(b[..., 2:4]))


def q8_0(b: Array) -> Array:
    return scaled(half(b[..., :2]), signed(b[..., 2:]))


def q8_1(b: Array) -> Array:
    # Bytes 2 and 3 are scale * sum(codes), which dot products use and the value does not need.
    return scaled(half(b[..., :2]), signed(b[..., 4:]))


def q8_k(b: Array) -> Array:
    # The last 32 bytes are sums of 16 codes each.
    return scaled_by_bits(words(b[..., :4], jnp.int32), signed(b[..., 4:260]))


def iq4_nl(b: Array) -> Array:
    return scaled(half(b[..., :2]), lookup(IQ4_VALUES, planes(b[..., 2:], 4, 16)))


def mxfp4(b: Array) -> Array:
    exponent = b[..., :1].astype(jnp.int32)  # the scale is 2**(exponent - 128)
    bits = jnp.where(exponent < 2, 0x200000 << exponent, (exponent - 1) << 23)
    return scaled_by_bits(bits, lookup(FP4_VALUES, planes(b[..., 1:], 4, 16)))


def nvfp4(b: Array) -> Array:
    code = b[..., :4].astype(jnp.int32)  # unsigned E4M3, bias 7; the top bit is not read, 0x7F is zero
    exponent = (code >> 3) & 15
    mantissa = (code & 7) + jnp.where(exponent > 0, 8, 0)
    power = lax.bitcast_convert_type((jnp.maximum(exponent, 1) - 11 + 127) << 23, jnp.float32)
    scale = jnp.where(code == 0x7F, 0, mantissa).astype(jnp.float32) * power
    return scaled(scale, lookup(FP4_VALUES, planes(b[..., 4:], 4, 8)))


def _trits(x: Array, digits: int, width: int) -> Array:
    """Base-3 digits, highest first: a byte is ceil(number * 256 / 243), so each digit is the carry of a times 3."""
    runs = x.reshape(*x.shape[:-1], -1, width)
    shifted = jnp.stack([runs * jnp.uint8(3**i) for i in range(digits)], axis=-2).reshape(*x.shape[:-1], -1)
    return ((shifted.astype(jnp.int32) * 3) >> 8) - 1


def tq1_0(b: Array) -> Array:
    runs = (_trits(b[..., :32], 5, 32), _trits(b[..., 32:48], 5, 16), _trits(b[..., 48:52], 4, 4))
    return scaled(half(b[..., 52:]), jnp.concatenate(runs, axis=-1))


def tq2_0(b: Array) -> Array:
    return scaled(half(b[..., 64:]), planes(b[..., :64], 2, 32).astype(jnp.int32) - 1)
