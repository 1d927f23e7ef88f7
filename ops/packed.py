"""Packed weights: one uint8 leaf that stays packed from file to matmul."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from inferax.errors import UnsupportedError
from inferax.ops.ggml import TYPES, dequantize_blocks


@dataclass(frozen=True)
class Layout:
    """How the bytes of a packed weight are to be read.

    `type` is the ggml type's name ("Q4_K"); `form` is "canonical" (the file's blocks, row-major) or a platform's own.
    """

    type: str
    form: str = "canonical"

    @property
    def block(self) -> int:
        """Weights per block."""
        return TYPES[self.type].block

    @property
    def block_bytes(self) -> int:
        return TYPES[self.type].block_bytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A weight [..., N, K] as `data` uint8[..., N, K // block, block_bytes] in canonical form."""

    data: UInt8[Array, "... n blocks bytes"]
    layout: Layout = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, blocks, _ = self.data.shape
        return (*lead, blocks * self.layout.block)

    @property
    def ndim(self) -> int:
        return self.data.ndim - 1

    @property
    def nbytes(self) -> int:
        return int(self.data.size)

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Rows [start, stop) along N (static bounds); the same layout."""
        return PackedWeight(self.data[..., start:stop, :, :], self.layout)


def dequantize(w: PackedWeight) -> Float32[Array, "... n k"]:
    """The weight's meaning: float32 values, bitwise those of ggml's own dequantization of the block."""
    if w.layout.form != "canonical":
        raise UnsupportedError(f"layout form {w.layout.form!r} of {w.layout.type} has no reference dequantization")
    values = dequantize_blocks(w.layout.type, w.data)  # [..., N, blocks, block]
    return jnp.reshape(values, w.shape)


def pack(w: PackedWeight, platform: str) -> PackedWeight:
    """The same weight in the form that `platform`'s kernels read. Canonical is what all of them read today."""
    del platform
    return w
