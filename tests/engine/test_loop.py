"""The engine's loop with a tiny model: what comes out, when it stops, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest

from inferax.engine.loop import run, scheduler_for
from inferax.engine.params import SamplingParams
from inferax.engine.runner import Runner
from inferax.errors import StepError
from inferax.models import decoder
from tests.engine.tiny import CONFIG, engine, random_params, request

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPT = [3, 14, 15, 92, 65, 35]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return engine()


@pytest.fixture(scope="module")
def greedy() -> list[int]:
    """Step by step with the pure function, no engine and no cache between steps."""
    params, apply = random_params(CONFIG), jax.jit(decoder.apply, static_argnums=0)
    ids = list(PROMPT)
    for _ in range(10):
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(np.asarray(apply(CONFIG, params, padded))[0, len(ids) - 1].argmax()))
    return ids[len(PROMPT) :]


def outputs(runner: Runner, *seqs: Any) -> list[list[int]]:
    for _ in run(runner, seqs):
        pass
    return [seq.output.token_ids for seq in seqs]


def test_greedy_is_the_argmax_of_the_pure_function(runner: Runner, greedy: list[int]) -> None:
    assert outputs(runner, request(PROMPT, GREEDY)) == [greedy]


def test_more_sequences_than_slots(runner: Runner, greedy: list[int]) -> None:
    crowd = [request([i + 1] * (1 + 7 * i % 60), GREEDY) for i in range(11)]
    assert outputs(runner, *crowd[:6], request(PROMPT, GREEDY), *crowd[6:])[6] == greedy


def test_logprobs_are_those_of_the_model(runner: Runner, greedy: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=3)
    seq = request(PROMPT, params)
    outputs(runner, seq)
    ids = np.array([[*PROMPT, *greedy]], np.int32)
    logits = np.asarray(decoder.apply(CONFIG, random_params(CONFIG), ids), np.float64)[0, len(PROMPT) - 1 : -1]
    truth = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    assert seq.output.logprobs is not None
    for row, table, token in zip(truth, seq.output.logprobs, greedy, strict=True):
        best = np.argsort(-row)[:3]
        assert set(table) == {int(t) for t in best} | {token}
        assert table[token].rank == 1
        for other, entry in table.items():
            assert entry.logprob == pytest.approx(row[other], abs=1e-4)
    assert seq.output.cumulative_logprob == pytest.approx(
        sum(r[t] for r, t in zip(truth, greedy, strict=True)), abs=1e-3
    )


def test_no_logprobs_unless_asked(runner: Runner) -> None:
    seq = request(PROMPT, GREEDY)
    outputs(runner, seq)
    assert seq.output.logprobs is None and seq.output.cumulative_logprob is None


def test_a_seed_decides_the_draw(runner: Runner) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12)
    first, again, other, sample = outputs(
        runner,
        *(request(PROMPT, params, seed=s, index=i) for s, i in ((1, 0), (1, 0), (2, 0), (1, 1))),
    )
    assert first == again
    assert len({tuple(first), tuple(other), tuple(sample)}) == 3


def test_eos_stops_and_the_token_that_was_ahead_is_dropped(runner: Runner, greedy: list[int]) -> None:
    end = greedy[4]
    stop = greedy.index(end) + 1
    seq = request(PROMPT, GREEDY, eos_ids=frozenset([end]))
    events = [event for event in run(runner, [seq])]
    assert seq.output.token_ids == greedy[:stop] == [event.token for event in events]
    assert (seq.output.finish_reason, seq.output.stop_reason) == ("stop", None)
    ignoring = request(PROMPT, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), eos_ids=frozenset([end]))
    assert outputs(runner, ignoring) == [greedy]
    assert ignoring.output.finish_reason == "length"


def test_stop_token_ids(runner: Runner, greedy: list[int]) -> None:
    end = greedy[2]
    params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[end])
    seq = request(PROMPT, params)
    assert outputs(runner, seq) == [greedy[: greedy.index(end) + 1]]
    assert (seq.output.finish_reason, seq.output.stop_reason) == ("stop", end)


@dataclass
class Letters:
    """Each token is the text <token>."""

    seen: list[int] = field(default_factory=list)

    def add(self, token: int, /) -> str:
        self.seen.append(token)
        return f"<{token}>"

    def flush(self) -> str:
        return "!"


def test_stop_strings_are_held_back_and_cut(runner: Runner, greedy: list[int]) -> None:
    stop = f"{greedy[3]}><{greedy[4]}"  # begins in one token and ends in the next
    for include in (False, True):
        params = SamplingParams(temperature=0, max_tokens=10, stop=[stop, "never"], include_stop_str_in_output=include)
        seq = request(PROMPT, params, detokenizer=Letters())
        texts = [event.text for event in run(runner, [seq])]
        whole = "".join(f"<{t}>" for t in greedy)
        end = whole.index(stop)
        assert seq.output.text == "".join(texts) == whole[: end + len(stop) * include]
        assert (seq.output.finish_reason, seq.output.stop_reason) == ("stop", stop)


def test_held_back_text_is_released_at_the_end(runner: Runner, greedy: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, stop=[f"<{greedy[2]}>!and more"])
    seq = request(PROMPT, params, detokenizer=Letters())
    outputs(runner, seq)
    assert seq.output.text == "".join(f"<{t}>" for t in greedy[:3]) + "!"
    assert seq.output.finish_reason == "length"


def test_leaving_early_aborts_and_frees(runner: Runner) -> None:
    scheduler = scheduler_for(runner.shape, CONFIG.windows)
    seqs = [request(PROMPT, GREEDY) for _ in range(6)]
    events = run(runner, seqs, scheduler)
    next(events)
    events.close()
    assert {seq.output.finish_reason for seq in seqs} == {"abort"}
    assert scheduler.idle
    scheduler.check_integrity()


def test_a_failing_step_rebuilds_the_cache(greedy: list[int]) -> None:
    runner = engine()
    scheduler = scheduler_for(runner.shape, CONFIG.windows)
    forward, calls = runner.forward, 0

    def failing(chunks: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the device is gone")
        return forward(chunks)

    runner.forward = failing  # type: ignore[method-assign]
    seq = request(PROMPT, GREEDY)
    with pytest.raises(StepError, match="'forward': RuntimeError: the device is gone"):
        for _ in run(runner, [seq], scheduler):
            pass
    assert (seq.output.finish_reason, seq.output.token_ids) == ("error", greedy[:2]), "what was sampled is kept"
    scheduler.check_integrity()
    seq = request(PROMPT, GREEDY)
    for _ in run(runner, [seq], scheduler):
        pass
    assert seq.output.token_ids == greedy and seq.cached == 0
