"""`run`: an engine core for the length of a loop, as tests and scripts want it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceType

from inferax.engine.core import EngineCore, Event
from inferax.engine.pages import Pages
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from inferax.engine.scheduler import Policy, Scheduler
from inferax.engine.sequence import Sequence


def scheduler_for(
    shape: EngineShape, windows: SequenceType[int | None], *, policy: Policy = "fcfs", caching: bool = True
) -> Scheduler:
    """An empty scheduler for an engine of that shape; `windows` are its cache groups'."""
    pages = Pages(shape.num_pages, shape.page_size, windows, caching)
    return Scheduler(pages, shape.max_seqs, shape.max_batched_tokens, policy)


def run(runner: Runner, sequences: Iterable[Sequence], scheduler: Scheduler | None = None) -> Iterator[Event]:
    """Runs sequences to their end, with what waits in `scheduler` already, and gives every token as it comes.

    Whoever stops reading early aborts what has not ended. Raises StepError when all have ended and one of them failed.
    """
    core = EngineCore(runner, scheduler or scheduler_for(runner.shape, runner.config.windows))
    mine = list(sequences)
    core.add(mine)
    try:
        while not core.idle:
            yield from core.step()
    finally:
        for seq in mine:
            if not seq.finished:
                core.abort(seq.request_id)
    for seq in mine:
        if seq.output.error is not None:
            raise seq.output.error
