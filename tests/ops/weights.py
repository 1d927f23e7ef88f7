"""Random packed weights of every ggml type, with scales of a sensible size."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType, quants

from inferax.ops.ggml import TYPES
from inferax.ops.packed import Layout, PackedWeight

# The gguf package has no dequantization of these, so there is no oracle for them.
NOT_IN_GGUF = {"Q8_1", "Q8_K", "Q1_0", "Q2_0"}
PACKED_TYPES = tuple(name for name in TYPES if name not in NOT_IN_GGUF)

# Byte offsets of the float16 scales in a block.
_HALVES = {
    **dict.fromkeys(["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S"], (0,)),
    **dict.fromkeys(["IQ3_XXS", "IQ3_S", "IQ1_S"], (0,)),
    **dict.fromkeys(["Q4_1", "Q5_1", "Q4_K", "Q5_K"], (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
}


def packed_weight(name: str, n: int, k: int, seed: int = 0) -> PackedWeight:
    """A canonical weight [n, k] of random codes; its largest values are near 0.5."""
    largest = np.max(np.abs(values_of(_random(name, n, k, seed, 1.0))))
    weight = _random(name, n, k, seed, 0.5 / float(largest))
    assert 0.05 < np.max(np.abs(values_of(weight))) < 2
    return weight


def _random(name: str, n: int, k: int, seed: int, scale: float) -> PackedWeight:
    info = TYPES[name]
    assert k % info.block == 0
    rng = np.random.default_rng((seed, info.id, n, k))
    blocks = rng.integers(0, 256, (n, k // info.block, info.block_bytes), dtype=np.uint8)
    each = blocks.shape[:2]

    def halves() -> np.ndarray:
        values = scale * rng.uniform(0.5, 1.0, each) * rng.choice([-1, 1], each)
        return values.astype(np.float16).view(np.uint8).reshape(*each, 2)

    for at in _HALVES.get(name, ()):
        blocks[..., at : at + 2] = halves()
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(120, 125, each)  # E8M0, 127 is 1
    if name == "NVFP4":
        blocks[..., :4] = rng.integers(0x08, 0x20, (*each, 4))  # E4M3, 0x38 is 1
    if name == "IQ1_M":
        # The float16 is spread over the top nibbles of four little-endian words.
        bits = halves().view(np.uint16)[..., 0]
        for i in range(4):
            nibble = ((bits >> (4 * i)) & 15).astype(np.uint8)
            blocks[..., 49 + 2 * i] = (blocks[..., 49 + 2 * i] & 15) | (nibble << 4)
    return PackedWeight(jnp.asarray(blocks), Layout(name))


def values_of(w: PackedWeight) -> np.ndarray:
    """The weight's values by the gguf package, float64 [n, k]."""
    rows = np.asarray(w.data)
    flat = rows.reshape(rows.shape[0], -1)
    return quants.dequantize(flat, GGMLQuantizationType[w.layout.type]).astype(np.float64).reshape(w.shape)
