"""`compute="fast"` on the CPU: int8 activations against weights in the form x16. Against numpy in float64 with the same
rounding of activations, for every type and tier; and bitwise against itself in other company."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferax.kernels.cpu import available
from inferax.ops import cpu
from inferax.ops.norm import Norm, norm_reference
from inferax.ops.packed import X16, PackedWeight, dequantize, pack
from tests.ops.test_cpu_kernels import array, assert_same, packed, per_tier, values

pytestmark = pytest.mark.skipif(not available(), reason="installed without a C++ compiler")
TYPES = sorted(X16)


def tiled(type: str, n: int, k: int, key: object = 0) -> PackedWeight:
    weight: PackedWeight = jax.tree.map(jnp.asarray, pack(packed(type, n, k, key), "cpu"))
    assert weight.layout.form == "x16"
    return weight


def rounded(x: Any) -> np.ndarray:
    """Activations as the kernels see them: whole numbers under one scale for each 32, which is such that the largest
    is 127, or the next where the largest is more than three times that."""
    groups = np.asarray(x, np.float32).reshape(*np.shape(x)[:-1], -1, 32)
    second, largest = np.moveaxis(np.sort(np.abs(groups), -1)[..., -2:, None], -2, 0)
    apart = (largest > np.float32(3) * second) & (largest > np.float32(1e-30))
    reach = np.where(apart, np.maximum(second, largest / np.float32(2**14)), largest)
    inverse = np.where(reach > 0, np.float32(127) / np.where(reach > 0, reach, 1), 0).astype(np.float32)
    numbers = np.rint(groups * inverse).astype(np.float64)
    scale = (reach / np.float32(127)).astype(np.float64)
    out: np.ndarray = (numbers * scale).reshape(np.shape(x))
    return out


def with_some_apart(x: jax.Array) -> jax.Array:
    """Some elements enlarged, by little and by much, in both halves of a group, at either sign; two in one group; and a
    group of zeros but for one."""
    rows = np.array(x)
    enlarged = [(3, 5), (21, -9), (40, 1e3), (63, -1e7), (64, 3e3), (95, 3e3), (100, 2), (130, 50)]
    for i, (column, by) in enumerate(enlarged):
        rows[i % 3 :: 3, column] *= by
    rows[1::2, 160:192] = 0
    rows[1::2, 177] = -2.5
    return jnp.asarray(rows)


def silu(y: np.ndarray) -> np.ndarray:
    return y * (1 + np.tanh(y / 2)) / 2


def fast(
    x: Any, w: Any, norm: Any = None, bias: Any = None, residual: Any = None, post: Any = None, **more: Any
) -> Any:
    static = {"activation": None, "scale": 1.0, "compute": "fast"} | more
    return cpu.linear(x, w, norm, bias, residual, post, **static)


def close(actual: Any, want: np.ndarray, size: np.ndarray | float) -> None:
    """Two roundings for each group: an error of some units in the last place of the sum of sizes."""
    assert np.all(np.abs(np.asarray(actual) - want) <= 2e-6 * size), np.max(np.abs(np.asarray(actual) - want) / size)


@pytest.mark.parametrize("type", TYPES)
def test_products_of_every_type_on_every_tier(type: str) -> None:
    w = tiled(type, 48, 1280)
    x = with_some_apart(array(21, 1280, key=type))
    exact, wide = rounded(x), values(w).astype(np.float64)
    results = per_tier(fast, x, w)
    for result in results:
        close(result, exact @ wide.T, np.abs(exact) @ np.abs(wide).T)
    for result in results[2:]:  # whole numbers first: all tiers with a fused multiply-add agree
        assert_same(result, results[1])


@pytest.mark.parametrize("type", TYPES)
def test_a_row_is_bitwise_the_same_in_any_company(type: str) -> None:
    w = tiled(type, 32, 1024)
    x = with_some_apart(array(70, 1024, key="company"))
    whole = per_tier(fast, x, w)
    for count in (1, 2, 7, 8, 9, 17):
        for tier, part in enumerate(per_tier(fast, x[5 : 5 + count], w)):
            assert_same(part, whole[tier][5 : 5 + count])
    threads = jax.jit(lambda x: [fast(x, w, threads=n) for n in (1, 2, 3)])(x)
    for result in threads:
        assert_same(result, whole[-1])


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q6_K", "IQ4_XS"])
def test_everything_around_the_product(type: str) -> None:
    """Norm in front; bias, activation, scale, residual, and a norm behind."""
    n, k = 64, 512
    w, x = tiled(type, n, k), array(11, k, key="x")
    norm = Norm(1 + array(k, key="n") / 4, array(k, key="nb") / 4, 1e-5, "layer")
    post = Norm(1 + array(n, key="p") / 4, None, 1e-5, "rms")
    bias, residual = array(n, key="b"), array(11, n, key="r")
    normed = rounded(norm_reference(x, norm))
    got = np.asarray(fast(x, w, norm, bias, residual, post, activation="silu", scale=0.5))
    y = normed @ values(w).astype(np.float64).T + np.asarray(bias)
    y = silu(y)
    y = np.asarray(norm_reference(jnp.asarray(y, jnp.float32), post)) * 0.5 + np.asarray(residual)
    # A code at the edge between two may fall to either side where the norm's last bit differs.
    assert np.mean(np.abs(got - y)) < 2e-3 and np.max(np.abs(got - y)) < 0.05


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("Q4_0", "float32"), ("Q8_0", "IQ2_XS")])
def test_parts_of_several_types(types: tuple[str, str]) -> None:
    """A tiled part beside one that is tiled in another way, or not at all."""
    first = tiled(types[0], 32, 512)
    second: Any = array(16, 512, key="w")
    if types[1] != "float32":
        second = packed(types[1], 16, 512)
        second = jax.tree.map(jnp.asarray, pack(second, "cpu"))
    x = array(9, 512, key="x")
    got = np.asarray(fast(x, (first, second)))
    assert_same(got[:, :32], fast(x, first))
    assert_same(got[:, 32:], fast(x, second))


def gated(x: Any, gate_up: Any, down: Any, **more: Any) -> Any:
    static = {"activation": "silu", "scale": 1.0, "compute": "fast"} | more
    return cpu.gated_mlp(x, gate_up, down, None, None, None, None, None, **static)


@pytest.mark.parametrize("types", [("Q4_1", "Q4_1"), ("Q4_K", "Q6_K"), ("Q8_0", "float32"), ("float32", "Q5_0")])
def test_gated_mlp(types: tuple[str, str]) -> None:
    d, f = 256, 512
    make = [array(n, k, key=n) / 16 if t == "float32" else tiled(t, n, k) for t, n, k in
            ((types[0], 2 * f, d), (types[1], d, f))]  # fmt: skip
    x = array(19, d, key="x")
    as_seen = [np.asarray(x, np.float64) if t == "float32" else rounded(x) for t in types]
    both = as_seen[0] @ values(make[0]).astype(np.float64).T
    hidden = silu(both[:, :f]) * both[:, f:]
    want_hidden = hidden if types[1] == "float32" else rounded(hidden)
    want = want_hidden @ values(make[1]).astype(np.float64).T
    for tier, got in enumerate(per_tier(gated, x, *make)):
        error = np.abs(np.asarray(got) - want)
        assert np.mean(error) < 2e-3 * np.abs(want).mean(), (tier, np.mean(error))
    whole = per_tier(gated, x, *make)
    for tier, part in enumerate(per_tier(gated, x[3:5], *make)):
        assert_same(part, whole[tier][3:5])


def test_logprobs_are_those_of_the_logits() -> None:
    """The log-sum-exp is over the logits that `linear` gives, to the last bit."""
    head = tiled("Q4_1", 1008, 256)
    x, ids = array(13, 256, key="x"), jnp.asarray(np.arange(26).reshape(13, 2) * 31, jnp.int32)
    norm = Norm(1 + array(256, key="n") / 4, None, 1e-5, "rms")
    logits = np.asarray(fast(x, head, norm), np.float64)
    chosen, lse = cpu.logprobs(x, head, norm, ids, softcap=None, scale=1.0, compute="fast")
    want = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    np.testing.assert_allclose(np.asarray(lse), want, rtol=1e-6)
    np.testing.assert_allclose(
        np.asarray(chosen), np.take_along_axis(logits, np.asarray(ids), 1) - want[:, None], atol=2e-6
    )


@pytest.mark.parametrize("type", TYPES)
def test_exact_and_embed_read_the_same_values_from_either_form(type: str) -> None:
    plain = packed(type, 48, 512)
    w = jax.tree.map(jnp.asarray, pack(plain, "cpu"))
    x, ids = array(6, 512, key="x"), jnp.asarray([0, 15, 16, 47, -1], jnp.int32)
    for a, b in zip(per_tier(fast, x, w, compute="exact"), per_tier(fast, x, plain, compute="exact"), strict=True):
        assert_same(a, b)
    for a, b in zip(per_tier(cpu.embed, ids, w, scale=2.0), per_tier(cpu.embed, ids, plain, scale=2.0), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    w = tiled("Q4_1", 16, 256)
    x = array(3, 256, key="x").at[1, 77].set(bad)
    for got in per_tier(fast, x, w):
        assert np.all(np.isnan(np.asarray(got)[1])) and np.all(np.isfinite(np.asarray(got)[[0, 2]]))


def test_zeros_and_numbers_of_any_size() -> None:
    w = tiled("Q8_0", 16, 256)
    x = array(3, 256, key="x").at[1].set(0.0)
    for got in per_tier(fast, x, w):
        assert np.all(np.asarray(got)[1] == 0)
    wide = values(w).astype(np.float64)
    for size in (1e-30, 1e30):
        exact = rounded(np.asarray(x) * np.float32(size))
        for got in per_tier(fast, x * size, w):
            close(got, exact @ wide.T, np.abs(exact) @ np.abs(wide).T + 1e-300)


def test_the_meaning_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding activations moves a product by what int8 can hold, and no more."""
    w, x = tiled("Q4_K", 256, 2048), array(32, 2048, key="x")
    exact = np.asarray(x, np.float64) @ np.asarray(dequantize(w), np.float64).T
    got = np.asarray(fast(x, w), np.float64)
    assert np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)) < 0.01


