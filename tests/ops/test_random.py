"""Threefry-2x32 against the published known answers, and the uniforms made of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferax.ops.random import threefry2x32, uniform_pair
from tests.ops import oracles

# Random123's kat_vectors, threefry 2x32 with 20 rounds: counter, key, result.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter: tuple[int, int], key: tuple[int, int], want: tuple[int, int]) -> None:
    def words(pair: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        return jnp.uint32(pair[0]), jnp.uint32(pair[1])

    for run in (threefry2x32, jax.jit(threefry2x32)):
        assert tuple(int(w) for w in run(words(key), words(counter))) == want
    assert oracles.threefry2x32(key, counter) == want


# Protects: the mapping of seed, sample index and position that every platform must share.
def test_uniforms_are_keyed_by_seed_index_and_position() -> None:
    rng = np.random.default_rng(0)
    seed = rng.integers(0, 2**32, (64, 2), dtype=np.uint32)
    index, position = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(2))
    first, second = uniform_pair(jnp.asarray(seed), jnp.asarray(index), jnp.asarray(position))
    for i in range(64):
        words = oracles.threefry2x32((int(seed[i, 0]), int(seed[i, 1])), (int(index[i]), int(position[i])))
        assert (float(first[i]), float(second[i])) == tuple((w >> 8) / 2**24 for w in words)


def test_uniforms_are_uniform_and_independent() -> None:
    count = 1 << 16
    position = jnp.arange(count, dtype=jnp.uint32)
    seed = jnp.tile(jnp.array([[7, 0]], jnp.uint32), (count, 1))
    first, second = (np.asarray(u) for u in uniform_pair(seed, jnp.zeros(count, jnp.uint32), position))
    assert first.min() >= 0 and max(first.max(), second.max()) < 1
    cells = np.histogram2d(first, second, bins=16, range=[[0, 1], [0, 1]])[0]
    chi_square = ((cells - count / 256) ** 2 / (count / 256)).sum()
    # 255 degrees of freedom: mean 255, standard deviation 22.6. The seed is fixed.
    assert 170 < chi_square < 340
