"""The loop that drives the scheduler and the runner, one step ahead of the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass

import numpy as np

from inferax.engine.outputs import Logprob
from inferax.engine.pages import Pages
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner, StepResult
from inferax.engine.scheduler import Chunk, Policy, Scheduler
from inferax.engine.sequence import Sequence


@dataclass(frozen=True)
class Event:
    """A sequence got a token; `text` is what that adds to its text."""

    seq: Sequence
    token: int
    text: str


def scheduler_for(
    shape: EngineShape, windows: SequenceType[int | None], *, policy: Policy = "fcfs", caching: bool = True
) -> Scheduler:
    """An empty scheduler for an engine of that shape; `windows` are its cache groups'."""
    pages = Pages(shape.num_pages, shape.page_size, windows, caching)
    return Scheduler(pages, shape.max_seqs, shape.max_batched_tokens, policy)


def run(runner: Runner, sequences: Iterable[Sequence], scheduler: Scheduler | None = None) -> Iterator[Event]:
    """Runs sequences to their end. Step N + 1 is enqueued before the tokens of step N are read.

    Whoever stops reading early aborts what has not ended. A step that fails loses the cache's contents: it is rebuilt
    and the prefix index with it, and the error is raised.
    """
    scheduler = scheduler or scheduler_for(runner.shape, runner.config.windows)
    mine = list(sequences)
    for seq in mine:
        scheduler.add(seq)
    in_flight: StepResult | None = None
    try:
        while not scheduler.idle or in_flight is not None:
            plan = scheduler.schedule()
            enqueued = None
            if plan.chunks:
                enqueued = runner.step(plan.chunks)
                scheduler.commit(plan)
            elif in_flight is None:
                raise RuntimeError(f"{scheduler.num_waiting} sequences wait and none can run: a page pool is too small")
            if in_flight is not None:
                for event in _retire(in_flight):
                    if event.seq.finished:
                        scheduler.finish(event.seq)
                    yield event
            in_flight = enqueued
    except GeneratorExit:
        raise
    except BaseException:
        runner.reset()
        scheduler.pages.reset()
        raise
    finally:
        for seq in mine:
            if not seq.finished:
                seq.output.finish_reason = "abort"
                scheduler.finish(seq)


def _retire(result: StepResult) -> Iterator[Event]:
    if result.scored:
        scores = {name: copy.result() for name, copy in result.scores.items()}
        for chunk, first in result.scored:
            _take_scores(chunk, first, scores)
    if not result.sampled:
        return
    tokens = result.tokens()
    tables = {name: result.array(name) for name in result.copies if name != "tokens"}
    for row, (seq, token) in enumerate(zip(result.sampled, tokens, strict=True)):
        if seq.finished:  # it ended at the token before; this one is of no use
            continue
        if "mu" in tables:
            seq.mu = float(tables["mu"][row])
        count = seq.params.logprobs or 0
        text = seq.accept(token, _logprobs(seq, token, tables, row, count) if seq.wants_logprobs else None)
        yield Event(seq, token, text)


def _take_scores(chunk: Chunk, first: int, scores: dict[str, np.ndarray]) -> None:
    seq, taken = chunk.seq, chunk.seq.prompt_logprobs
    if taken is None:
        return
    for position in range(chunk.start + 1, min(chunk.stop + 1, seq.prompt_len)):
        if position == len(taken):  # what was computed again after a preemption is there already
            row = first + position - 1 - chunk.start
            taken.append(_logprobs(seq, seq.prompt[position], scores, row, seq.params.prompt_logprobs or 0))


def _logprobs(seq: Sequence, token: int, tables: dict[str, np.ndarray], row: int, count: int) -> dict[int, Logprob]:
    def text(token: int) -> str | None:
        return None if seq.token_text is None else seq.token_text(token)

    found = {token: Logprob(float(tables["logprob"][row]), int(tables["rank"][row]), text(token))}
    best = zip(tables["top_ids"][row][:count], tables["top_logprobs"][row][:count], strict=True)
    for rank, (other, logprob) in enumerate(best, start=1):
        found.setdefault(int(other), Logprob(float(logprob), rank, text(int(other))))
    if "wanted_logprobs" in tables:
        for other, logprob in zip(seq.params.logprob_token_ids or (), tables["wanted_logprobs"][row], strict=False):
            found.setdefault(other, Logprob(float(logprob), None, text(other)))
    return found
