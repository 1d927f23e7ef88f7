"""An exception, an abort or a shortage at every stage: nothing is lost but the requests at fault."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

from inferax.engine.core import EngineCore
from inferax.engine.params import SamplingParams
from inferax.engine.sequence import Sequence
from inferax.errors import EngineDeadError, RequestError, StepError
from inferax.kernels import cpu
from tests.engine.harness import (
    Texts,
    alone,
    assert_as_alone,
    assert_begins_as_alone,
    assert_level,
    core,
    drain,
    failing,
    make,
    result,
    samples,
)

pytestmark = pytest.mark.skipif(not cpu.available(), reason="XLA's own dots are not batch-invariant")
GONE = RuntimeError("the device is gone")


@pytest.fixture(autouse=True)
def _no_tracebacks() -> Iterator[None]:
    logging.getLogger("inferax").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("inferax").setLevel(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def _alone() -> None:
    """Before anything else runs: it empties the device's cache."""
    for i in range(12):
        for index in range(3 if i in (5, 6, 7) else 1):
            alone(i, index)


@contextmanager
def failing_read(engine: EngineCore, at: int) -> Iterator[list[int]]:
    """The copy of a step's tokens to the host fails, as after an asynchronous error of the device."""
    real, failed = engine.runner.sample, []
    count = 0

    class Broken:
        def result(self) -> np.ndarray:
            failed.append(at)
            raise GONE

    def sample(step: Any) -> None:
        nonlocal count
        real(step)
        count += bool(step.samples)
        if step.samples and count == at:
            step.copies["tokens"] = Broken()

    engine.runner.sample = sample  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        del engine.runner.sample


def injected(engine: EngineCore, stage: str, at: int) -> Any:
    if stage == "read":
        return failing_read(engine, at)
    owner, name = {
        "schedule": (engine.scheduler, "_chunk"),
        "admission": (engine.scheduler.pages, "lookup"),
        "commit": (engine.scheduler, "commit"),
        "packing": (engine.runner._packer, "pack"),
        "forward": (engine.runner, "forward_program"),
        "rows": (engine.runner, "_sampler_rows"),
        "state": (engine.runner, "load_program"),
        "sample": (engine.runner, "sample_program"),
        "copy": (engine.runner.backend, "get_async"),
        "finish": (engine.scheduler, "finish"),
    }[stage]
    return failing(owner, name, lambda n: n == at, GONE)


STAGES = ["schedule", "admission", "commit", "packing", "forward", "rows", "state", "sample", "copy", "read", "finish"]


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failing_step_fails_its_requests_only(stage: str, at: int) -> None:
    engine = core()
    seqs = [make(i) for i in range(6)] + samples(6, 3)
    with injected(engine, stage, at) as failed:
        for seq in seqs:
            engine.add([seq])
        drain(engine)
    assert failed, "the fault did not happen"
    lost = [seq for seq in seqs if seq.output.finish_reason == "error"]
    assert len(lost) <= engine.scheduler.max_seqs and (lost or stage == "finish")
    for seq in seqs:
        if seq in lost:
            assert isinstance(seq.output.error, StepError) and seq.output.error.cause is GONE
            assert_begins_as_alone(seq)
        else:
            assert_as_alone(seq)
    assert engine.metrics.step_failures == 1 and engine.dead is None
    assert_level(engine)
    engine.add(again := [make(i) for i in range(4)])
    drain(engine)
    for seq in again:
        assert_as_alone(seq)


def test_who_is_in_the_step_and_who_is_not() -> None:
    """Four run and two wait when a step fails; what the step before had sampled is kept."""
    engine = core()
    seqs = [make(0, name=str(i), params=SamplingParams(temperature=0, max_tokens=9)) for i in range(6)]
    for seq in seqs:
        engine.add([seq])
    while len(seqs[3].output.token_ids) < 2:
        engine.step()
    had = [len(seq.output.token_ids) for seq in seqs]
    with failing(engine.runner, "forward", lambda n: n == 1, GONE):
        events = engine.step()
    assert [seq.output.finish_reason for seq in seqs] == ["error"] * 4 + [None] * 2
    assert [len(seq.output.token_ids) for seq in seqs] == [n + 1 for n in had[:4]] + [0, 0]
    assert sum(event.finished for event in events) == 4 and not engine.scheduler.running
    drain(engine)
    assert [seq.output.finish_reason for seq in seqs[4:]] == ["length"] * 2
    assert_level(engine)


