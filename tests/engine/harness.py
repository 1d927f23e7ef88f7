"""An engine core with a tiny model, a crowd of requests, and faults at chosen moments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from inferax.engine.core import EngineCore, Event
from inferax.engine.outputs import RequestOutput
from inferax.engine.pages import Pages
from inferax.engine.params import SamplingParams
from inferax.engine.runner import Runner
from inferax.engine.scheduler import Policy, Scheduler
from inferax.engine.sequence import Sequence
from tests.engine.tiny import CONFIG, engine

Result = tuple[str, str | None, list[int], list[dict[int, float]]]


@functools.cache  # programs are compiled once
def tiny_runner() -> Runner:
    return engine(seqs=4, budget=32, pages=64)


def core(
    *, pages: int = 64, policy: Policy = "fcfs", caching: bool = True, max_failures: int = 3, **bounds: Any
) -> EngineCore:
    """A new core with an empty cache. It may use fewer pages than the device has."""
    runner = tiny_runner()
    runner.reset()
    groups = CONFIG.windows
    return EngineCore(
        runner,
        Scheduler(Pages((pages,) * len(groups), 16, groups, caching), 4, 32, policy, **bounds),
        max_failures=max_failures,
    )


class Texts:
    """Each token is a word; some tokens may raise."""

    def __init__(self, bad: int | None = None) -> None:
        self.left = bad

    def add(self, token: int, /) -> str:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise ValueError("no such text")
        return f"{token} "

    def flush(self) -> str:
        return "."


PARAMS = (
    SamplingParams(temperature=0, max_tokens=9, logprobs=2),
    SamplingParams(temperature=1.2, top_p=0.9, max_tokens=11, logprobs=1),
    SamplingParams(temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5, max_tokens=8, logprobs=1),
    SamplingParams(temperature=1.0, mirostat_mode=2, max_tokens=7, logprobs=1),
)


def make(i: int, *, params: SamplingParams | None = None, name: str | None = None, index: int = 0) -> Sequence:
    """Request i of a crowd: always the same one."""
    rng = np.random.default_rng(i)
    prompt = [int(t) for t in rng.integers(0, 131, int(rng.integers(3, 60)))]
    p = params or PARAMS[i % len(PARAMS)]
    return Sequence(
        name or str(i), prompt, p, 100 + i, index, p.max_tokens or 1, frozenset(), detokenizer=Texts()
    )  # fmt: skip


def samples(i: int, n: int) -> list[Sequence]:
    """Request i with n samples."""
    seqs = [make(i, index=k) for k in range(n)]
    for other in seqs[1:]:
        other.sibling = seqs[0]
    return seqs


class Maker:
    """Makes sequences of requests whose prompts are token ids, for an AsyncEngine without a tokenizer."""

    def prompt(self, prompt: Any, /) -> tuple[str | None, list[int]]:
        return None, list(prompt)

    def make(
        self, request_id: str, prompt: tuple[str | None, list[int]], params: SamplingParams, *, priority: int = 0
    ) -> tuple[RequestOutput, list[Sequence]]:
        ids = prompt[1]
        seqs = [
            Sequence(request_id, ids, params, 7, k, params.max_tokens or 150, frozenset(), Texts(), priority=priority)
            for k in range(params.n)
        ]
        for other in seqs[1:]:
            other.sibling = seqs[0]
        return RequestOutput(request_id, None, ids, [s.output for s in seqs], False), seqs


def drain(engine: EngineCore, limit: int = 3000) -> list[Event]:
    """Runs to the end, with the integrity checked after every step."""
    events = []
    for _ in range(limit):
        if engine.idle:
            return events
        events += engine.step()
        if engine.dead is None:
            engine.check_integrity()
    raise AssertionError("it does not end")


def assert_level(engine: EngineCore) -> None:
    """Everything is given back."""
    engine.check_integrity()
    scheduler = engine.scheduler
    assert not scheduler.running and scheduler.num_waiting == scheduler.num_waiting_tokens == 0
    assert len(scheduler._slots) == scheduler.max_seqs
    assert all(pool.num_free == pool.num_pages for pool in scheduler.pages.pools)


def result(seq: Sequence) -> Result:
    out = seq.output
    tables = [{t: entry.logprob for t, entry in table.items()} for table in out.logprobs or []]
    return out.text, out.finish_reason, out.token_ids, tables


@functools.cache
def alone(i: int, index: int = 0) -> Result:
    """What request i of the crowd gives when it is alone."""
    engine, seq = core(caching=False), make(i, index=index)
    engine.add([seq])
    drain(engine)
    return result(seq)


def assert_as_alone(seq: Sequence) -> None:
    assert result(seq) == alone(int(seq.request_id), seq.output.index)


def assert_begins_as_alone(seq: Sequence) -> None:
    """What an ended sequence got until then is right."""
    _, _, tokens, tables = result(seq)
    whole = alone(int(seq.request_id), seq.output.index)
    assert tokens == whole[2][: len(tokens)] and tables == whole[3][: len(tables)]


@contextmanager
def failing(owner: Any, name: str, when: Callable[[int], bool], error: BaseException) -> Iterator[list[int]]:
    """`owner.name` raises `error` at the calls whose number, from 1, `when` accepts. Gives the list of those."""
    real, calls, failed = getattr(owner, name), 0, []

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if when(calls):
            failed.append(calls)
            raise error
        return real(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield failed
    finally:
        delattr(owner, name)  # the class's own shows again
