"""Counter-based randomness: Threefry-2x32 with 20 rounds (Salmon et al. 2011) in plain uint32 arithmetic.

A request's draws depend on its seed, its sample index and the position alone, on every backend and jax version.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(
    key: tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]], counter: tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]]
) -> tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]]:
    """Two random words for each key and counter."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << bits) | (y >> (32 - bits))
            y = y ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def uniform_pair(
    seed: UInt32[Array, "R 2"], sample_index: UInt32[Array, " R"], position: UInt32[Array, " R"], stream: int = 0
) -> tuple[Float32[Array, " R"], Float32[Array, " R"]]:
    """Two independent float32 in [0, 1) per row, multiples of 2**-24. Streams (below 16) are independent too.

    The key is the seed, the counter (sample_index xor stream << 28, position); so n is less than 2**28.
    """
    words = threefry2x32((seed[:, 0], seed[:, 1]), (sample_index ^ jnp.uint32(stream << 28), position))
    first, second = ((w >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) for w in words)
    return first, second
