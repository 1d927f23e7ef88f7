"""`EngineCore`: its queue's bounds, its order of work, and a recorded trace that replays to the same plans."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from inferax.engine.params import SamplingParams
from inferax.engine.sequence import Sequence
from inferax.errors import QueueFullError, StepError
from inferax.kernels import cpu
from tests.engine import trace
from tests.engine.harness import assert_level, core, drain, make, samples

TRACE = Path(__file__).with_name("trace.json")


def test_bounds_of_the_queue() -> None:
    engine = core(max_waiting=4, max_waiting_tokens=200)
    params = SamplingParams(temperature=0, max_tokens=2)

    def seq(length: int) -> Sequence:
        return Sequence("q", [1] * length, params, 0, 0, 2, frozenset())

    engine.add([seq(210)])  # nothing else waits
    with pytest.raises(QueueFullError, match="max_waiting_tokens is 200; 210 wait and 1 more were asked for"):
        engine.add([seq(1)])
    drain(engine)
    engine.add([seq(10) for _ in range(7)])
    before = len(engine.scheduler.live)
    with pytest.raises(QueueFullError, match="max_waiting is 4; 7 wait and 1 more"):
        engine.add([seq(1)])
    assert len(engine.scheduler.live) == before
    engine.check_integrity()
    drain(engine)
    many = samples(3, 4)  # one prompt, counted once
    engine.add([seq(150)])
    engine.add(many[:3])
    assert engine.scheduler.num_waiting_tokens == 150 + many[0].prompt_len
    drain(engine)
    assert_level(engine)


class Anything:
    """A grammar that allows every token."""

    def fill_mask(self, row: Any, /) -> None:
        row[:] = -1

    def accept(self, token: int, /) -> None: ...


def test_the_next_forward_is_enqueued_before_tokens_are_read() -> None:
    engine, order = core(), []
    for name in ("forward", "sample"):
        real = getattr(engine.runner, name)

        def noted(argument: Any, real: Any = real, name: str = name) -> Any:
            order.append(name)
            return real(argument)

        setattr(engine.runner, name, noted)
    real_read = sys.modules["inferax.engine.core"].read  # type: ignore[attr-defined]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("inferax.engine.core.read", lambda step: order.append("read") or real_read(step))
            seq = make(0, params=SamplingParams(temperature=0, max_tokens=3))
            engine.add([seq])
            drain(engine)
            whole = [*order]
            order.clear()
            engine.add([Sequence("g", seq.prompt, seq.params, 0, 0, 3, frozenset(), grammar=Anything())])
            drain(engine)
    finally:
        del engine.runner.forward, engine.runner.sample
    first = whole.index("read")
    assert whole[:first].count("forward") >= 2 and whole[first - 1] == "sample"
    first = order.index("read")
    assert order[first - 1] == "forward" and order[first + 1] == "sample", "a mask needs the token before it"


def test_only_scores_are_asked_for() -> None:
    engine = core()
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    seqs = [Sequence("s", [5] * length, params, 0, 0, 0, frozenset()) for length in (1, 70)]
    engine.add(seqs)
    drain(engine)
    for seq in seqs:
        assert (seq.output.finish_reason, seq.output.token_ids) == ("length", [])
        assert seq.prompt_logprobs is not None and len(seq.prompt_logprobs) == seq.prompt_len
    assert_level(engine)


def test_a_prefix_cache_reset_while_others_run() -> None:
    engine = core()
    first, second = make(7, name="a"), make(7, name="b")
    engine.add([first])
    for _ in range(4):
        engine.step()
    engine.reset_prefix_cache()
    engine.add([second])
    drain(engine)
    assert first.output.token_ids == second.output.token_ids and second.cached == 0
    assert_level(engine)


def test_aborted_requests_do_not_pile_up() -> None:
    engine = core()
    blocking = [make(i, params=SamplingParams(temperature=0, max_tokens=100)) for i in range(4)]
    engine.add(blocking)
    for _ in range(6):
        engine.step()
    for i in range(2000):
        engine.add([make(1, name=f"x{i}")])
        engine.abort(f"x{i}")
    assert len(engine.scheduler._waiting) < 200 and engine.scheduler.num_waiting == 0
    engine.check_integrity()
    drain(engine)
    assert_level(engine)


def recorded(policy: str) -> tuple[dict[str, Any], list[list[Any]]]:
    """Twenty requests through five pages: chunks, siblings, prefix hits, aborts and preemptions."""
    engine = core(pages=6, policy=policy)  # type: ignore[arg-type]
    s = engine.scheduler
    settings = {
        "pages": list(s.pages.num_pages), "page_size": 16, "windows": list(s.pages.windows),
        "max_seqs": s.max_seqs, "max_batched_tokens": s.max_batched_tokens, "policy": policy,
    }  # fmt: skip
    recorder = trace.Recorder(engine)
    seqs: list[Sequence] = []
    for i in range(20):
        seq = make(i % 7, name=str(i), params=SamplingParams(temperature=0, max_tokens=4 + 5 * i % 23))
        seq.priority = i % 3
        if i % 7 == 6:
            seq.prompt, seq.sibling = seqs[-1].prompt, seqs[-1]
            seq.tokens = list(seq.prompt)
        seqs.append(seq)
    for at in range(1000):
        if at < 40 and at % 2 == 0:
            recorder.add(seqs[at // 2])
        if at in (9, 21, 33):
            recorder.abort(str(at // 2))
        if engine.idle:
            return settings, recorder.events
        recorder.step()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_a_trace_replays_to_the_same_plans(policy: str) -> None:
    """A change of scheduling shows as a difference. `python -m tests.engine.test_core` writes the file anew."""
    for settings, events in json.loads(TRACE.read_text()):
        if settings["policy"] == policy:
            plans = [event[1:] for event in events if event[0] == "plan"]
            assert any(preempted for _, preempted in plans) and len(plans) > 50
            assert trace.replay(settings, events) == plans


@pytest.mark.skipif(not cpu.available(), reason="sampled tokens differ")
def test_the_engine_still_does_what_the_trace_says() -> None:
    for settings, events in json.loads(TRACE.read_text()):
        again = json.loads(json.dumps(recorded(settings["policy"])))
        assert [e for e in again[1] if e[0] == "plan"] == [e for e in events if e[0] == "plan"]


def test_a_failure_names_its_stage() -> None:
    error = StepError("forward", ValueError("no"))
    assert str(error) == "the engine failed in 'forward': ValueError: no" and error.__cause__ is error.cause


if __name__ == "__main__":
    TRACE.write_text(json.dumps([recorded(policy) for policy in ("fcfs", "priority", "lpm")], separators=(",", ":")))