def test_rows_beyond_the_count_are_not_computed() -> None:
    """The wanted ones are bitwise the same, whatever the others hold; with floats as with int8."""
    x, residual = array(40, 256, key="x"), array(40, 48, key="r")
    for w, compute in ((tiled("Q4_1", 48, 256), "fast"), (array(48, 256, key="w"), "exact")):
        whole = jax.jit(
            lambda x, r, w=w, c=compute: cpu.linear(x, w, None, None, r, None, activation=None, scale=1.0, compute=c)
        )
        some = jax.jit(
            lambda x, r, n, w=w, c=compute: cpu.linear(
                x, w, None, None, r, None, n, activation=None, scale=1.0, compute=c
            )
        )
        want = np.asarray(whole(x, residual))
        for count in (0, 1, 7, 8, 9, 39, 40, 99):
            got = np.asarray(some(x.at[count:].set(np.nan), residual, jnp.int32(count)))
            assert_same(got[:count], want[:count])
            assert np.all(got[count:] == 0)
    gate_up, down = tiled("Q4_0", 128, 256), tiled("Q8_0", 256, 64)
    mlp = jax.jit(
        lambda x, n: cpu.gated_mlp(
            x, gate_up, down, None, None, None, None, None, n, activation="silu", scale=1.0, compute="fast"
        )
    )
    assert_same(mlp(x.at[11:].set(np.nan), jnp.int32(11))[:11], mlp(x, jnp.int32(40))[:11])
