"""`EngineCore`: a scheduler and a runner, and what happens when one of them fails. No threads.

It is one step ahead of the host: the forward of step N + 1 is enqueued before the tokens of step N are read. Where a
row of step N + 1 follows a grammar, they are read between its forward and its sample, since they decide its mask.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass

from inferax.engine.metrics import Metrics, Timing
from inferax.engine.outputs import FinishReason
from inferax.engine.results import read, take_scores, take_token
from inferax.engine.runner import Runner, StepResult
from inferax.engine.scheduler import Chunk, Scheduler
from inferax.engine.sequence import Sequence
from inferax.errors import EngineDeadError, InferaxError, RequestError, StepError

MAX_FAILURES = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """A sequence got a token, or ended, or both; `text` is what that adds to its text."""

    seq: Sequence
    token: int | None
    text: str
    finished: bool


@dataclass
class _Flight:
    """A step under way."""

    chunks: list[Chunk]
    result: StepResult


class EngineCore:
    """Runs the sequences that it is given, a step at a time.

    Failures. An exception while a token is given to a sequence (its text, its grammar) ends that sequence. An exception
    in a step ends the sequences in it, and loses the cache: that is rebuilt, and all other sequences begin anew with
    the tokens they have; what they sample does not change by that. Sequences that end so have finish_reason "error" and
    a StepError. After `max_failures` of one kind without a good step between them, or where the cache can't be rebuilt,
    the engine is dead: all ends with an EngineDeadError, and `add` and `step` raise it (`dead`).

    A sequence that holds every page there is and still needs one ends with "length", as at its context's end.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        max_failures: int = MAX_FAILURES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner, self.scheduler, self.metrics = runner, scheduler, Metrics()
        self.dead: EngineDeadError | None = None
        self._max_failures, self.clock = max_failures, clock
        self._live: dict[str, dict[Sequence, Timing]] = {}
        self._flight: _Flight | None = None
        self._unbuilt: list[Sequence] = []  # that wait for programs which are being built
        self._ended: list[Sequence] = []  # in this step; they keep their slots while a program may name them
        # What is being done, and who is at fault where that fails.
        self._stage = ""
        self._suspects: list[Sequence] = []
        self._last_failure: tuple[str, type] | None = None
        self._failures = 0
        for seq in scheduler.live:
            self._live.setdefault(seq.request_id, {})[seq] = Timing(self.clock())

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self._flight is None and not self._unbuilt

    def add(self, seqs: SequenceType[Sequence], arrived: float | None = None) -> None:
        """Queues the sequences of a request. arrived: when it came, in seconds of the clock (default: now).

        Raises QueueFullError, RequestError for what could never run, or EngineDeadError; then nothing was queued.
        """
        if self.dead is not None:
            raise self.dead
        self.scheduler.check(seqs)
        timing = self.clock() if arrived is None else arrived
        for seq in seqs:
            self._live.setdefault(seq.request_id, {})[seq] = Timing(timing)
        if any(seq.scoring for seq in seqs) and not self.runner.may_score():
            self._unbuilt += seqs
            return
        for seq in seqs:
            self.scheduler.add(seq)

    def abort(self, request_id: str) -> list[Event]:
        """Ends all sequences of a request, wherever they are. One that is not there (any more) is no error."""
        events: list[Event] = []
        for seq in list(self._live.get(request_id, ())):
            self._end(seq, "abort", events)
        try:
            self._let_go()
        except Exception as cause:
            self._fail(cause, events)
        return events

    def step(self) -> list[Event]:
        """Schedules and enqueues one step, and gives out the results of the one before. Raises EngineDeadError."""
        if self.dead is not None:
            raise self.dead
        events: list[Event] = []
        try:
            self._advance(events)
            self._let_go()
        except Exception as cause:
            self._fail(cause, events)
        except BaseException:  # interrupted anywhere: whoever is still wanted begins anew
            self._restart()
            raise
        return events

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; what runs keeps its pages."""
        self.scheduler.pages.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots and pages agree with the sequences that hold them."""
        self.scheduler.check_integrity()
        live = {seq for seqs in self._live.values() for seq in seqs}
        assert live == {*self.scheduler.live, *self._unbuilt}, "the scheduler's sequences are not the live ones"
        assert not any(seq.finished for seq in live), "a finished sequence is live"

    def repair(self) -> None:
        """Checks the integrity, and starts over with empty pages where it does not hold. For idle moments."""
        try:
            self.check_integrity()
        except AssertionError:
            _log.exception("the scheduler's state was wrong; it was rebuilt")
            self.metrics.step_failures += 1
            self._restart()

    def _advance(self, events: list[Event]) -> None:
        started = self.clock()
        self._stage, self._suspects = "schedule", []
        if self._unbuilt:
            self._let_in()
        plan = self.scheduler.schedule()
        chunks, enqueued = plan.chunks, None
        for seq in plan.admitted:
            timing = self._live[seq.request_id][seq]
            timing.scheduled = started if timing.scheduled is None else timing.scheduled
        if chunks:
            self._stage, self._suspects = "forward", [chunk.seq for chunk in chunks]
            result = self.runner.forward(chunks)
            self.scheduler.commit(plan)
            if self._flight is not None and any(seq.grammar is not None for seq in result.sampled):
                self._retire(events)
            self._stage, self._suspects = "sample", [chunk.seq for chunk in chunks]
            self.runner.sample(result)
            for seq, cause in result.failed:
                self._end(seq, "error", events, StepError("grammar", cause))
            enqueued = _Flight(chunks, result)
            self.metrics.histograms["iteration_tokens_total"].observe(sum(c.stop - c.start for c in chunks))
        elif self._flight is None and not self.scheduler.idle:
            self._unstick(events)
        if self._flight is not None:
            self._retire(events)
        self._flight = enqueued
        self.metrics.histograms["step_time_seconds"].observe(self.clock() - started)

    def _let_in(self) -> None:
        """Queues what waited for programs, once they are there. Waits a moment where there is nothing else to do."""
        if self.scheduler.idle and self._flight is None:
            self.runner.wait_to_score(timeout_s=0.05)
        if self.runner.may_score():
            for seq in self._unbuilt:
                self.scheduler.add(seq)
            self._unbuilt.clear()

    def _retire(self, events: list[Event]) -> None:
        """Reads the results of the step in flight and gives them to its sequences."""
        flight = self._flight
        if flight is None:
            return
        chunks, samples = flight.chunks, flight.result.samples
        self._stage, self._suspects = "read", [chunk.seq for chunk in chunks]
        results = read(flight.result)
        self._flight, self._failures = None, 0
        self._stage = "accept"
        for chunk, first in flight.result.scored:
            self._suspects = [chunk.seq]
            take_scores(chunk, first, results.scores)
        metrics, given = self.metrics, 0
        metrics.begin(self.clock())
        for row, chunk in enumerate(samples):
            seq = chunk.seq
            if seq.finished:  # it ended at the token before; this one is of no use
                continue
            try:
                text = take_token(seq, row, results)
            except Exception as cause:
                _log.exception("request %s failed", seq.request_id)
                self._end(seq, "error", events, StepError("accept", cause))
                continue
            given += 1
            metrics.token(seq, self._live[seq.request_id][seq])
            if seq.finished:
                self._done(seq)
            events.append(Event(seq, results.tokens[row], text, seq.finished))
        metrics.end(given)
        if len(samples) < len(chunks):
            for chunk in chunks:
                if chunk.seq.max_tokens == 0 and chunk.stop == chunk.seq.prompt_len and not chunk.seq.finished:
                    self._end(chunk.seq, "length", events)

    def _unstick(self, events: list[Event]) -> None:
        """Nothing runs, and what is next in line can't: a pool is too small for it even when it is alone."""
        seq = self.scheduler.next_in_line()
        if seq is None:
            raise RuntimeError("nothing runs, nothing waits, and yet there is work")
        self._suspects = [seq]
        if seq.output.token_ids:
            self._end(seq, "length", events, text=seq.flush())
        else:
            problem = f"its {seq.prompt_len} tokens do not fit the KV cache"
            self._end(seq, "error", events, StepError("schedule", RequestError("prompt", problem)))

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        events: list[Event],
        error: InferaxError | None = None,
        *,
        text: str = "",
    ) -> None:
        if not seq.finished:
            seq.output.finish_reason, seq.output.error = reason, error
            self._done(seq)
            events.append(Event(seq, None, text, True))

    def _done(self, seq: Sequence) -> None:
        siblings = self._live[seq.request_id]
        self.metrics.done(seq, siblings.pop(seq), self.clock())
        if not siblings:
            del self._live[seq.request_id]
        self._ended.append(seq)

    def _let_go(self) -> None:
        self._stage, self._suspects = "schedule", []
        while self._ended:
            if self._ended[-1] in self._unbuilt:
                self._unbuilt.remove(self._ended[-1])
            else:
                self.scheduler.finish(self._ended[-1])
            self._ended.pop()

    def _fail(self, cause: Exception, events: list[Event]) -> None:
        """Ends the sequences at fault; all others begin anew with what they have."""
        stage, suspects = self._stage, self._suspects
        if stage == "schedule" and self.scheduler.looking_at is not None:
            suspects = [self.scheduler.looking_at]
        if stage != "read":
            try:  # what the step before has sampled is not lost, unless it is the one that failed
                self._retire(events)
            except Exception as earlier:
                cause, stage, suspects = earlier, self._stage, self._suspects
        error = StepError(stage, cause)
        _log.error("a step failed", exc_info=cause)
        self.metrics.step_failures += 1
        for seq in suspects:
            self._end(seq, "error", events, error)
        failure = (stage, type(cause))
        self._failures = self._failures + 1 if failure == self._last_failure else 1
        self._last_failure = failure
        if self._failures >= self._max_failures:
            self._die(f"{self._failures} steps in a row failed, the last one so: {error}", cause, events)
        else:
            self._restart(events)

    def _restart(self, events: list[Event] | None = None) -> None:
        self._flight = None
        self._ended.clear()
        live = [seq for seqs in self._live.values() for seq in seqs if seq not in self._unbuilt]
        self.scheduler.restart(sorted(live, key=lambda seq: seq.arrival))
        for attempt in range(1, self._max_failures + 1):
            try:
                self.runner.reset()
                return
            except Exception as error:
                _log.exception("the KV cache could not be rebuilt")
                if attempt == self._max_failures:
                    self._die("the KV cache could not be rebuilt", error, [] if events is None else events)

    def _die(self, problem: str, cause: Exception, events: list[Event]) -> None:
        self.dead = EngineDeadError(f"the engine is dead: {problem}")
        self.dead.__cause__ = cause
        self._flight = None
        for seqs in list(self._live.values()):
            for seq in list(seqs):
                self._end(seq, "error", events, self.dead)
        self._ended.clear()
        self._unbuilt.clear()
        self.scheduler.restart(())
