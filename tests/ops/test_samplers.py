"""Each stage of the sampler's chain against llama.cpp's (golden file), and against a statement of its definition."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from inferax.ops.sample import filtered_scores, sample, sample_after
from inferax.ops.sampler_rows import STAGES, SamplerMemory, pack_bits, sampler_rows
from tests.ops.suite import quick_jit

GOLDEN = json.loads(gzip.decompress((Path(__file__).parent.parent / "golden" / "llama_samplers.gz").read_bytes()))
LOGITS = np.asarray(GOLDEN["logits"], np.float32)
V = LOGITS.shape[1]
scores_after = quick_jit(filtered_scores)
# The field that names a sampler in the golden file, and the stage that it is.
STAGE_OF = {
    "penalty_last_n": "penalties", "dry_multiplier": "dry", "top_n_sigma": "top_n_sigma", "temperature": "temperature",
    "typical_p": "typical_p", "min_p": "min_p", "top_k": "top_k", "top_p": "top_p", "xtc_probability": "xtc",
}  # fmt: skip


def memory_of(
    before: list[int], *, prompt: int = 0, breaks: list[int] | None = None, mu: float = 0.0, rows: int = 1
) -> SamplerMemory:
    """The memory after these tokens, the first `prompt` of which are the prompt; the last slot is rubbish."""
    history = np.full((rows + 1, 64), 77, np.int32)
    history[:rows, : len(before)] = before
    counts = np.full((rows + 1, V), 9, np.int16)
    counts[:rows] = np.bincount(before[prompt:], minlength=V)
    bits = [pack_bits(ids, V) for ids in (before[:prompt], breaks or [])]
    return SamplerMemory(
        history=jnp.asarray(history),
        counts=jnp.asarray(counts),
        in_prompt=jnp.asarray(np.tile(bits[0], (rows + 1, 1))),
        breaks=jnp.asarray(np.tile(bits[1], (rows + 1, 1))),
        mu=jnp.full(rows + 1, mu, jnp.float32),
    )


def scores_of(logits: np.ndarray, before: list[int] | None = None, **given: Any) -> np.ndarray:
    before = before or []
    rows = sampler_rows(1, position=len(before), seed=3, **given)
    return np.asarray(
        scores_after(jnp.asarray(logits)[None], rows, memory_of(before, breaks=GOLDEN["breaks"])), np.float64
    )[0]


def shares(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    out: np.ndarray = weights / weights.sum()
    return out


@pytest.mark.parametrize("number", range(len(GOLDEN["cases"])))
def test_as_llama_cpp(number: int) -> None:
    case = GOLDEN["cases"][number]
    given: dict[str, Any] = {}
    order = []
    for sampler in case["samplers"]:
        order.append(STAGE_OF[next(iter(sampler))])
        given |= sampler
    got = scores_of(LOGITS[case["row"]], case.get("before"), samplers=tuple(order), **given)
    left = {int(token): logit for token, logit in case["left"].items()}
    assert set(np.flatnonzero(np.isfinite(got))) == set(left)
    want = np.full(V, -np.inf)
    want[list(left)] = list(left.values())
    np.testing.assert_allclose(shares(got), shares(want), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("number", range(len(GOLDEN["mirostat"])))
def test_mirostat_as_llama_cpp(number: int) -> None:
    """The tokens that may come, step after step, given the ones that llama.cpp drew."""
    case = GOLDEN["mirostat"][number]
    logits, mu = LOGITS[case["row"]], 2 * case["tau"]
    p = shares(logits.astype(np.float64))
    for step in case["steps"]:
        count = 512
        rows = sampler_rows(count, mirostat_tau=case["tau"], mirostat_eta=case["eta"], slot=0,
                            position=list(range(count)), seed=1)  # fmt: skip
        memory = memory_of([], mu=mu)
        tokens, moved = sample_after(jnp.broadcast_to(logits, (count, V)), rows, memory)
        drawn = np.asarray(tokens)
        assert set(drawn) <= set(step["kept"])
        assert step["token"] in step["kept"]
        # Every share is what is left of the whole, and mu moves by the drawn token's surprise.
        kept = np.zeros(V)
        kept[step["kept"]] = p[step["kept"]]
        kept /= kept.sum()
        want = mu - case["eta"] * (-np.log2(kept[drawn]) - case["tau"])
        np.testing.assert_allclose(np.asarray(moved), want, rtol=1e-4, atol=1e-4)
        likely = np.flatnonzero(kept > 0.05)
        assert set(likely) <= set(drawn)
        mu -= case["eta"] * (-np.log2(kept[step["token"]]) - case["tau"])


# The definitions once more in numpy, on more rows than the golden file has.


def by_sorting(name: str, value: float, p: np.ndarray) -> np.ndarray:
    """Which tokens a filter keeps of a distribution, by sorting it."""
    if name == "typical_p":
        entropy = -(p * np.log(p)).sum()
        order = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
        return np.asarray(order[: 1 + int(np.argmax(np.cumsum(p[order]) >= value))])
    if name == "top_n_sigma":
        logits = np.log(p)
        return np.flatnonzero(logits >= logits.max() - value * logits.std())
    if name == "min_p":
        return np.flatnonzero(p >= value * p.max())
    order = np.argsort(-p, kind="stable")
    if name == "top_k":
        return np.asarray(order[: int(value)])
    return np.asarray(order[: 1 + int(np.argmax(np.cumsum(p[order]) >= value))])


@pytest.mark.parametrize("name", ["typical_p", "top_n_sigma", "min_p", "top_k", "top_p"])
def test_filters_keep_what_a_sort_keeps(name: str) -> None:
    rng = np.random.default_rng(5)
    values = {"top_k": [1, 3, 30, 200], "top_n_sigma": [0.3, 1.0, 2.0, 4.0]}.get(name, [0.05, 0.3, 0.7, 0.97])
    for value in values:
        logits = (rng.standard_normal((8, V)) * rng.uniform(0.5, 5, (8, 1))).astype(np.float32)
        rows = sampler_rows(8, **{name: value}, seed=1)
        got = np.isfinite(np.asarray(scores_after(jnp.asarray(logits), rows)))
        for row, kept in zip(logits, got, strict=True):
            assert set(np.flatnonzero(kept)) == set(by_sorting(name, value, shares(row.astype(np.float64))))


def test_xtc_happens_as_often_as_asked() -> None:
    count = 4096
    rows = sampler_rows(count, xtc_probability=0.3, xtc_threshold=0.05, position=list(range(count)), seed=9)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[0]), (count, V))
    cut = ~np.isfinite(np.asarray(scores_after(logits, rows)))
    p = shares(LOGITS[0].astype(np.float64))
    above = np.flatnonzero(p >= 0.05)
    assert len(above) >= 2
    removed = set(above) - {above[np.argmin(p[above])]}
    happened = cut.any(axis=1)
    assert all(set(np.flatnonzero(row)) == removed for row in cut[happened])
    assert abs(happened.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / count)
    # Whether it happens says nothing of which token is drawn.
    tokens = np.asarray(sample(logits, sampler_rows(count, position=list(range(count)), seed=9)))
    best = int(np.argmax(p))
    assert abs((tokens[happened] == best).mean() - p[best]) < 4 * np.sqrt(p[best] * (1 - p[best]) / happened.sum())


def test_penalties_count_the_answer_or_the_last_tokens() -> None:
    before = [3, 3, 4, 5, 4, 6]
    rows = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    logits = LOGITS[0].astype(np.float64)

    def penalized(seen: set[int], counts: dict[int, int]) -> np.ndarray:
        out = logits.copy()
        for token in seen:
            out[token] = out[token] / 1.5 if out[token] > 0 else out[token] * 1.5
        for token, count in counts.items():
            out[token] -= 0.25 * count + 0.5
        return out

    memory = memory_of(before, prompt=3)
    for last, seen, counts in (
        (-2, {3, 4, 5, 6}, {5: 1, 4: 1, 6: 1}),
        (-1, {3, 4, 5, 6}, {3: 2, 4: 2, 5: 1, 6: 1}),
        (2, {4, 6}, {4: 1, 6: 1}),
        (0, set(), {}),
    ):
        given = sampler_rows(1, position=len(before), penalty_last_n=last, samplers=("penalties",), **rows)
        got = np.asarray(scores_after(jnp.asarray(LOGITS[:1]), given, memory))[0]
        np.testing.assert_allclose(got, penalized(seen, counts), rtol=1e-5, atol=1e-6)


def test_rows_with_orders_of_their_own_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(2)
    orders = [tuple(rng.permutation(STAGES)) for _ in range(8)]
    given: dict[str, Any] = {
        "temperature": [0.5, 1.0, 1.5, 0.0] * 2, "top_k": [5, 0, 50, 3, 9, 0, 1, 0], "top_p": [1, 0.9] * 4,
        "min_p": [0, 0.05, 0, 0] * 2, "typical_p": [1, 1, 0.8, 0.9] * 2, "top_n_sigma": [0, 0, 2, 0, 1, 0, 0, 0],
        "xtc_probability": [0, 1, 0, 0.5] * 2, "repetition_penalty": [1, 1.3] * 4, "dry_multiplier": [0, 0.5] * 4,
        "mirostat_tau": [0, 0, 3, 0] * 2,
    }  # fmt: skip
    before = [40, 41, 42, 7, 40, 41]
    memory = memory_of(before, mu=6.0, rows=8)
    logits = jnp.asarray(np.stack([LOGITS[i % 3] for i in range(8)]))
    common = {"position": len(before), "seed": list(range(8)), "slot": list(range(8))}
    together = sample_after(logits, sampler_rows(8, samplers=orders, **given, **common), memory)
    for i in range(8):
        mine = {name: values[i] for name, values in given.items()} | {n: _of(v, i) for n, v in common.items()}
        alone = sample_after(logits[i : i + 1], sampler_rows(1, samplers=orders[i], **mine), memory)
        assert int(alone[0][0]) == int(together[0][i])
        np.testing.assert_array_equal(np.asarray(alone[1][0]), np.asarray(together[1][i]))


def _of(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, list) else value


def test_greedy_rows_pass_only_the_stages_that_can_move_the_best() -> None:
    best = int(np.argmax(LOGITS[0]))
    rows = sampler_rows(1, temperature=0.0, top_k=5, top_p=0.5, min_p=0.5, top_n_sigma=1.0)
    np.testing.assert_array_equal(np.asarray(scores_after(jnp.asarray(LOGITS[:1]), rows))[0], LOGITS[0])
    assert int(sample(jnp.asarray(LOGITS[:1]), rows)[0]) == best
    without = sampler_rows(1, temperature=0.0, xtc_probability=1.0, xtc_threshold=0.05)
    p = shares(LOGITS[0].astype(np.float64))
    above = np.flatnonzero(p >= 0.05)
    assert int(sample(jnp.asarray(LOGITS[:1]), without)[0]) == above[np.argmin(p[above])] != best
