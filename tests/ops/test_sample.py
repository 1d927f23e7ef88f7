"""What `sample` promises about distributions, ties, masks and independence. tests/ops/test_ops.py checks its values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferax.ops import sample as module
from inferax.ops.sample import sample
from inferax.ops.sampler_rows import SamplerRows
from tests.ops import oracles
from tests.ops.cases import sampler_rows
from tests.ops.suite import quick_jit

V = 600


def logits_of(seed: int, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(V) * scale).astype(np.float32)


def draws(logits: np.ndarray, count: int, seed: int = 0, **values: Any) -> np.ndarray:
    """`count` draws from one row of logits, at positions 0, 1, …"""
    rows = sampler_rows(count, **{"seed": seed, "position": np.arange(count)} | values)
    return np.asarray(sample(jnp.broadcast_to(jnp.asarray(logits), (count, len(logits))), rows))


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
]


# Protects: the filters keep exactly the tokens that a sort would keep, and the draw follows the filtered distribution.
@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_distribution(given: dict[str, float]) -> None:
    count = 4096
    logits = logits_of(1)
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    # Weights as float32 sees them, so that a token at the edge of a filter is on the same side.
    full = oracles.distribution(
        logits.astype(np.float64), values["temperature"], int(values["top_k"]), values["top_p"], values["min_p"]
    )
    drawn = np.bincount(draws(logits, count, **values), minlength=V)
    assert not np.any(drawn[full == 0]), "a filtered token was drawn"
    expected = full * count
    # Rare tokens go together, as the chi-square test needs a few counts in each cell.
    common = expected >= 5
    cells = np.append(drawn[common], drawn[~common].sum())
    means = np.append(expected[common], expected[~common].sum())
    cells, means = cells[means > 0], means[means > 0]
    freedom = len(cells) - 1
    chi_square = ((cells - means) ** 2 / means).sum()
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom), (chi_square, freedom)


# Protects: every kept token can be drawn; the filter is not too narrow.
@pytest.mark.parametrize("given", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
def test_every_kept_token_is_drawn(given: dict[str, float]) -> None:
    logits = logits_of(2)
    keep = oracles.kept(logits.astype(np.float64), 1.0, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | given))  # type: ignore[arg-type]
    assert 2 <= keep.sum() <= 60
    assert set(draws(logits, 4096, **given)) == set(np.flatnonzero(keep))


# Protects: tokens that tie with the last one kept are kept too.
def test_ties_at_the_edge_are_kept() -> None:
    logits = np.full(V, -30, np.float32)
    logits[[3, 300, 301, 599]] = 2.0
    logits[5] = 3.0
    assert set(draws(logits, 512, top_k=2)) == {3, 5, 300, 301, 599}
    assert set(draws(logits, 512, top_p=0.5)) == {3, 5, 300, 301, 599}


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    np.testing.assert_array_equal(draws(logits_of(3), 512, top_k=10 * V), draws(logits_of(3), 512))


# Protects: a request's draws depend on nothing but itself.
def test_same_draw_alone_and_in_a_batch() -> None:
    count = 8
    logits = jnp.asarray(np.stack([logits_of(i) for i in range(count)]))
    rows = sampler_rows(
        count, temperature=[0, 0.8, 1, 1.2] * 2, top_k=[0, 0, 9, 0] * 2, top_p=[1, 0.9] * 4, min_p=[0, 0, 0, 0.05] * 2,
        position=list(range(count)), sample_index=[0, 1] * 4,
    )  # fmt: skip
    together = np.asarray(sample(logits, rows))
    for i in range(count):
        alone = jax.tree.map(lambda x, i=i: x[i : i + 1], rows)
        assert int(sample(logits[i : i + 1], alone)[0]) == together[i]
    order = np.random.default_rng(0).permutation(count)
    shuffled = sample(logits[order], jax.tree.map(lambda x: x[order], rows))
    np.testing.assert_array_equal(shuffled, together[order])


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"sample_index": 1}, {"position": np.arange(5000, 5512)}], ids=["seed", "index", "position"]
)
def test_draws_differ_by_seed_index_and_position(change: dict[str, Any]) -> None:
    assert np.any(draws(logits_of(4), 512, **change) != draws(logits_of(4), 512))


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.zeros((2, V), np.float32)
    logits[0, [40, 300]] = 1
    logits[1] = -np.inf
    logits[1, 7] = -50
    rows = sampler_rows(2, temperature=[0.0, 0.0])
    assert list(np.asarray(sample(jnp.asarray(logits), rows))) == [40, 7]


# Protects: a masked token is never drawn, not by rounding either, whatever else is left.
@pytest.mark.parametrize("left", [1, 2, 30, 256])
def test_masked_tokens_are_never_drawn(left: int) -> None:
    allowed = np.random.default_rng(left).choice(V, left, replace=False)
    logits = np.full(V, -np.inf, np.float32)
    logits[allowed] = logits_of(5)[allowed]
    for given in ({}, {"top_k": 500}, {"top_p": 0.999}, {"min_p": 1e-6}, {"temperature": 50.0}):
        assert set(draws(logits, 512, **given)) <= set(allowed)


# Protects: the inverse CDF at its ends and at every step, where a running sum may round either way.
@pytest.mark.parametrize("last", [False, True])
def test_no_uniform_picks_a_token_without_mass(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    logits = logits_of(6)
    logits[rng.random(V) < 0.7] = -np.inf
    logits[:3] = -np.inf
    if last:
        logits[-200:] = -np.inf
    weights = np.exp(np.where(np.isfinite(logits), logits - logits.max(), -np.inf)).astype(np.float32)
    steps = [0.0, 1 - 2**-24]
    for block in range(0, V, 256):
        running = np.cumsum(weights[block : block + 256])
        share = running / max(running[-1], np.float32(1e-30))
        steps += [float(s) for s in share] + [float(np.nextafter(s, np.float32(0))) for s in share]
    uniforms = jnp.asarray(np.unique(np.clip(steps, 0, 1 - 2**-24)).astype(np.float32))
    count = len(uniforms)

    for first in (0.0, 0.5, 1 - 2**-24):
        monkeypatch.setattr(module, "uniform_pair", lambda *_, f=first: (jnp.full(count, f, jnp.float32), uniforms))
        got = quick_jit(lambda x: module.sample_reference(x, sampler_rows(count), None)[0])(
            jnp.broadcast_to(logits, (count, V))
        )
        assert np.all(np.isfinite(logits[np.asarray(got)]))


# Protects: temperatures that no sane request has, and logits of a badly scaled model.
@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-37, 1e-40])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = logits_of(7, scale=20)
    assert set(draws(logits, 512, temperature=temperature)) == {int(np.argmax(logits))}
    assert set(draws(logits, 512, temperature=temperature, top_p=0.9, top_k=50)) == {int(np.argmax(logits))}


def test_a_huge_temperature_is_uniform() -> None:
    got = draws(logits_of(8), 4096, temperature=1e30)
    assert got.min() < V / 20 and got.max() > V - V / 20
    assert len(set(got)) > V / 2


def test_large_logits_do_not_overflow() -> None:
    logits = logits_of(9) + np.float32(1e30)
    logits[77] = np.float32(2e30)
    assert set(draws(logits, 512)) == {77}


# Protects: the host, which looks the token up in the vocabulary.
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_hopeless_logits_still_give_an_id(value: float) -> None:
    got = draws(np.full(V, value, np.float32), 512)
    assert np.all((got >= 0) & (got < V))


def test_rows_are_a_pytree_of_rows() -> None:
    rows = sampler_rows(3)
    assert isinstance(rows, SamplerRows)
    assert all(x.shape[0] == 3 for x in jax.tree.leaves(rows))
