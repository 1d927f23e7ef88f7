"""I-quants: 256 weights, whose codes point into a grid of 4 or 8 values each, and IQ4_XS."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inferax.ops.ggml.bits import half, planes, scaled, words
from inferax.ops.ggml.flat import IQ4_VALUES, lookup


@functools.cache
def grid(type: str) -> np.ndarray:
    """int8[entries, 4 or 8]: the code book of `type`, from the tables of the gguf package."""
    from gguf import quants

    table = getattr(quants, type)
    table.init_grid()
    return np.asarray(table.grid).reshape(table.grid_shape).astype(np.int8)


def _from_grid(type: str, index: Array) -> Array:
    """integer[..., n] -> int32[..., n * width of the grid]."""
    return lookup(grid(type), index).reshape(*index.shape[:-1], -1)


def _signs(x: Array) -> Array:
    """uint8[..., n] -> int32[..., 8 n]: -1 where a bit is set, else 1."""
    return 1 - 2 * planes(x, 1, 1).astype(jnp.int32)


def _signs_of_7(index: Array) -> Array:
    """integer[..., n] -> int32[..., 8 n]: 7 stored signs and an eighth that makes the number of minus signs even."""
    return _signs((index | ((lax.population_count(index) & 1) << 7)).astype(jnp.uint8))


def _four(word: Array, bits: int) -> Array:
    """[..., n] -> [..., 4 n]: the four lowest fields of `bits` bits of each word, lowest first."""
    fields = [(word >> (bits * i)) & (2**bits - 1) for i in range(4)]
    return jnp.stack(fields, axis=-1).reshape(*word.shape[:-1], -1)


def _odd(scale: Array, unit: float = 1.0) -> Array:
    """(2 scale + 1) * unit in float32."""
    return (2 * scale.astype(jnp.int32) + 1).astype(jnp.float32) * unit


def iq2_xxs(b: Array) -> Array:
    groups = b[..., 2:].reshape(*b.shape[:-1], 8, 8)
    index = groups[..., :4].reshape(*b.shape[:-1], 32)
    word = words(groups[..., 4:].reshape(*b.shape[:-1], 32), jnp.uint32)
    q = _from_grid("IQ2_XXS", index) * _signs_of_7(_four(word, 7))
    return scaled(half(b[..., :2]) * _odd(word >> 28, 1 / 8), q)


def iq2_xs(b: Array) -> Array:
    code = words(b[..., 2:66], jnp.uint16)
    q = _from_grid("IQ2_XS", code & 511) * _signs_of_7(code >> 9)
    return scaled(half(b[..., :2]) * _odd(planes(b[..., 66:], 4, 1), 1 / 8), q)


def iq2_s(b: Array) -> Array:
    low, signs, high, scales = b[..., 2:34], b[..., 34:66], b[..., 66:74], b[..., 74:]
    index = low.astype(jnp.int32) | (planes(high, 2, 1).astype(jnp.int32) << 8)
    return scaled(half(b[..., :2]) * _odd(planes(scales, 4, 1), 1 / 8), _from_grid("IQ2_S", index) * _signs(signs))


def iq3_xxs(b: Array) -> Array:
    word = words(b[..., 66:], jnp.uint32)
    q = _from_grid("IQ3_XXS", b[..., 2:66]) * _signs_of_7(_four(word, 7))
    return scaled(half(b[..., :2]) * _odd(word >> 28, 1 / 4), q)


def iq3_s(b: Array) -> Array:
    low, high, signs, scales = b[..., 2:66], b[..., 66:74], b[..., 74:106], b[..., 106:]
    index = low.astype(jnp.int32) | (planes(high, 1, 1).astype(jnp.int32) << 8)
    return scaled(half(b[..., :2]) * _odd(planes(scales, 4, 1)), _from_grid("IQ3_S", index) * _signs(signs))


def _shifted(index: Array, minus: Array) -> Array:
    """Eighths: 8 * grid value + 1, or - 1 where `minus`, which stands for n // minus.size neighbouring grid rows."""
    q = 8 * _from_grid("IQ1_S", index)
    shift = jnp.where(minus, -1, 1)[..., None]
    return (q.reshape(*minus.shape, -1) + shift).reshape(q.shape)


def iq1_s(b: Array) -> Array:
    head = words(b[..., 34:], jnp.uint16)
    index = b[..., 2:34].astype(jnp.int32) | (_four(head, 3).astype(jnp.int32) << 8)
    return scaled(half(b[..., :2]) * _odd((head >> 12) & 7, 1 / 8), _shifted(index, head >> 15 == 1))


def iq1_m(b: Array) -> Array:
    high, scales = planes(b[..., 32:48], 4, 1), words(b[..., 48:], jnp.uint16)
    top = scales >> 12  # the float16 super-scale, a nibble in each word
    bits = top[..., :1] | (top[..., 1:2] << 4) | (top[..., 2:3] << 8) | (top[..., 3:] << 12)
    d = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    index = b[..., :32].astype(jnp.int32) | ((high & 7).astype(jnp.int32) << 8)
    return scaled(d * _odd(_four(scales, 3), 1 / 8), _shifted(index, high >> 3 == 1))


def iq4_xs(b: Array) -> Array:
    scale = planes(b[..., 4:8], 4, 1) | (planes(b[..., 2:4], 2, 1) << 4)
    d = half(b[..., :2]) * (scale.astype(jnp.int32) - 32).astype(jnp.float32)
    return scaled(d, lookup(IQ4_VALUES, planes(b[..., 8:], 4, 16)))
