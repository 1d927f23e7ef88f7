"""The native CPU kernels: each against its op's reference, and bitwise against itself in other company."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from inferax.kernels.cpu import available
from inferax.models import decoder
from inferax.models.config import LayerSpec, ModelConfig
from inferax.models.weights import weight_entries
from inferax.ops import cpu
from inferax.ops.attention import AttentionSpec, attention, attention_reference
from inferax.ops.batch import Batch
from inferax.ops.cache import read_kv, write_kv
from inferax.ops.ggml import TYPES
from inferax.ops.linear import (
    embed,
    embed_reference,
    gated_mlp,
    gated_mlp_reference,
    linear,
    linear_reference,
)
from inferax.ops.logprobs import logprobs, logprobs_reference
from inferax.ops.norm import Norm, norm, norm_reference
from inferax.ops.packed import Layout, PackedWeight, dequantize
from inferax.ops.rotary import RotarySpec, rotary_reference
from tests.ops import oracles
from tests.ops.batches import leaf_of
from tests.ops.suite import quick_jit

pytestmark = pytest.mark.skipif(not available(), reason="installed without a C++ compiler")

TIERS = range(len(cpu.tiers())) if available() else range(0)
PLAIN = dict(norm=None, bias=None, residual=None, post_norm=None)
# Float32 sums of k products in 16 lanes: relative to the sum of |x||w|.
TOLERANCE = 1e-6
# Where the float scales of a block stand: kind and byte offsets.
HALVES = {
    **dict.fromkeys(["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S"], (0,)),
    **dict.fromkeys(["IQ3_XXS", "IQ3_S", "IQ1_S", "Q1_0", "Q2_0"], (0,)),
    **dict.fromkeys(["Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q8_1"], (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
}


def rng(*key: object) -> np.random.Generator:
    return np.random.default_rng(list(str(key).encode()))


def array(*shape: int, key: object = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng(shape, key).normal(size=shape), dtype)


def packed(type: str, n: int, k: int, key: object = 0) -> PackedWeight:
    """Random codes under scales of a usual size."""
    info, random = TYPES[type], rng(type, n, k, key)
    blocks = random.integers(0, 256, (n, k // info.block, info.block_bytes), dtype=np.uint8)
    shape = blocks.shape[:2]
    for at in HALVES.get(type, ()):
        scales = (random.normal(size=shape) / 50).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if type == "IQ1_M":  # the float16's nibbles stand in the top of four words
        bits = (random.normal(size=shape) / 50).astype(np.float16).view(np.uint16)
        for i in range(4):
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | (((bits >> 4 * i) & 15) << 4).astype(np.uint8)
    if type == "Q8_K":
        blocks[..., :4] = (random.normal(size=shape) / 50).astype(np.float32)[..., None].view(np.uint8)
    if type == "MXFP4":
        blocks[..., 0] = random.integers(110, 130, shape)
    return PackedWeight(jnp.asarray(blocks), Layout(type))


def weight(type: str, n: int, k: int, key: object = 0) -> Any:
    return packed(type, n, k, key) if type in TYPES else array(n, k, key=key, dtype=type)


def values(w: Any) -> np.ndarray:
    return np.asarray(dequantize(w) if isinstance(w, PackedWeight) else w.astype(jnp.float32))


def assert_same(actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def per_tier(function: Callable[..., Any], *operands: Any, **static: Any) -> list[Any]:
    """What each tier gives; one program for all."""

    def every(*operands: Any) -> list[Any]:
        return [function(*operands, **static, tier=tier) for tier in TIERS]

    results: list[Any] = quick_jit(every)(*operands)
    return results


def native_linear(
    x: Any, w: Any, norm: Any = None, bias: Any = None, residual: Any = None, post: Any = None, **kw: Any
):
    return cpu.linear(x, w, norm, bias, residual, post, **({"activation": None, "scale": 1.0, "compute": "exact"} | kw))


ALL_TYPES = [*TYPES, "float32", "bfloat16", "float16"]


@pytest.mark.parametrize("type", ALL_TYPES)
def test_embed_gives_the_reference_values_bitwise(type: str) -> None:
    w = weight(type, 19, 512)
    ids = jnp.asarray([0, 18, 7, 7, -1, 40, 3], jnp.int32)
    for out in per_tier(cpu.embed, ids, w, scale=1.0):
        assert_same(out, values(w)[[0, 18, 7, 7, 18, 18, 3]])


def test_embed_keeps_subnormal_values() -> None:
    w = jnp.asarray(rng().integers(0, 1 << 20, (4, 32)), jnp.uint32).view(jnp.float32)
    for out in per_tier(cpu.embed, jnp.arange(4, dtype=jnp.int32), w, scale=1.0):
        np.testing.assert_array_equal(np.asarray(out).view(np.uint32), np.asarray(w).view(np.uint32))


@pytest.mark.parametrize("type", ALL_TYPES)
def test_linear_of_every_type(type: str) -> None:
    """Against float64, for a vector and for more rows than a register block; a row is the same in both."""
    w, x = weight(type, 45, 512), array(13, 512)
    wide = values(w).astype(np.float64)
    expected = np.asarray(x, np.float64) @ wide.T
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(wide).T
    every = per_tier(native_linear, x, w)
    for many, one in zip(every, per_tier(native_linear, x[5:6], w), strict=True):
        assert np.all(np.abs(many - expected) <= TOLERANCE * size)
        assert_same(one[0], many[5])
    # The tiers that multiply and add in one rounding have the order of the sums in common, and so the result.
    for many in every[2:]:
        assert_same(many, every[1])


@pytest.mark.parametrize("type", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "m, n, k", [(1, 1, 1), (1, 7, 33), (5, 3, 15), (0, 4, 8), (3, 0, 8), (9, 37, 100), (2, 5, 4100)]
)
def test_linear_of_odd_sizes(type: str, m: int, n: int, k: int) -> None:
    w, x = weight(type, n, k), array(m, k)
    wide = values(w).astype(np.float64)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(wide).T
    for out in per_tier(native_linear, x, w):
        assert out.shape == (m, n)
        assert np.all(np.abs(out - np.asarray(x, np.float64) @ wide.T) <= TOLERANCE * size)


NORMS = {
    "rms": lambda d: Norm(array(d, key="w"), eps=1e-5),
    "layer": lambda d: Norm(array(d, key="w"), array(d, key="b"), eps=1e-5, kind="layer"),
}
FEATURES: list[dict[str, Any]] = [
    dict(norm="rms"),
    dict(norm="layer", bias=True),
    dict(activation="silu", bias=True, scale=0.3),
    dict(activation="gelu", residual=True),
    dict(activation="gelu_tanh", norm="rms", post="rms", residual=True, scale=2.0),
    dict(activation="relu", post="layer", bias=True),
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(f))
@pytest.mark.parametrize("parts", [("float32",), ("Q4_K", "Q6_K"), ("bfloat16", "Q8_0", "float32")], ids="+".join)
def test_linear_with_all_that_is_fused(parts: tuple[str, ...], features: dict[str, Any]) -> None:
    k = 256 if any(p in TYPES for p in parts) else 90
    sizes = (21, 6, 10)[: len(parts)]
    w = tuple(weight(p, n, k, key=n) for p, n in zip(parts, sizes, strict=True))
    n, m = sum(sizes), 5
    x = array(m, k) / 4
    vectors = (
        NORMS[features["norm"]](k) if "norm" in features else None,
        array(n, key="bias") if "bias" in features else None,
        array(m, n, key="residual") if "residual" in features else None,
        NORMS[features["post"]](n) if "post" in features else None,
    )
    static = dict(activation=features.get("activation"), scale=features.get("scale", 1.0), compute="exact")
    expected = quick_jit(partial(linear_reference, **static))(x, w, *vectors)
    for out in per_tier(native_linear, x, w, *vectors, **static):
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    if "post" not in features:
        piece = native_linear(
            x[2:3], w, vectors[0], vectors[1], None if vectors[2] is None else vectors[2][2:3], **static
        )
        assert_same(piece[0], out[2])


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_their_range(activation: str) -> None:
    x = np.concatenate([np.linspace(-8, 8, 4001), np.linspace(-1, 1, 4001), [0.0, 1e-20, -1e-20, 30, 80]])[:, None]
    x = x.astype(np.float32)
    expected = np.vectorize(ACTIVATIONS[activation])(x.astype(np.float64))
    for out in per_tier(native_linear, x, jnp.ones((1, 1)), activation=activation):
        np.testing.assert_allclose(out, expected, rtol=5e-6, atol=1e-9)
    edges = np.asarray([[-np.inf], [-1e30], [-100.0], [1e30], [np.inf], [np.nan]], np.float32)
    for out in per_tier(native_linear, edges, jnp.ones((1, 1)), activation=activation):
        np.testing.assert_array_equal(np.asarray(out)[1:, 0], np.float32([0, 0, 1e30, np.inf, np.nan]))


@pytest.mark.parametrize(
    "features", [dict(), dict(norm="rms", bias=True, residual=True), dict(post="rms", scale=0.5)], ids=str
)
@pytest.mark.parametrize("types", [("float32",) * 3, ("Q4_1",) * 3, ("Q4_K", "Q6_K", "bfloat16")], ids="+".join)
def test_gated_mlp(types: tuple[str, ...], features: dict[str, Any]) -> None:
    d, f, m = (256, 512, 5) if types[0] == "Q4_K" else (96, 160, 5) if types[0] == "Q4_1" else (50, 37, 5)
    gate_up = (
        (weight(types[0], f, d, 1), weight(types[1], f, d, 2)) if types[0] != types[1] else weight(types[0], 2 * f, d)
    )
    down = weight(types[2], d, f, 3)
    x = array(m, d) / 4
    vectors = (
        NORMS["rms"](d) if "norm" in features else None,
        array(2 * f, key="bias") if "bias" in features else None,
        array(d, key="bias") if "bias" in features else None,
        array(m, d, key="residual") if "residual" in features else None,
        NORMS["rms"](d) if "post" in features else None,
    )
    static = dict(activation="silu", scale=features.get("scale", 1.0), compute="exact")
    expected = quick_jit(partial(gated_mlp_reference, **static))(x, gate_up, down, *vectors)
    rows = [None if v is None else v[3:4] if v is vectors[3] else v for v in vectors]
    for out, one in zip(
        per_tier(cpu.gated_mlp, x, gate_up, down, *vectors, **static),
        per_tier(cpu.gated_mlp, x[3:4], gate_up, down, *rows, **static),
        strict=True,
    ):
        np.testing.assert_allclose(out, expected, rtol=3e-5, atol=3e-5 * float(jnp.abs(expected).max()))
        assert_same(one[0], out[3])


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 3, 64), (0, 8), (70, 576)], ids=str)
def test_norm(kind: str, shape: tuple[int, ...]) -> None:
    weights, x = NORMS[kind](shape[-1]), array(*shape) + 0.5
    expected = norm_reference(x, weights)
    for out, some in zip(per_tier(cpu.norm, x, weights), per_tier(cpu.norm, x[1:2], weights), strict=True):
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
        assert_same(some, out[1:2])


@pytest.mark.parametrize(
    "type, k",
    [
        ("float32", 96),
        ("float32", 33),
        ("bfloat16", 96),
        ("Q4_1", 96),
        ("Q6_K", 256),
        ("float32", 2048),
        ("Q4_1", 1600),
    ],
)
def test_a_row_does_not_depend_on_its_company(type: str, k: int) -> None:
    """Whatever the number of rows, the place among them, and the number of threads."""
    w, x = weight(type, 200, k), array(64, k)
    static = dict(norm=NORMS["rms"](k), post=NORMS["rms"](200), activation="silu")

    def every(x: jax.Array) -> list[Any]:
        outs = []
        for tier in TIERS:
            for m in (1, 2, 3, 7, 16, 64):
                outs.append(
                    [native_linear(x[64 - m :], w, threads=threads, tier=tier, **static) for threads in (0, 1, 3)]
                )
        return outs

    outs = jax.jit(every)(x)
    for i, sizes in enumerate(outs):
        whole = outs[i // 6 * 6 + 5][0]
        for out in sizes:
            assert_same(out, whole[64 - out.shape[0] :])


# Attention.


def paged(
    seqs: list[tuple[int, int]],
    *,
    heads: tuple[int, int, int],
    page_size: int = 5,
    tokens: int | None = None,
    slots: int | None = None,
    pages_per_seq: int | None = None,
    dtype: Any = jnp.float32,
    key: object = 0,
) -> tuple[jax.Array, jax.Array, Batch]:
    """qkv, cache and batch of sequences (computed, new). What a sequence holds depends on its index and `key` alone;
    everything else in the cache and every padding row is NaN."""
    h, k, e = heads
    longest = max(-(-(c + n) // page_size) for c, n in seqs)
    pages_per_seq = pages_per_seq or longest
    total = sum(n for _, n in seqs)
    tokens, slots = tokens or total, slots or len(seqs)
    pages = sum(-(-(c + n) // page_size) for c, n in seqs) + 3
    free = iter(rng(seqs, page_size).permutation(pages))
    cache = np.full((pages, page_size, 2, k, e), np.nan, np.float32)
    qkv = np.full((tokens, (h + 2 * k) * e), np.nan, np.float32)
    table, position = np.zeros((slots, pages_per_seq), np.int32), np.zeros(tokens, np.int32)
    slot, start, context = np.full(tokens, -1, np.int32), np.zeros(slots + 1, np.int32), np.zeros(slots, np.int32)
    row = 0
    for s, (computed, new) in enumerate(seqs):
        known = rng("kv", s, key).normal(size=(computed + new, (h + 2 * k) * e)).astype(np.float32)
        for i in range(-(-(computed + new) // page_size)):
            table[s, i] = next(free)
        for p in range(computed):
            cache[table[s, p // page_size], p % page_size] = known[p, h * e :].reshape(2, k, e)
        for p in range(computed, computed + new):
            qkv[row], position[row] = known[p], p
            slot[row] = table[s, p // page_size] * page_size + p % page_size
            row += 1
        start[s + 1], context[s] = row, computed + new
    start[len(seqs) + 1 :] = row
    batch = Batch(
        tokens=jnp.zeros(tokens, jnp.int32),
        positions=jnp.asarray(position),
        query_start=jnp.asarray(start),
        context_len=jnp.asarray(context),
        prompt_len=jnp.asarray(context),
        num_tokens=jnp.int32(row),
        num_seqs=jnp.int32(len(seqs)),
        page_table=(jnp.asarray(table),),
        slots=(jnp.asarray(slot),),
        state_slot=jnp.zeros(slots, jnp.int32),
        sample_rows=jnp.zeros(1, jnp.int32),
    )
    return jnp.asarray(qkv), leaf_of(cache, dtype), batch


def attend(spec: AttentionSpec, qkv: Any, cache: Any, batch: Batch, *rest: Any, **how: Any) -> tuple[Any, Any]:
    rest = (*rest, *(None,) * (3 - len(rest)))
    return jax.jit(lambda *a: cpu.attention(*a, spec=spec, **how))(qkv, cache, batch, *rest)


VARIANTS: list[dict[str, Any]] = [
    dict(),
    dict(window=7, sinks=True),
    dict(softcap=3.0, rotary=8, scale=-0.2),
    dict(qk_norm="head", rotary=24, interleaved=True),
    dict(qk_norm="full", rotary=16, window=100, softcap=20.0),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v) or "plain")
@pytest.mark.parametrize(
    "heads, dtype",
    [
        ((4, 2, 24), jnp.float32),
        ((3, 1, 64), jnp.bfloat16),
        ((2, 2, 40), jnp.float16),
        ((6, 2, 80), jnp.int8),
        ((2, 1, 256), jnp.float8_e4m3fn),
    ],
    ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else v.__name__,
)
def test_attention(heads: tuple[int, int, int], variant: dict[str, Any], dtype: Any) -> None:
    h, k, e = heads
    seqs = [(0, 7), (69, 1), (130, 9), (0, 1), (530, 2), (30, 50)]
    qkv, cache, batch = paged(seqs, heads=heads, tokens=80, slots=8, dtype=dtype)
    spec = AttentionSpec(
        h, k, e, scale=variant.get("scale", 0.25), window=variant.get("window"), softcap=variant.get("softcap"),
        rotary_interleaved=variant.get("interleaved", False),
    )  # fmt: skip
    angles, norms, sinks = None, None, None
    if "rotary" in variant:
        angles = rotary_reference(batch.positions, batch.positions + 1, spec=RotarySpec(dim=variant["rotary"]))
    if "qk_norm" in variant:
        widths = (e, e) if variant["qk_norm"] == "head" else (h * e, k * e)
        norms = tuple(Norm(array(w, key=w)) for w in widths)
    if "sinks" in variant:
        sinks = array(h)
    # In the cache's own values, so that both read the same: rounding of what is written is compared below.
    expected, written = quick_jit(partial(attention_reference, spec=spec))(qkv, cache, batch, angles, norms, sinks)
    outs = jax.jit(lambda *a: [cpu.attention(*a, spec=spec, tier=tier, threads=n) for tier in TIERS for n in (0, 1)])(
        qkv, cache, batch, angles, norms, sinks
    )
    # A key may be rounded to the other side where normalization or rotation differ in the last bit.
    loose = dtype != jnp.float32 and ("qk_norm" in variant or "rotary" in variant)
    relative, absolute = {jnp.int8: (1e-5, 4e-2), jnp.float8_e4m3fn: (0.13, 1e-2)}.get(dtype, (2e-2, 1e-2))
    for i, (out, leaf) in enumerate(outs):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-2 if loose else 5e-6)
        assert np.all(np.asarray(out)[int(batch.num_tokens) :] == 0)
        got, want = oracles.decode_kv(np.asarray(leaf)), oracles.decode_kv(np.asarray(written))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got, want, rtol=relative if loose else 2e-5, atol=absolute if loose else 2e-6)
        assert np.mean(np.isclose(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)) > 0.999
        if norms is None and angles is None:
            assert np.asarray(leaf).tobytes() == np.asarray(written).tobytes()
        if i % 2:
            assert_same(out, outs[i - 1][0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_keys_are_rounded_as_jax_rounds(dtype: Any) -> None:
    """Ties, subnormal results, overflow and the largest numbers."""
    numbers = rng().integers(0, 1 << 32, 4096, dtype=np.uint32)
    edges = np.array(
        [0, 1, 0x33000000, 0x33000001, 0x387FE000, 0x387FF000, 0x477FEFFF, 0x477FF000, 0x7F7FFFFF], np.uint32
    )
    near = (np.uint32(0x3F800000) + np.arange(0, 1 << 16, 1 << 11, dtype=np.uint32)).astype(np.uint32)
    bits = np.concatenate([edges, edges | 0x80000000, near, numbers])[: 4096 // 32 * 32]
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x), x, 1.0).astype(np.float32).reshape(-1, 16)
    rows = x.shape[0] // 2 * 2
    qkv, cache, batch = paged([(0, rows // 2)], heads=(1, 1, 16), dtype=dtype)
    qkv = jnp.asarray(
        np.concatenate([np.zeros((rows // 2, 16), np.float32), x[: rows // 2], x[rows // 2 : rows]], axis=1)
    )
    _, leaf = attend(AttentionSpec(1, 1, 16, scale=0.0), qkv, cache, batch)
    kept = np.asarray(leaf.reshape(-1, 2, 16)[batch.slots[0]].astype(jnp.float32))
    expected = np.asarray(qkv[:, 16:].reshape(-1, 2, 16).astype(dtype).astype(jnp.float32))
    np.testing.assert_array_equal(kept.view(np.uint32), expected.view(np.uint32))


def heads_to_round(limit: float, e: int) -> np.ndarray:
    """Heads [n, e] at the edges of a type of codes: every tie, both signs, and scales that are none."""
    codes = np.arange(128, dtype=np.uint8)
    levels = codes.astype(np.float32) if limit == 127 else codes[:127].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (levels[1:] + levels[:-1]) / 2
    near = np.concatenate([levels, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))])
    near = np.concatenate([near, -near, np.zeros(-2 * len(near) % (e - 1), np.float32)]).reshape(-1, e - 1)
    # Led by the limit, each of these numbers is its own code, or just between two.
    exact = np.concatenate([np.full((len(near), 1), limit, np.float32), near], axis=1)
    drawn = rng(limit).normal(size=(200, e)) * np.exp(rng(e).uniform(-60, 60, (200, 1)))
    scales = [
        0.0,
        -0.0,
        1e-44,
        1e-38,
        2.0**-100 * limit,
        np.nextafter(np.float32(2.0**-100 * limit), np.float32(0)),
        3e38,
    ]
    edges = rng(0).uniform(-1, 1, (len(scales), e)) * np.array(scales)[:, None]
    edges[:, 3] = scales
    spoiled = np.repeat(rng(1).normal(size=(1, e)), 4, axis=0)
    spoiled[range(4), range(4)] = [np.nan, -np.nan, np.inf, -np.inf]
    heads = np.concatenate([exact, drawn, edges, spoiled, exact[:1]]).astype(np.float32)
    return heads[: len(heads) // 2 * 2]


@pytest.mark.parametrize("e", [16, 64, 37])
@pytest.mark.parametrize("dtype, limit", [(jnp.int8, 127.0), (jnp.float8_e4m3fn, 448.0)], ids=["int8", "float8"])
def test_codes_are_rounded_as_stated(dtype: Any, limit: float, e: int) -> None:
    """The kernel and plain JAX write bit by bit what numpy and ml_dtypes do."""
    heads = heads_to_round(limit, e)
    rows = len(heads) // 2
    _, cache, batch = paged([(0, rows)], heads=(1, 1, e), dtype=dtype)
    qkv = jnp.asarray(np.concatenate([np.zeros((rows, e), np.float32), heads.reshape(rows, 2 * e)], axis=1))
    want = oracles.encode_kv(heads.reshape(rows, 2, 1, e), np.dtype(dtype))
    _, native = attend(AttentionSpec(1, 1, e, scale=0.0), qkv, cache, batch)
    plain = jax.jit(write_kv)(cache, qkv[:, e:].reshape(rows, 2, 1, e), batch.slots[0])
    for leaf in (native, plain):
        kept = np.asarray(leaf).reshape(-1, 2, 1, e + 4)[np.asarray(batch.slots[0])]
        np.testing.assert_array_equal(kept.view(np.uint8), want.view(np.uint8))
    read = np.asarray(jax.jit(read_kv)(native, jnp.arange(len(native)))).reshape(-1, 2, 1, e)[batch.slots[0]]
    np.testing.assert_array_equal(read, oracles.decode_kv(want).astype(np.float32))
    # What is read back is near what was written, or NaN.
    good = np.isfinite(heads).all(axis=1)
    back = oracles.decode_kv(want).reshape(-1, e)
    assert np.all(np.isnan(back[~good])) and np.sum(~good) == 4
    largest = np.abs(heads[good]).max(axis=1, keepdims=True)
    step = largest / limit / 2 if limit == 127 else np.maximum(np.abs(heads[good]) / 16, largest / limit * 2.0**-10)
    assert np.all(np.abs(back[good] - heads[good]) <= step * 1.0001 + 2.0**-100 * limit)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "float8"])
def test_every_code_is_read_exactly(dtype: Any) -> None:
    """Each code as a value, and as a key: on every tier."""
    codes = np.arange(256, dtype=np.uint8)
    if dtype == jnp.float8_e4m3fn:
        codes[[0x7F, 0xFF]] = 0
    numbers = codes.view(np.dtype(dtype)).astype(np.float32)
    held = np.concatenate([codes, np.float32(0.75).reshape(1).view(np.uint8)])
    zero = np.zeros(260, np.uint8)
    # One sequence for each code: its query picks that code of the key, against a new key of zeros.
    qkv, cache, batch = paged([(1, 1)] * 256, heads=(1, 1, 256), page_size=2, dtype=dtype)
    leaf = np.array(cache).view(np.uint8)
    leaf[np.asarray(batch.page_table[0])[:, 0], 0] = np.stack([held, held])[:, None]
    leaf[np.asarray(batch.page_table[0])[:, 0], 1] = zero
    queries = np.concatenate([np.eye(256), np.zeros((256, 512))], axis=1).astype(np.float32) / 448
    operands = (jnp.asarray(queries), jnp.asarray(leaf.view(np.dtype(dtype))), batch, None, None, None)
    weight = 1 / (1 + np.exp(-0.75 * numbers.astype(np.float64) / 448))
    for out, _ in per_tier(cpu.attention, *operands, spec=AttentionSpec(1, 1, 256, scale=1.0)):
        np.testing.assert_allclose(out, weight[:, None] * 0.75 * numbers[None], rtol=1e-6)


INVARIANT = {
    "full": (AttentionSpec(4, 2, 32, scale=0.2), jnp.float32),
    "window": (AttentionSpec(4, 2, 32, scale=0.2, window=75, softcap=30.0), jnp.bfloat16),
    "int8": (AttentionSpec(4, 2, 32, scale=0.2), jnp.int8),
    "float8": (AttentionSpec(4, 2, 32, scale=0.2, window=700), jnp.float8_e4m3fn),
}


@pytest.mark.parametrize("case", INVARIANT)
def test_attention_does_not_depend_on_company_or_chunks(case: str) -> None:
    """The last row of a sequence of 1,100: by decode alone, among others, at other page sizes, in other buckets, spread
    over partitions or not, and at the end of prefill chunks."""
    spec, dtype = INVARIANT[case]
    length = 1100

    def last(seqs: list[tuple[int, int]], threads: int = 0, **how: Any) -> list[np.ndarray]:
        operands = paged(seqs, heads=(4, 2, 32), dtype=dtype, **how)
        outs = per_tier(cpu.attention, *operands, None, None, None, spec=spec, threads=threads)
        return [np.asarray(out)[seqs[0][1] - 1] for out, _ in outs]

    alone = last([(length - 1, 1)])
    assert all(np.all(np.isfinite(a)) and np.any(a) for a in alone)
    others = [
        last([(length - 1, 1)], threads=1),
        last([(length - 1, 1)], threads=3),
        last([(length - 1, 1)], tokens=16, slots=4, pages_per_seq=400),
        last([(length - 1, 1)], tokens=64),
        last([(length - 1, 1), (3, 2), (90, 1), (0, 40)]),
        *(last([(length - 1, 1)], page_size=page_size) for page_size in (1, 16, 512)),
        *(last([(length - chunk, chunk)]) for chunk in (2, 16, 150, length)),
    ]
    for other in others:
        for a, b in zip(alone, other, strict=True):
            assert_same(b, a)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.float8_e4m3fn], ids=lambda d: d.__name__)
def test_attention_writes_in_place(dtype: Any) -> None:
    """Donated, the cache is aliased and never copied."""
    spec = AttentionSpec(4, 2, 32, scale=0.2)
    qkv, cache, batch = paged([(40, 1)], heads=(4, 2, 32), tokens=16, slots=8, dtype=dtype)
    step = jax.jit(lambda q, c, b: attention(q, c, b, spec), donate_argnums=1).lower(qkv, cache, batch).compile()
    text = step.as_text()
    assert "inferax_attention_v1" in text and not re.search(r"= \w+\[\d+,5,2,2,3\d\]\S* (copy|convert)\(", text)
    pointer = cache.unsafe_buffer_pointer()
    _, after = step(qkv, cache, batch)
    assert after.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize(
    "field, message", [("page", "outside the cache"), ("start", "out of order"), ("context", "longer")]
)
def test_attention_refuses_what_would_read_elsewhere(field: str, message: str) -> None:
    from dataclasses import replace

    qkv, cache, batch = paged([(40, 1), (2, 3)], heads=(4, 2, 32))
    if field == "page":
        batch = replace(batch, page_table=(batch.page_table[0].at[0, 2].set(10_000),))
    elif field == "start":
        batch = replace(batch, query_start=jnp.asarray([0, 1, 5000], jnp.int32))
    else:
        batch = replace(batch, context_len=jnp.asarray([41, 10_000], jnp.int32))
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(attend(AttentionSpec(4, 2, 32, scale=0.2), qkv, cache, batch))


def test_attention_refuses_codes_without_scales() -> None:
    qkv, cache, batch = paged([(40, 1)], heads=(4, 2, 32))
    with pytest.raises(Exception, match="disagree"):
        jax.block_until_ready(attend(AttentionSpec(4, 2, 32, scale=0.2), qkv, cache.astype(jnp.int8), batch))


# Log-probabilities and rotary.


@pytest.mark.parametrize("type, vocab, d", [("float32", 1000, 40), ("Q6_K", 777, 256), ("bfloat16", 5, 64)])
@pytest.mark.parametrize("features", [dict(), dict(softcap=5.0, scale=2.0, norm="rms")], ids=["plain", "all"])
def test_logprobs(type: str, vocab: int, d: int, features: dict[str, Any]) -> None:
    head, x = weight(type, vocab, d), array(9, d)
    ids = jnp.asarray(rng().integers(0, vocab, (9, 3)), jnp.int32)
    weights = NORMS["rms"](d) if "norm" in features else None
    static = dict(softcap=features.get("softcap"), scale=features.get("scale", 1.0))
    expected = quick_jit(partial(logprobs_reference, **static))(x, head, weights, ids)
    ones = per_tier(cpu.logprobs, x[4:5], head, weights, ids[4:5], **static)
    for out, one in zip(per_tier(cpu.logprobs, x, head, weights, ids, **static), ones, strict=True):
        np.testing.assert_allclose(out[0], expected[0], rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(out[1], expected[1], rtol=1e-5, atol=2e-5)
        assert_same(one[0][0], out[0][4])
        assert_same(one[1][0], out[1][4])


def test_logprobs_of_many_rows_are_those_of_few() -> None:
    head, x, ids = weight("Q4_1", 600, 64), array(300, 64), jnp.zeros((300, 1), jnp.int32)
    every = jax.jit(lambda x, i: cpu.logprobs(x, head, None, i, softcap=None, scale=1.0, threads=2))(x, ids)
    few = cpu.logprobs(x[290:293], head, None, ids[290:293], softcap=None, scale=1.0, threads=1)
    assert_same(few[1], every[1][290:293])


@pytest.mark.parametrize(
    "spec",
    [
        RotarySpec(dim=32),
        RotarySpec(dim=32, kind="linear", factor=4.0),
        RotarySpec(dim=32, kind="dynamic", factor=2.0, original_length=100),
        RotarySpec(dim=32, kind="yarn", factor=4.0, original_length=100, attention_factor=1.2),
        RotarySpec(dim=32, kind="llama3", factor=8.0, original_length=100),
        RotarySpec(
            dim=8,
            kind="longrope",
            original_length=100,
            short_factors=(1.0, 1.1, 1.2, 1.3),
            long_factors=(2.0, 3.0, 4.0, 5.0),
        ),
    ],
    ids=lambda s: s.kind,
)
def test_rotary(spec: RotarySpec) -> None:
    positions = jnp.asarray([0, 1, 99, 100, 101, 5000], jnp.int32)
    got = quick_jit(partial(cpu.rotary, spec=spec))(positions, positions + 1)
    expected = rotary_reference(positions, positions + 1, spec=spec)
    for a, b in zip(got, expected, strict=True):
        # An angle of 5,000 has an error of half a unit in its last place, 2.4e-4.
        np.testing.assert_allclose(a, b, atol=1e-3 if spec.kind == "dynamic" else 2e-6)
        assert_same(quick_jit(partial(cpu.rotary, spec=spec))(positions[3:4], positions[3:4] + 1)[0][0], got[0][3])


# Through the ops.


def test_ops_take_the_kernels_under_jit_vmap_and_grad() -> None:
    w, x = weight("Q4_0", 24, 64), array(6, 64)

    def targets(f: Callable[..., Any], *operands: Any) -> int:
        return jax.jit(f).lower(*operands).compile().as_text().count('custom_call_target="inferax_linear_v2"')

    assert targets(lambda x: linear(x, w), x) == 1
    assert targets(jax.vmap(lambda x: linear(x, w)), x[None]) == 1
    assert (
        targets(jax.grad(lambda x: jnp.sum(linear(x, w) ** 2)), x) == 1
    )  # the primal; its gradient is the reference's
    eager = linear(x, w)
    assert_same(jax.vmap(lambda x: linear(x, w))(x.reshape(2, 3, 64)).reshape(6, 24), eager)
    assert_same(jax.jit(lambda x: linear(x, w))(x), eager)
    assert_same(jax.value_and_grad(lambda x: linear(x, w)[0, 0])(x)[0], eager[0, 0])
    got = jax.grad(lambda x: jnp.sum(linear(x, w) ** 2))(x)
    plain = partial(linear_reference, activation=None, scale=1.0, compute="exact")
    expected = jax.grad(lambda x: jnp.sum(plain(x, w, None, None, None, None) ** 2))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_every_op_has_its_kernel() -> None:
    x, ids = array(4, 32), jnp.zeros(4, jnp.int32)
    w, weights = array(32, 32), NORMS["rms"](32)
    programs = {
        "linear": lambda: linear(x, w, norm=weights),
        "gated_mlp": lambda: gated_mlp(x, array(64, 32), w, activation="silu"),
        "embed": lambda: embed(ids, w),
        "norm": lambda: norm(x, weights),
        "logprobs": lambda: logprobs(x, w, ids[:, None]),
    }
    for name, program in programs.items():
        assert re.search(rf"inferax_{name}_v\d", jax.jit(program).lower().as_text()), name


def test_a_step_is_four_calls_per_layer_and_sums_nothing_outside() -> None:
    def program(num_layers: int) -> str:
        config = ModelConfig(
            family="tiny", vocab_size=64, width=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=48,
            context_length=64, layers=(LayerSpec(),) * num_layers, rotaries=(RotarySpec(16),), norm_eps=1e-5,
            qk_norm=True, post_norms=True,
        )  # fmt: skip
        params: dict[str, Any] = {"layers": [{} for _ in range(num_layers)]}
        for entry in weight_entries(config):
            leaf = jax.ShapeDtypeStruct(entry.shape, jnp.float32)
            if len(entry.path) == 1:
                params[str(entry.path[0])] = leaf
            else:
                params["layers"][entry.path[1]][entry.path[2]] = leaf  # type: ignore[index]
        tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
        return (
            jax.jit(partial(decoder.apply, config))
            .lower(params | {"layers": tuple(params["layers"])}, tokens)
            .as_text()
        )

    one, three = program(1), program(3)
    assert three.count("@inferax_") - one.count("@inferax_") == 2 * 4
    assert not re.search(r"stablehlo\.(dot_general|reduce)\b", three)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_packed_weight_is_never_expanded_whole() -> None:
    """The high-water mark of the process grows by far less than the weight takes in float32."""

    def high_water() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

    w = PackedWeight(jnp.zeros((8192, 128, 18), jnp.uint8), Layout("Q4_0"))
    for m in (1, 40):
        step = jax.jit(lambda x, w: linear(x, w)).lower(array(m, 4096), w).compile()
        x = array(m, 4096)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the mark falls to what is used now
        before = high_water()
        jax.block_until_ready(step(x, w))
        assert high_water() - before < 8192 * 4096 * 4 / 8
        assert step.memory_analysis().temp_size_in_bytes < 1 << 20


FALLBACK = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.endswith("cpu._native") else found(name, *a)
import jax, jax.numpy as jnp
from inferax.ops.linear import linear
x, w = jnp.ones((3, 8)), jnp.ones((5, 8))
assert "inferax_" not in jax.jit(lambda: linear(x, w)).lower().as_text()
assert jnp.all(linear(x, w) == 8)
print("plain")
"""


def test_without_the_extension_the_plain_lowerings_work() -> None:
    done = subprocess.run([sys.executable, "-c", FALLBACK], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "plain", done.stderr


def test_embed_reference_agrees_on_ids_outside() -> None:
    w, ids = array(5, 16), jnp.asarray([-1, 0, 4, 5, 100], jnp.int32)
    assert_same(embed(ids, w), embed_reference(ids, w, scale=1.0))
