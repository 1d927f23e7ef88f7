"""The ggml block types, and their meaning: the reference dequantization of each, in jax.numpy.

Block layouts are those of ggml's `ggml-common.h`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
from jaxtyping import Array, Float32, UInt8

from inferax.errors import UnsupportedError
from inferax.ops.ggml import flat, iquant, kquant

__all__ = ["TYPES", "TypeInfo", "dequantize_blocks"]


@dataclass(frozen=True)
class TypeInfo:
    """A ggml type that stores `block` weights in `block_bytes` bytes; `id` is its number in a GGUF file."""

    name: str
    id: int
    block: int
    block_bytes: int


_TABLE: tuple[tuple[TypeInfo, Callable[[jax.Array], jax.Array]], ...] = (
    (TypeInfo("Q4_0", 2, 32, 18), flat.q4_0),
    (TypeInfo("Q4_1", 3, 32, 20), flat.q4_1),
    (TypeInfo("Q5_0", 6, 32, 22), flat.q5_0),
    (TypeInfo("Q5_1", 7, 32, 24), flat.q5_1),
    (TypeInfo("Q8_0", 8, 32, 34), flat.q8_0),
    (TypeInfo("Q8_1", 9, 32, 36), flat.q8_1),
    (TypeInfo("Q2_K", 10, 256, 84), kquant.q2_k),
    (TypeInfo("Q3_K", 11, 256, 110), kquant.q3_k),
    (TypeInfo("Q4_K", 12, 256, 144), kquant.q4_k),
    (TypeInfo("Q5_K", 13, 256, 176), kquant.q5_k),
    (TypeInfo("Q6_K", 14, 256, 210), kquant.q6_k),
    (TypeInfo("Q8_K", 15, 256, 292), flat.q8_k),
    (TypeInfo("IQ2_XXS", 16, 256, 66), iquant.iq2_xxs),
    (TypeInfo("IQ2_XS", 17, 256, 74), iquant.iq2_xs),
    (TypeInfo("IQ3_XXS", 18, 256, 98), iquant.iq3_xxs),
    (TypeInfo("IQ1_S", 19, 256, 50), iquant.iq1_s),
    (TypeInfo("IQ4_NL", 20, 32, 18), flat.iq4_nl),
    (TypeInfo("IQ3_S", 21, 256, 110), iquant.iq3_s),
    (TypeInfo("IQ2_S", 22, 256, 82), iquant.iq2_s),
    (TypeInfo("IQ4_XS", 23, 256, 136), iquant.iq4_xs),
    (TypeInfo("IQ1_M", 29, 256, 56), iquant.iq1_m),
    (TypeInfo("TQ1_0", 34, 256, 54), flat.tq1_0),
    (TypeInfo("TQ2_0", 35, 256, 66), flat.tq2_0),
    (TypeInfo("MXFP4", 39, 32, 17), flat.mxfp4),
    (TypeInfo("NVFP4", 40, 64, 36), flat.nvfp4),
    (TypeInfo("Q1_0", 41, 128, 18), flat.q1_0),
    (TypeInfo("Q2_0", 42, 64, 18), flat.q2_0),
)

TYPES: Mapping[str, TypeInfo] = MappingProxyType({info.name: info for info, _ in _TABLE})
_DECODE = MappingProxyType({info.name: decode for info, decode in _TABLE})


@functools.partial(jax.jit, static_argnums=0, inline=True)
def dequantize_blocks(type: str, data: UInt8[Array, "... block_bytes"]) -> Float32[Array, "... block"]:
    """The values of blocks of ggml type `type`, bitwise those of ggml's own dequantization.

    A block with an infinite or NaN scale gives what IEEE arithmetic gives: infinities and NaN, the latter with an
    unspecified payload. Raises UnsupportedError for a type that is not in TYPES, and ValueError if the last axis is
    not `block_bytes` bytes of uint8.
    """
    info = TYPES.get(type)
    if info is None:
        raise UnsupportedError(f"ggml type {type!r} has no quantized blocks; known are {', '.join(TYPES)}")
    if data.dtype != jax.numpy.uint8 or data.shape[-1:] != (info.block_bytes,):
        raise ValueError(f"{type} blocks are uint8[..., {info.block_bytes}], got {data.dtype}{list(data.shape)}")
    return _DECODE[type](data)
