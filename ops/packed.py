"""Packed weights: one uint8 leaf that stays packed from file to matmul."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from inferax.errors import UnsupportedError
from inferax.ops.ggml import TYPES, dequantize_blocks


@dataclass(frozen=True)
class Layout:
    """How the bytes of a packed weight are to be read.

    `type` is the ggml type's name ("Q4_K"); `form` is "canonical" (the file's blocks, row-major), or "x16": the same
    bytes, 16 rows side by side in words of four bytes, so that one instruction works on 16 rows.
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
    """A weight [..., N, K] as `data` uint8[..., N, K // block, block_bytes] in canonical form, or
    uint8[N // 16, K // block, 16 * block_bytes] in the form x16."""

    data: UInt8[Array, "... n blocks bytes"]
    layout: Layout = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, blocks, _ = self.data.shape
        return (*lead, rows * (16 if self.layout.form == "x16" else 1), blocks * self.layout.block)

    @property
    def ndim(self) -> int:
        return self.data.ndim - 1

    @property
    def nbytes(self) -> int:
        return int(self.data.size)

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Rows [start, stop) along N (static bounds); the same layout. The form x16 is cut at multiples of 16 only."""
        side = 16 if self.layout.form == "x16" else 1
        if start % side or stop % side:
            raise ValueError(f"rows [{start}, {stop}) cut a tile of {side} rows")
        return PackedWeight(self.data[..., start // side : stop // side, :, :], self.layout)


def dequantize(w: PackedWeight) -> Float32[Array, "... n k"]:
    """The weight's meaning: float32 values, bitwise those of ggml's own dequantization of the block."""
    w = canonical(w)
    values = dequantize_blocks(w.layout.type, w.data)  # [..., N, blocks, block]
    return jnp.reshape(values, w.shape)


# Types that the CPU's kernels read in the form x16.
X16 = frozenset("Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split())
# Their blocks end with the bytes that are left over from words of four; the others begin with them.
_REST_BEHIND = ("Q3_K", "Q6_K")


def pack(w: PackedWeight, platform: str) -> PackedWeight:
    """The same weight in the form that `platform`'s kernels read fastest, which may be the canonical one. Numpy in,
    numpy out."""
    rows = w.shape[-2]
    if platform != "cpu" or w.layout.type not in X16 or w.layout.form != "canonical" or w.ndim != 2 or rows % 16:
        return w
    _, blocks, size = w.data.shape
    rest = size % 4
    tiles = np.asarray(w.data).reshape(rows // 16, 16, blocks, size)
    out = np.empty((rows // 16, blocks, 16 * size), np.uint8)
    behind = w.layout.type in _REST_BEHIND
    loose, body = (slice(size - rest, size), slice(0, size - rest)) if behind else (slice(0, rest), slice(rest, size))
    words = out[..., : 16 * (size - rest)] if behind else out[..., 16 * rest :]
    rests = out[..., 16 * (size - rest) :] if behind else out[..., : 16 * rest]
    words.reshape(*words.shape[:-1], -1, 16, 4)[...] = (
        tiles[..., body].reshape(rows // 16, 16, blocks, -1, 4).transpose(0, 2, 3, 1, 4)
    )
    if rest:
        rests.reshape(*rests.shape[:-1], 16, rest)[...] = tiles[..., loose].transpose(0, 2, 1, 3)
    return PackedWeight(out, Layout(w.layout.type, "x16"))  # type: ignore[arg-type]


def canonical(w: PackedWeight) -> PackedWeight:
    """The same weight in the file's own form."""
    if w.layout.form == "canonical":
        return w
    if w.layout.form != "x16":
        raise UnsupportedError(f"layout form {w.layout.form!r} of {w.layout.type} is not known")
    tiles, blocks, _ = w.data.shape
    size = w.layout.block_bytes
    rest = size % 4
    cut = 16 * rest
    if w.layout.type in _REST_BEHIND:
        body, loose = w.data[..., : 16 * size - cut], w.data[..., 16 * size - cut :]
    else:
        loose, body = w.data[..., :cut], w.data[..., cut:]
    words = body.reshape(tiles, blocks, size // 4, 16, 4).transpose(0, 3, 1, 2, 4).reshape(tiles, 16, blocks, -1)
    rests = loose.reshape(tiles, blocks, 16, rest).transpose(0, 2, 1, 3)
    pair = (words, rests) if w.layout.type in _REST_BEHIND else (rests, words)
    data = jnp.concatenate(pair, axis=-1).reshape(tiles * 16, blocks, size)
    return PackedWeight(data, Layout(w.layout.type))
