"""`rotary`: the angles of rotary position embeddings (Su et al. 2021) and their scalings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from inferax.ops.op import Op

RotaryKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True)
class RotarySpec:
    """One way to turn positions into angles; hashable, part of a model's config.

    dim: how many of a head's leading elements are rotated.
    factor: by how much the trained context is stretched.
    original_length: the context length before stretching (kinds other than default and linear).
    attention_factor: multiplies cos and sin (yarn, longrope).
    freq_factors: divides each frequency, [dim / 2] (llama3 in a GGUF file, where the scaling comes as a tensor).
    """

    dim: int
    theta: float = 10000.0
    kind: RotaryKind = "default"
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies depend on how long a sequence is."""
        return self.kind in ("dynamic", "longrope")


def plain_frequencies(theta: float, dim: int) -> np.ndarray:
    """theta ** (-2i / dim), float32[dim / 2]."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies: np.ndarray = (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)
    return frequencies


def _yarn(spec: RotarySpec, plain: np.ndarray) -> np.ndarray:
    # Peng et al. 2023, section 3.2: long wavelengths are interpolated, short ones kept, with a ramp between.
    def turns_to_dim(turns: float) -> float:
        return spec.dim * math.log(spec.original_length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = turns_to_dim(spec.beta_fast), turns_to_dim(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(spec.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    blended: np.ndarray = (plain / np.float32(spec.factor) * ramp + plain * (1 - ramp)).astype(np.float32)
    return blended


def _llama3(spec: RotarySpec, plain: np.ndarray) -> np.ndarray:
    wavelength = 2 * np.float32(math.pi) / plain
    low, high = spec.original_length / spec.low_freq_factor, spec.original_length / spec.high_freq_factor
    smooth = (spec.original_length / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    scaled = plain / np.float32(spec.factor)
    blended = (1 - smooth) * scaled + smooth * plain
    out = np.where(wavelength > low, scaled, np.where(wavelength < high, plain, blended))
    return out.astype(np.float32)


def static_frequencies(spec: RotarySpec) -> np.ndarray:
    """The frequencies of a kind that does not depend on lengths, float32[dim / 2]."""
    plain = plain_frequencies(spec.theta, spec.dim)
    if spec.freq_factors:
        plain = plain / np.asarray(spec.freq_factors, np.float32)
    if spec.kind == "linear":
        return plain / np.float32(spec.factor)
    if spec.kind == "yarn":
        return _yarn(spec, plain)
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    return plain


def rotary_reference(
    positions: Int32[Array, " T"], lengths: Int32[Array, " T"], *, spec: RotarySpec
) -> tuple[Float32[Array, "T half"], Float32[Array, "T half"]]:
    if spec.kind == "dynamic":
        # NTK-aware base, grown with the sequence once it is longer than the trained context.
        ratio = spec.factor * lengths.astype(jnp.float32) / spec.original_length - (spec.factor - 1)
        grown = spec.theta * jnp.maximum(ratio, 1.0) ** (spec.dim / (spec.dim - 2))
        exponent = jnp.arange(0, spec.dim, 2, dtype=jnp.float32) / spec.dim
        frequencies = 1.0 / grown[:, None] ** exponent
    elif spec.kind == "longrope":
        plain = plain_frequencies(spec.theta, spec.dim)
        short = jnp.asarray(plain / np.asarray(spec.short_factors, np.float32))
        long = jnp.asarray(plain / np.asarray(spec.long_factors, np.float32))
        frequencies = jnp.where((lengths > spec.original_length)[:, None], long, short)
    else:
        frequencies = jnp.asarray(static_frequencies(spec))
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * spec.attention_factor, jnp.sin(angles) * spec.attention_factor


_rotary = Op("rotary", rotary_reference, rows=(0, 1))


def rotary(
    positions: Int32[Array, " T"], lengths: Int32[Array, " T"], spec: RotarySpec
) -> tuple[Float32[Array, "T half"], Float32[Array, "T half"]]:
    """cos and sin of each row's angles, [T, dim / 2], times the attention factor.

    `lengths` picks the frequencies of the length-dependent kinds. It is max(prompt length, position + 1): what a
    whole prefill followed by decoding would use, however the prompt is cut into chunks.
    """
    return _rotary(positions, lengths, spec=spec)


def rotate(
    x: Float32[Array, "T H E"],
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    *,
    interleaved: bool = False,
) -> Float32[Array, "T H E"]:
    """Rotates the leading 2 * half elements of each head: element i with i + half, or 2i with 2i + 1."""
    dim = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., :dim], x[..., dim:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    else:
        a, b = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
