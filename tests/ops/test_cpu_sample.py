"""The native `sample`: against its reference stage by stage, and bitwise against itself in other company."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferax.kernels.cpu import available
from inferax.ops import cpu
from inferax.ops.sample import filtered_scores, sample, sample_after, sample_reference
from inferax.ops.sampler_rows import FLOATS, STAGES, SamplerMemory, SamplerRows, pack_bits, sampler_rows
from tests.ops.suite import quick_jit

pytestmark = pytest.mark.skipif(not available(), reason="installed without a C++ compiler")

TIERS = range(len(cpu.tiers())) if available() else range(0)
V, CONTEXT, SLOTS = 257, 96, 5  # a block of the vocabulary, and one more
# Where float32 decides otherwise than another order of sums would: a share of this much more or less.
SLACK = 2e-5

native = jax.jit(partial(cpu.sample, scores=True), static_argnames=("threads", "tier"))
reference = quick_jit(lambda x, r, m: (*sample_reference(x, r, m), filtered_scores(x, r, m)))


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def logits_of(seed: int, rows: int, vocab: int = V) -> np.ndarray:
    """Rows of every sharpness, of which some have masked tokens, and of which every second has ties."""
    random = rng(seed)
    x = random.standard_normal((rows, vocab)) * random.uniform(0.3, 6, (rows, 1))
    x[::2] = np.round(x[::2] * 8) / 8
    x[random.random((rows, vocab)) < random.choice([0, 0.5], (rows, 1))] = -np.inf
    x[:, 0] = 0.25
    return x.astype(np.float32)


def memory_of(seed: int, vocab: int = V, alphabet: int = 4) -> SamplerMemory:
    """Histories over few tokens, so that there are repetitions to find."""
    random = rng(seed)
    some = [random.choice(vocab, 20) for _ in range(SLOTS)]
    counts = np.zeros((SLOTS, vocab), np.int16)
    for slot, ids in enumerate(some):
        np.add.at(counts[slot], random.choice(ids, 30), 1)
    return SamplerMemory(
        history=jnp.asarray(random.integers(0, min(alphabet, vocab), (SLOTS, CONTEXT)), jnp.int32),
        counts=jnp.asarray(counts),
        in_prompt=jnp.asarray(np.stack([pack_bits(random.choice(vocab, 15), vocab) for _ in some])),
        breaks=jnp.asarray(np.stack([pack_bits([3 % vocab] if i % 2 else [], vocab) for i in range(SLOTS)])),
        mu=jnp.asarray(random.uniform(1, 12, SLOTS), jnp.float32),
    )


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))


STAGE_VALUES: dict[str, dict[str, list[Any]]] = {
    "penalties": {
        "presence_penalty": [0.0, 0.7, -0.3, 0.0], "frequency_penalty": [0.0, 0.2, 0.0, -0.1],
        "repetition_penalty": [1.3, 1.0, 0.8, 1.1], "penalty_last_n": [-2, -2, -1, 7, 0, 1000],
    },
    "dry": {
        "dry_multiplier": [0.8, 2.0], "dry_base": [1.75, 1.0, 1.2], "dry_allowed_length": [2, 1, 0, 4, -1],
        "dry_penalty_last_n": [-1, 9, -1, 1, 40],
    },
    "top_n_sigma": {"top_n_sigma": [0.5, 1.0, 2.5]},
    "temperature": {
        "temperature": [0.3, 1.0, 1.7], "dynatemp_range": [0.0, 0.5, 2.0, 0.0], "dynatemp_exponent": [1.0, 2.0, 0.5],
    },
    "typical_p": {"typical_p": [0.2, 0.6, 0.95]},
    "min_p": {"min_p": [0.02, 0.3, 1.0]},
    "top_k": {"top_k": [1, 3, 50, 400, 10_000]},
    "top_p": {"top_p": [0.1, 0.7, 0.99]},
    "xtc": {"xtc_probability": [1.0, 0.5], "xtc_threshold": [0.1, 0.01, 0.3]},
}  # fmt: skip
# Of which stage a little more or less shows what lies at an edge.
EDGES = ("temperature", "top_n_sigma", "typical_p", "min_p", "top_p", "xtc_threshold")


def settings(seed: int, count: int, stages: tuple[str, ...] = STAGES, *, share: float = 1.0) -> dict[str, Any]:
    """Random values for the stages, each of them on in this share of the rows."""
    random = rng(seed)
    neutral = {"penalties": "repetition_penalty", "dry": "dry_multiplier", "xtc": "xtc_probability"}
    values: dict[str, Any] = {"seed": [int(s) for s in random.integers(0, 2**63, count)]}
    values["slot"] = [int(s) for s in random.integers(0, SLOTS, count)]
    values["position"] = [int(p) for p in random.integers(0, CONTEXT + 1, count)]
    for stage in stages:
        on = random.random(count) < share
        for name, choices in STAGE_VALUES[stage].items():
            drawn = [choices[i] for i in random.integers(0, len(choices), count)]
            off = {"repetition_penalty": 1.0, "typical_p": 1.0, "top_p": 1.0, "temperature": 1.0}.get(name, 0)
            kept_off = name in (neutral.get(stage), "presence_penalty", "frequency_penalty") or stage not in neutral
            values[name] = [v if o or not kept_off else off for v, o in zip(drawn, on, strict=True)]
    return values


def moved_rows(count: int, values: dict[str, Any]) -> list[SamplerRows]:
    """The rows, and the same with each edge a little to either side; always as many, so that programs are few."""
    out = [sampler_rows(count, **values)]
    for name in EDGES:
        for sign in (-1, 1):
            given = values.get(name, [FLOATS[name]] * count)
            # What is off stays off.
            moved = [v if v == FLOATS[name] and name != "temperature" else v * (1 + sign * SLACK) for v in given]
            out.append(sampler_rows(count, **values | {name: moved}))
    return out


def compare(x: np.ndarray, values: dict[str, Any], memory: SamplerMemory | None) -> None:
    """Kept sets, scores, tokens and mu of every tier against the reference."""
    count, vocab = x.shape
    every_rows = moved_rows(count, values)
    stacked = SamplerRows(jnp.concatenate([rows.packed for rows in every_rows]))
    found = reference(np.tile(x, (len(every_rows), 1)), stacked, memory)
    every = list(zip(*(np.split(np.asarray(result), len(every_rows)) for result in found), strict=True))
    kept = np.stack([np.isfinite(scores) for _, _, scores in every])
    surely, perhaps = kept.all(axis=0), kept.any(axis=0)
    tokens, mu, scores = every[0]
    rows = every_rows[0]
    for tier in TIERS:
        got_tokens, got_mu, got_scores = (np.asarray(r) for r in native(x, rows, memory, tier=tier))
        got_kept = np.isfinite(got_scores)
        assert np.all(got_kept >= surely) and np.all(got_kept <= perhaps)
        equal = (got_kept == kept[0]).all(axis=1)
        both = got_kept & kept[0]
        np.testing.assert_allclose(got_scores[both], scores[both], rtol=2e-4, atol=2e-5)
        # One draw in some ten thousand lies as near to a step of the CDF as its rounding.
        agree = got_tokens == tokens
        assert (equal & ~agree).sum() <= count // 100, np.flatnonzero(equal & ~agree)
        np.testing.assert_allclose(got_mu[agree & equal], mu[agree & equal], rtol=1e-4, atol=1e-4)
        assert equal.mean() >= 0.97


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage(stage: str) -> None:
    count = 40
    on = settings(STAGES.index(stage), count, (stage,))
    compare(logits_of(1, count), on | {"samplers": (stage,)}, memory_of(2))


def test_chains_in_random_orders() -> None:
    count = 40
    random = rng(3)
    orders = [tuple(str(s) for s in random.permutation(STAGES)[: random.integers(2, 10)]) for _ in range(count)]
    values = settings(4, count, share=0.6) | {"samplers": np.array(orders, object)}
    values["temperature"] = [0.0 if i % 5 == 0 else t for i, t in enumerate(values["temperature"])]
    values["mirostat_tau"] = [3.0 if i % 3 == 0 else 0.0 for i in range(count)]
    compare(logits_of(5, count), values, memory_of(6))


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 33])
def test_small_vocabularies(vocab: int) -> None:
    x = rng(vocab).permuted(np.tile(np.arange(vocab, dtype=np.float32), (12, 1)), axis=1)
    given = settings(vocab, 12, ("top_p", "min_p", "temperature")) | {
        "top_k": [1, 2] * 6,
        "temperature": [1.0, 0.0] * 6,
    }
    tokens, _, scores = native(x, sampler_rows(12, **given), memory_of(7, vocab))
    np.testing.assert_array_equal(tokens, np.argmax(x, axis=1))
    assert np.all(np.isfinite(scores).sum(axis=1) == [1, vocab] * 6)


def test_without_a_memory() -> None:
    values = settings(8, 40, share=0.5) | {"mirostat_tau": [2.0, 0.0] * 20}
    compare(logits_of(9, 40), values, None)


# Selection in large rows, which goes by pivots, against a sort.


def large(kind: str) -> np.ndarray:
    random = rng(11)
    x = random.standard_normal(20_000)
    x = {
        "usual": x * 3, "flat": x * 0.01, "equal": x * 0, "two": np.sign(x), "huge": x * 1e30, "tiny": x * 1e-38,
        "coarse": np.round(x), "masked": np.where(x < 1, -np.inf, x), "far": np.where(np.arange(20_000) < 9, x + 50, x),
        "positive": np.abs(x) * 20, "spread": x * 10.0 ** random.integers(-30, 30, 20_000),
    }[kind]  # fmt: skip
    return x.astype(np.float32)


KINDS = ("usual", "flat", "equal", "two", "huge", "tiny", "coarse", "masked", "far", "positive", "spread")


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_of_many(kind: str) -> None:
    x = large(kind)
    wanted = [1, 2, 50, 3_000, 19_999, 20_000, 10**6]
    rows = sampler_rows(len(wanted), top_k=wanted, samplers=("top_k",))
    scores = np.asarray(native(np.broadcast_to(x, (len(wanted), x.size)), rows, None)[2])
    ordered = np.sort(x)[::-1]
    for k, got in zip(wanted, scores, strict=True):
        np.testing.assert_array_equal(got, np.where(x >= ordered[min(k, x.size) - 1], x, -np.inf))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["top_p", "typical_p"])
def test_shares_of_many(kind: str, stage: str) -> None:
    x = large(kind)
    shares = [0.001, 0.3, 0.9, 0.999]
    rows = sampler_rows(len(shares), **{stage: shares}, samplers=(stage,))
    scores = np.asarray(native(np.broadcast_to(x, (len(shares), x.size)), rows, None)[2])
    shifted = x.astype(np.float64) - x.max()
    p = np.exp(shifted) / np.exp(shifted).sum()
    if stage == "top_p":
        rank = -x.astype(np.float64)
    else:
        mean = np.sum(p * np.maximum(shifted, -1e9))
        rank = np.where(p > 0, np.abs(shifted - mean), np.inf)
    order = np.argsort(rank, kind="stable")
    running = np.cumsum(p[order])
    for share, got in zip(shares, scores, strict=True):
        least, most = (rank[order[min(np.searchsorted(running, share * (1 + e)), x.size - 1)]] for e in (-SLACK, SLACK))
        got_kept = np.isfinite(got)
        assert np.all(got_kept[np.isfinite(x) & (rank <= least - SLACK * abs(least))])
        assert not np.any(got_kept[rank > most + SLACK * abs(most)])
        np.testing.assert_array_equal(got[got_kept], x[got_kept])


# Protects: tokens that tie with the last one kept are kept too, in rows that are selected by pivots and that are not.
@pytest.mark.parametrize("vocab", [100, 5_000])
def test_ties_are_kept(vocab: int) -> None:
    x = np.full((2, vocab), -30, np.float32)
    tied = [0, 17, 63, 64, vocab - 1]
    x[:, tied] = 1
    rows = sampler_rows(2, top_k=[2, 0], top_p=[1.0, 0.3], samplers=("top_k", "top_p"))
    for scores in native(x, rows, None)[2]:
        assert set(np.flatnonzero(np.isfinite(scores))) == set(tied)


# A row depends on nothing but itself.


def company(count: int, vocab: int) -> tuple[np.ndarray, SamplerRows, SamplerMemory]:
    random = rng(12)
    orders = np.array([(*random.permutation(STAGES),) for _ in range(count)], object)
    values = settings(13, count, share=0.5) | {"samplers": orders, "mirostat_tau": [3.0, 0.0, 0.0] * (count // 3)}
    values["temperature"] = [0.0 if i % 4 == 0 else t for i, t in enumerate(values["temperature"])]
    return logits_of(14, count, vocab), sampler_rows(count, **values), memory_of(15, vocab)


@pytest.mark.parametrize("vocab", [V, 5_003])
def test_a_row_is_bitwise_the_same_in_any_company(vocab: int) -> None:
    count = 24
    x, rows, memory = company(count, vocab)
    together = native(x, rows, memory)
    for threads in (1, 2, 3):
        same(native(x, rows, memory, threads=threads), together)
    order = rng(16).permutation(count)
    same(native(x[order], SamplerRows(rows.packed[order]), memory), jax.tree.map(lambda y: y[order], together))
    for i in range(0, count, 5):
        alone = native(x[i : i + 1], SamplerRows(rows.packed[i : i + 1]), memory)
        same(alone, jax.tree.map(lambda y, i=i: y[i : i + 1], together))
    spoiled = np.where(np.arange(count)[:, None] % 2 == 0, x, np.nan)
    same(*(jax.tree.map(lambda y: y[::2], native(v, rows, memory)) for v in (spoiled, x)))


def test_tiers_with_a_fused_multiply_add_agree_bitwise() -> None:
    fused = [tier for tier in TIERS if cpu.tiers()[tier] != "baseline"]
    if len(fused) < 2:
        pytest.skip("this machine has one such tier")
    x, rows, memory = company(24, 5_003)
    first, *others = [native(x, rows, memory, tier=tier) for tier in fused]
    for other in others:
        same(other, first)


# Odd input.


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("vocab", [3, 300, 5_000])
def test_hopeless_rows_still_give_an_id_and_keep_mu(value: float, vocab: int) -> None:
    x, rows, memory = company(24, vocab)
    x = np.full_like(x, value)
    for tier in TIERS:
        tokens, mu, _ = native(x, rows, memory, tier=tier)
        assert np.all((np.asarray(tokens) >= 0) & (np.asarray(tokens) < vocab))
        same(mu, memory.mu[rows["slot"]])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_bad_logit_still_gives_an_id(value: float) -> None:
    x, rows, memory = company(24, 5_000)
    x[:, 4_321] = value
    tokens = np.asarray(native(x, rows, memory)[0])
    assert np.all((tokens >= 0) & (tokens < 5_000))
    if np.isnan(value):  # a number is better than none
        greedy = np.asarray(rows["temperature"]) == 0
        assert np.all(tokens[greedy] != 4_321)


@pytest.mark.parametrize("vocab", [9, 5_000])
def test_greedy_takes_the_first_of_the_largest(vocab: int) -> None:
    x = np.full((3, vocab), -np.inf, np.float32)
    x[0, [vocab // 2, vocab - 1]] = -7
    x[1, vocab - 1] = -1e30
    rows = sampler_rows(3, temperature=0.0)
    assert list(native(x, rows, None)[0]) == [vocab // 2, vocab - 1, 0]


# Protects: memory that is not ours, whatever the rows and histories say.
def test_what_lies_outside_is_not_read() -> None:
    memory = memory_of(20)
    history = np.array(memory.history)
    history[0, ::3] = [-5, V, 2**31 - 1, -(2**31)] * (CONTEXT // 12)
    memory = jax.tree.unflatten(jax.tree.structure(memory), [jnp.asarray(history), *jax.tree.leaves(memory)[1:]])
    # The slots -1 and 99 are the last one.
    common: dict[str, Any] = {"repetition_penalty": 1.5, "dry_multiplier": 1.0, "seed": 5, "dry_allowed_length": 1}
    given = sampler_rows(3, slot=[SLOTS - 1, -1, 99], position=20, penalty_last_n=-1, **common)
    x = np.broadcast_to(logits_of(21, 1), (3, V))
    first, *others = np.asarray(native(x, given, memory)[2])
    for other in others:
        np.testing.assert_array_equal(other, first)
    beyond = sampler_rows(
        4, slot=0, position=[CONTEXT, 10**9, -3, 0], penalty_last_n=[-1, -1, 5, 5], dry_penalty_last_n=[-1, -1, 7, 7],
        **common,
    )  # fmt: skip
    scores = np.asarray(native(np.broadcast_to(x[:1], (4, V)), beyond, memory)[2])
    np.testing.assert_array_equal(scores[1], scores[0])
    np.testing.assert_array_equal(scores[3], scores[2])
    seen = [int(t) for t in np.unique(history[0]) if 0 <= t < V]
    untouched = np.setdiff1d(np.arange(V), seen)
    np.testing.assert_array_equal(scores[0, untouched], scores[3, untouched])
    seen = np.setdiff1d(seen, np.flatnonzero(np.isneginf(x[0])))
    assert len(seen) > 0 and np.all(scores[0, seen] != scores[3, seen])


@pytest.mark.parametrize("alphabet", [1, 2, 5])
def test_dry_in_repetitive_histories(alphabet: int) -> None:
    count = 40
    values = settings(22, count, ("dry",)) | {"samplers": ("dry",), "dry_penalty_last_n": [-1, 70] * 20}
    compare(logits_of(24, count), values, memory_of(25, alphabet=alphabet))


# What the caller may get wrong.


def test_rows_of_another_layout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows = logits_of(30, 2), sampler_rows(2)
    monkeypatch.setattr(cpu, "STAGES", STAGES[::-1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="other rows"):
        jax.block_until_ready(jax.jit(partial(cpu.sample, memory=None))(x, rows))


@pytest.mark.parametrize("leaf", range(5))
def test_wrong_memory_is_refused(leaf: int) -> None:
    x, rows = logits_of(31, 2), sampler_rows(2)
    leaves, tree = jax.tree.flatten(memory_of(32))
    name = ("history", "counts", "in_prompt", "breaks", "mu")[leaf]
    for wrong in (leaves[leaf][1:], leaves[leaf].astype(jnp.uint8)):
        if name == "history" and wrong.dtype == jnp.int32:
            continue  # it is what says how many slots there are
        memory = jax.tree.unflatten(tree, [*leaves[:leaf], wrong, *leaves[leaf + 1 :]])
        with pytest.raises(jax.errors.JaxRuntimeError, match=name):
            jax.block_until_ready(jax.jit(cpu.sample)(x, rows, memory))


def test_the_ops_take_the_kernel() -> None:
    x, rows, memory = company(6, V)
    for program in (
        lambda: sample(jnp.asarray(x), rows),
        lambda: sample_after(jnp.asarray(x), rows, memory),
        lambda: jax.vmap(sample)(jnp.asarray(x)[None], SamplerRows(rows.packed[None])),
        lambda: jax.vmap(sample_after, (0, 0, None))(jnp.asarray(x)[None], SamplerRows(rows.packed[None]), memory),
    ):
        assert jax.jit(program).lower().as_text().count("@inferax_sample_v1") == 1
    same(sample_after(jnp.asarray(x), rows, memory), native(x, rows, memory)[:2])
