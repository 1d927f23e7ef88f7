"""`sample`: picks the next token of each row, by selection and a two-level inverse CDF, never by a sort."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from inferax.ops.op import Op
from inferax.ops.random import uniform_pair

_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerRows:
    """Sampling parameters of each row. A neutral value switches a filter off: top_k 0, top_p 1, min_p 0."""

    temperature: Float32[Array, " R"]  # 0 is greedy
    top_k: Int32[Array, " R"]
    top_p: Float32[Array, " R"]
    min_p: Float32[Array, " R"]
    seed: UInt32[Array, "R 2"]  # low and high word
    sample_index: UInt32[Array, " R"]  # which of a request's n samples
    position: UInt32[Array, " R"]  # position of the token to be sampled


def _ordered(x: Float32[Array, "R V"]) -> Int32[Array, "R V"]:
    """Integers in the same order as the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_threshold(
    keys: Int32[Array, "R V"], enough: Callable[[Bool[Array, "R V"]], Bool[Array, "R 1"]]
) -> Int32[Array, "R 1"]:
    """The largest integer t for which `enough(keys >= t)` holds per row, by bisection over its 32 bits."""
    rows = keys.shape[0]
    low = jnp.full((rows, 1), -(2**31), jnp.int32)
    high = jnp.full((rows, 1), 2**31 - 1, jnp.int32)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # Rounds up without overflow; `low` always satisfies the condition.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        holds = enough(keys >= middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    found: Array = jax.lax.fori_loop(0, 32, halve, (low, high))[0]
    return found


def _keep_top_k(scores: Float32[Array, "R V"], top_k: Int32[Array, " R"]) -> Float32[Array, "R V"]:
    keys = _ordered(scores)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, scores.shape[1]), scores.shape[1])[:, None]
    floor = _largest_threshold(keys, lambda kept: jnp.sum(kept, axis=1, keepdims=True, dtype=jnp.int32) >= wanted)
    return jnp.where(keys >= floor, scores, -jnp.inf)


def _keep_top_p(scores: Float32[Array, "R V"], top_p: Float32[Array, " R"]) -> Float32[Array, "R V"]:
    keys = _ordered(scores)
    weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    wanted = top_p[:, None] * jnp.sum(weights, axis=1, keepdims=True)

    def enough(kept: Bool[Array, "R V"]) -> Bool[Array, "R 1"]:
        return jnp.sum(jnp.where(kept, weights, 0.0), axis=1, keepdims=True) >= wanted

    floor = jnp.minimum(_largest_threshold(keys, enough), jnp.max(keys, axis=1, keepdims=True))
    return jnp.where((keys >= floor) | (top_p >= 1.0)[:, None], scores, -jnp.inf)


def _draw(scores: Float32[Array, "R V"], rows: SamplerRows) -> Int32[Array, " R"]:
    """Inverse CDF in two levels: one uniform picks a block of the vocabulary, a second a token inside it."""
    count, vocab = scores.shape
    weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    blocks = -(-vocab // _BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - vocab))).reshape(count, blocks, _BLOCK)
    first, second = uniform_pair(rows.seed, rows.sample_index, rows.position)

    def pick(mass: Float32[Array, "R n"], u: Float32[Array, " R"]) -> Int32[Array, " R"]:
        # A parallel sum need not rise only where there is mass: blocks and tokens without any are excluded by name.
        running = jnp.cumsum(mass, axis=1)
        above = (running > (u * running[:, -1])[:, None]) & (mass > 0)
        last = mass.shape[1] - 1 - jnp.argmax((mass > 0)[:, ::-1], axis=1)
        return jnp.where(jnp.any(above, axis=1), jnp.argmax(above, axis=1), last).astype(jnp.int32)

    block = pick(jnp.sum(weights, axis=2), first)
    inside = pick(jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0], second)
    # Logits that are all NaN or masked have no right answer, but the id must be one.
    return jnp.minimum(block * _BLOCK + inside, vocab - 1)


def sample_reference(logits: Float32[Array, "R V"], rows: SamplerRows) -> Int32[Array, " R"]:
    logits = logits.astype(jnp.float32)
    greedy = jnp.argmax(logits, axis=1).astype(jnp.int32)
    drawn = rows.temperature > 0

    def stochastic() -> Int32[Array, " R"]:
        # The largest score is 0 before the division, so that no temperature overflows it.
        shifted = logits - jnp.max(logits, axis=1, keepdims=True)
        scores = shifted / jnp.where(drawn, rows.temperature, 1.0)[:, None]
        floor = jnp.log(rows.min_p)
        scores = jnp.where(scores >= floor[:, None], scores, -jnp.inf)
        scores = jax.lax.cond(jnp.any(rows.top_k > 0), lambda: _keep_top_k(scores, rows.top_k), lambda: scores)
        scores = jax.lax.cond(jnp.any(rows.top_p < 1), lambda: _keep_top_p(scores, rows.top_p), lambda: scores)
        return jnp.where(drawn, _draw(scores, rows), greedy)

    tokens: Array = jax.lax.cond(jnp.any(drawn), stochastic, lambda: greedy)
    return tokens


_sample = Op("sample", sample_reference, rows=(0, 1))


def sample(logits: Float32[Array, "R V"], rows: SamplerRows) -> Int32[Array, " R"]:
    """One token per row: greedy where the temperature is 0, else drawn from the filtered distribution.

    Filters apply in the order temperature, min_p, top_k, top_p. Tokens that tie with the last one kept are kept too.
    """
    return _sample(logits, rows)
