"""The loop over a fixed set of sequences: admits in order, prefills in chunks, decodes, one step ahead of the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from inferax.engine.outputs import Logprob
from inferax.engine.runner import Chunk, Runner, StepResult
from inferax.engine.sequence import Sequence


@dataclass(frozen=True)
class Event:
    """A sequence got a token; `text` is what that adds to its text."""

    seq: Sequence
    token: int
    text: str


class _Room:
    """Sequence slots and pages. A sequence takes all it can ever need when it is admitted."""

    def __init__(self, runner: Runner) -> None:
        shape = runner.shape
        self.page_size = shape.page_size
        self.slots = list(range(shape.max_seqs))[::-1]
        self.free = [list(range(count))[::-1] for count in shape.num_pages]

    def admit(self, seq: Sequence) -> bool:
        need = -(-(seq.prompt_len + seq.max_tokens) // self.page_size)
        if not self.slots or any(len(pages) < need for pages in self.free):
            return False
        seq.slot = self.slots.pop()
        seq.pages = [np.array([pages.pop() for _ in range(need)], np.int32) for pages in self.free]
        return True

    def release(self, seq: Sequence) -> None:
        self.slots.append(seq.slot)
        for pages, taken in zip(self.free, seq.pages, strict=True):
            pages.extend(int(p) for p in taken[::-1])
        seq.pages = []


def run(runner: Runner, sequences: Iterable[Sequence]) -> Iterator[Event]:
    """Runs sequences to their end. Step N + 1 is enqueued before the tokens of step N are read."""
    waiting, running = deque(sequences), list[Sequence]()
    room = _Room(runner)
    in_flight: StepResult | None = None
    while waiting or running or in_flight is not None:
        while waiting and room.admit(waiting[0]):
            running.append(waiting.popleft())
        chunks = _plan(running, runner.shape.max_batched_tokens)
        enqueued = _enqueue(runner, chunks) if chunks else None
        if in_flight is not None:
            yield from _retire(in_flight)
            for seq in [s for s in running if s.finished]:
                running.remove(seq)
                room.release(seq)
        in_flight = enqueued


def _plan(running: list[Sequence], budget: int) -> list[Chunk]:
    """Lets computed tokens catch up with known ones, in order, under a budget of tokens."""
    chunks = []
    for seq in running:
        if seq.finished or seq.computed >= seq.known or (seq.exhausted and seq.computed >= seq.prompt_len):
            continue
        count = min(seq.known - seq.computed, budget)
        if count == 0:
            break
        budget -= count
        stop = seq.computed + count
        chunks.append(Chunk(seq, seq.computed, stop, samples=stop == seq.known and not seq.exhausted))
    return chunks


def _enqueue(runner: Runner, chunks: list[Chunk]) -> StepResult:
    result = runner.step(chunks)
    for chunk in chunks:
        chunk.seq.computed = chunk.stop
        chunk.seq.pending += chunk.samples
    return result


def _retire(result: StepResult) -> Iterator[Event]:
    if not result.sampled:
        return
    tokens = result.tokens()
    tables = {name: result.array(name) for name in result.copies if name != "tokens"}
    for row, (seq, token) in enumerate(zip(result.sampled, tokens, strict=True)):
        if seq.finished:  # it ended at the token before; this one is of no use
            continue
        text = seq.accept(token, _logprobs(seq, token, tables, row) if tables else None)
        yield Event(seq, token, text)


def _logprobs(seq: Sequence, token: int, tables: dict[str, np.ndarray], row: int) -> dict[int, Logprob] | None:
    count = seq.params.logprobs
    if count is None:
        return None

    def text(token: int) -> str | None:
        return None if seq.token_text is None else seq.token_text(token)

    found = {token: Logprob(float(tables["logprob"][row]), int(tables["rank"][row]), text(token))}
    best = zip(tables["top_ids"][row][:count], tables["top_logprobs"][row][:count], strict=True)
    for rank, (other, logprob) in enumerate(best, start=1):
        found.setdefault(int(other), Logprob(float(logprob), rank, text(int(other))))
    return found