def test_a_donated_cache_that_is_gone_is_rebuilt() -> None:
    """A program that fails after it took the cache over leaves deleted buffers behind."""
    engine, seqs = core(), [make(i) for i in range(6)]
    forward, calls = engine.runner.forward, 0

    def taking(chunks: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            for leaf in jax.tree.leaves(engine.runner._cache):
                leaf.delete()
        return forward(chunks)

    engine.runner.forward = taking  # type: ignore[method-assign]
    try:
        for seq in seqs:
            engine.add([seq])
        drain(engine)
    finally:
        del engine.runner.forward
    lost = [seq for seq in seqs if seq.output.finish_reason == "error"]
    assert 1 <= len(lost) <= 4 and engine.metrics.step_failures == 1
    for seq in seqs:
        assert_begins_as_alone(seq) if seq in lost else assert_as_alone(seq)
    assert_level(engine)


def test_a_result_that_cannot_be_read_voids_the_step_after_it() -> None:
    """The sequence that came in with the next step is innocent: it begins anew."""
    engine, first, second = core(), make(1), make(2)
    with failing_read(engine, 1):
        engine.add([first])
        while engine._flight is None or not engine._flight.result.samples:
            engine.step()
        engine.add([second])
        engine.step()
    assert first.output.finish_reason == "error" and isinstance(first.output.error, StepError)
    assert first.output.error.stage == "read" and second.pending == 0 and second.slot < 0
    drain(engine)
    assert_as_alone(second)
    assert_level(engine)


class Grammar:
    """Allows all tokens, and counts what it accepts."""

    def __init__(self, *, bad_mask: int = 0, bad_token: int = 0) -> None:
        self.masks = self.accepted = 0
        self.bad_mask, self.bad_token = bad_mask, bad_token

    def fill_mask(self, row: np.ndarray, /) -> None:
        self.masks += 1
        assert self.accepted == self.masks - 1, "a mask is made before the token before it is known"
        if self.masks == self.bad_mask:
            raise ValueError("no mask")
        row[:] = -1

    def accept(self, token: int, /) -> None:
        self.accepted += 1
        if self.accepted == self.bad_token:
            raise ValueError("not in the language")


def with_grammar(i: int, grammar: Grammar) -> Sequence:
    plain = make(i)
    return Sequence(
        str(i), plain.prompt, plain.params, plain.seed, 0, plain.max_tokens, frozenset(), Texts(), grammar=grammar
    )


@pytest.mark.parametrize(
    ("fault", "stage", "tokens"),
    [({"bad_mask": 3}, "grammar", 2), ({"bad_token": 3}, "accept", 2), ({}, None, None)],
)
def test_a_grammar_that_fails_ends_its_own_sequence(fault: dict[str, int], stage: str | None, tokens: Any) -> None:
    engine = core()
    bad, others = with_grammar(0, Grammar(**fault)), [make(i) for i in range(1, 5)]
    engine.add([bad])
    engine.add(others)
    drain(engine)
    if stage is None:
        assert_as_alone(bad)
    else:
        assert isinstance(bad.output.error, StepError) and bad.output.error.stage == stage
        assert len(bad.output.token_ids) == tokens
        assert_begins_as_alone(bad)
    for seq in others:
        assert_as_alone(seq)
    assert engine.metrics.step_failures == 0
    assert_level(engine)


def test_a_text_that_fails_ends_its_own_sample() -> None:
    engine = core()
    seqs = samples(5, 3)
    seqs[0].detokenizer = Texts(bad=4)
    engine.add(seqs)
    drain(engine)
    assert [seq.output.finish_reason for seq in seqs] == ["error", "length", "length"]
    assert isinstance(seqs[0].output.error, StepError) and seqs[0].output.error.stage == "accept"
    for seq in seqs[1:]:
        assert_as_alone(seq)
    assert_level(engine)


@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.parametrize("moment", ["waiting", "prefill", "one ahead", "decoding", "preempted", "sibling"])
def test_an_abort_at_every_stage(moment: str, which: str) -> None:
    engine = core(pages=8 if moment == "preempted" else 64, policy="priority" if moment == "preempted" else "fcfs")
    long = SamplingParams(temperature=0, max_tokens=60)
    if moment == "sibling":
        seqs = samples(7, 3)  # its prompt takes two steps
        assert seqs[0].prompt_len > 32
        engine.add(seqs)
        engine.step()
        assert [seq.slot >= 0 for seq in seqs] == [True, False, False]
        target = seqs[0] if which == "first" else seqs[1]
        engine._end(target, "abort", [])
        engine._let_go()
        drain(engine)
        for seq in seqs:
            assert seq is target or result(seq) == alone(7, seq.output.index)
        assert_level(engine)
        return
    names = ["first", "second"]
    by_name = {n: make(7 + i, name=n, params=long) for i, n in enumerate(names)}
    target, other = by_name[which], by_name[names[which == "first"]]
    other.params, other.max_tokens = long, 60

    def ready() -> bool:
        return {
            "waiting": True,
            "prefill": target.slot >= 0 and 0 < target.computed < target.prompt_len,
            "one ahead": target.pending == 1 and not target.output.token_ids,
            "decoding": len(target.output.token_ids) > 3,
            "preempted": engine.scheduler.num_preemptions > 0 and target.slot < 0,
        }[moment]

    if moment == "preempted":
        target.priority, other.priority = 1, 0
    for seq in by_name.values():
        engine.add([seq])
    for _ in range(300):
        if ready():
            break
        engine.step()
    assert ready(), "the moment never came"
    events = engine.abort(which)
    assert [(e.seq, e.token, e.finished) for e in events] == [(target, None, True)]
    assert target.output.finish_reason == "abort" and engine.abort(which) == []
    engine.check_integrity()
    count = len(target.output.token_ids)
    drain(engine)
    assert len(target.output.token_ids) == count, "an aborted request gets no more tokens"
    assert len(other.output.token_ids) == 60
    assert_level(engine)


def test_four_pages_and_two_hundred_requests() -> None:
    engine = core(pages=4)
    fitting = [i for i in range(20) if (seq := make(i)).prompt_len + seq.max_tokens <= 64]
    seqs = [make(fitting[k % len(fitting)], name=str(k)) for k in range(200)]
    for seq in seqs:
        engine.add([seq])
    drain(engine, 20_000)
    assert engine.scheduler.num_preemptions > 0
    for seq in seqs:
        assert result(seq) == alone(fitting[int(seq.request_id) % len(fitting)])
    assert_level(engine)


def test_a_sequence_that_outgrows_the_pool_ends_with_length() -> None:
    engine = core(pages=2)
    params = SamplingParams(temperature=0, max_tokens=60)
    seqs = [
        Sequence(str(i), [i, 5, 9], params, 0, 0, 60, frozenset(), detokenizer=Texts()) for i in range(3)
    ]  # fmt: skip
    for seq in seqs:
        engine.add([seq])
    drain(engine)
    for seq in seqs:
        assert seq.output.finish_reason == "length" and seq.output.text.endswith(".")
        assert seq.prompt_len + len(seq.output.token_ids) in (32, 33)
    assert_level(engine)
    with pytest.raises(RequestError, match="32 tokens and one more do not fit the KV cache of 32 tokens"):
        engine.add([Sequence("big", [1] * 32, params, 0, 0, 60, frozenset())])
    assert_level(engine)


def test_one_failure_after_another_is_the_end() -> None:
    engine = core()
    for i in range(20):
        engine.add([make(i)])
    events = []
    with failing(engine.runner, "forward", lambda n: True, GONE):
        with pytest.raises(EngineDeadError, match="3 steps in a row failed.*the device is gone"):
            while True:
                events += engine.step()
    assert sum(event.finished for event in events) == 20
    assert sum(isinstance(event.seq.output.error, EngineDeadError) for event in events) > 0
    with pytest.raises(EngineDeadError):
        engine.add([make(0)])
    assert_level(engine)


def test_a_cache_that_cannot_be_rebuilt_is_the_end() -> None:
    engine, seqs = core(), [make(i) for i in range(6)]
    for seq in seqs:
        engine.add([seq])
    with failing(engine.runner, "forward", lambda n: n == 2, GONE), failing(
        engine.runner, "reset", lambda n: True, MemoryError("no room")
    ) as resets:  # fmt: skip
        drain(engine)
    with pytest.raises(EngineDeadError, match="could not be rebuilt"):
        engine.step()
    assert resets == [1, 2, 3] and all(seq.output.finish_reason == "error" for seq in seqs)
    engine.runner.reset()


def test_a_cache_that_is_rebuilt_at_the_second_try() -> None:
    engine, seqs = core(), [make(i) for i in range(6)]
    for seq in seqs:
        engine.add([seq])
    with failing(engine.runner, "forward", lambda n: n == 2, GONE), failing(
        engine.runner, "reset", lambda n: n == 1, MemoryError("no room")
    ):  # fmt: skip
        drain(engine)
    assert engine.dead is None
    for seq in seqs:
        if seq.output.finish_reason != "error":
            assert_as_alone(seq)


@pytest.mark.parametrize("name", ["forward", "sample"])
def test_an_interrupt_leaves_a_usable_engine(name: str) -> None:
    engine, seqs = core(), [make(i) for i in range(5)]
    for seq in seqs:
        engine.add([seq])
    with failing(engine.runner, name, lambda n: n == 3, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        drain(engine)
    engine.check_integrity()
    engine.abort("2")
    drain(engine)
    for seq in seqs:
        assert seq.request_id == "2" or result(seq) == alone(int(seq.request_id))
    assert_level(engine)


def test_a_wrong_state_is_repaired_when_idle() -> None:
    engine = core()
    engine.scheduler._slots.pop()
    engine.repair()
    engine.check_integrity()
    engine.add([seq := make(3)])
    drain(engine)
    assert_as_alone(seq)
