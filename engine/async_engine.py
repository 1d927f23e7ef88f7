"""`AsyncEngine`: an engine core in a thread of its own, with asyncio streams around it.

Requests go in through an inbox that the thread empties between steps. Results come out as marks: how far each sample
has got. There is one mark per sample that was not looked at yet, however far behind its reader is, and one call into an
event loop for all marks that wait for it; the tokens themselves are read where they lie, in lists that only grow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceType
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from inferax.engine.build import build_engine
from inferax.engine.core import EngineCore, Event
from inferax.engine.metrics import Metric, snapshot
from inferax.engine.outputs import CompletionDelta, Delta, RequestMetrics, RequestOutput
from inferax.engine.params import SamplingParams
from inferax.engine.requests import Messages, Prompt, Rendered, Requests
from inferax.engine.scheduler import tokens_of
from inferax.engine.sequence import Sequence
from inferax.errors import EngineClosedError, EngineDeadError, InferaxError, RequestError
from inferax.loaders.model import Model

_log = logging.getLogger(__name__)
_POLL_S = 0.003
_IDLE_CHECK_S = 1.0

Mark = tuple[int, int, bool]  # tokens, characters, finished


class Maker(Protocol):
    """What turns prompts into sequences; `Requests` is the one for models with a tokenizer."""

    def prompt(self, prompt: Any, /) -> Rendered: ...

    def make(
        self, request_id: str, prompt: Rendered, params: SamplingParams, *, priority: int = 0
    ) -> tuple[RequestOutput, list[Sequence]]: ...


class Stream:
    """One request's deltas as they come, and `request`, all that was read so far. For one reader.

    Reading raises the request's StepError, EngineDeadError or QueueFullError after everything there was before it.
    """

    def __init__(self, output: RequestOutput, seqs: SequenceType[Sequence], abort: Callable[[str], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.seqs, self.unfinished = seqs, len(seqs)  # `unfinished` is the engine's side
        outputs = [replace(out, token_ids=[], logprobs=None if out.logprobs is None else []) for out in output.outputs]
        self.request = replace(output, outputs=outputs)
        self._abort, self._began = abort, time.perf_counter()
        self._marks: dict[int, Mark] = {}
        self._error: InferaxError | None = None
        self._news = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def abort(self) -> None:
        """Ends the request if it has not ended."""
        if not self.request.finished and self._error is None:
            self._abort(self.request_id)

    def put(self, index: int, mark: Mark | InferaxError) -> None:
        """News of a sample (or of the request, where it is an error), in the loop's thread."""
        if isinstance(mark, tuple):
            self._marks[index] = mark
        else:
            self._error = mark
        self._news.set()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if not self._marks and self._error is None and not self.request.finished:
            await self._news.wait()
        self._news.clear()
        if self._marks:
            marks, self._marks = self._marks, {}
            return self._take(marks)
        error = self._error or self.request.error
        if error is not None:
            raise error
        raise StopAsyncIteration

    def _take(self, marks: dict[int, Mark]) -> Delta:
        now = time.perf_counter() - self._began
        request, deltas = self.request, []
        for index, (tokens, chars, finished) in sorted(marks.items()):
            theirs, out = self.seqs[index].output, request.outputs[index]
            new = theirs.token_ids[len(out.token_ids) : tokens]
            text = theirs.text[len(out.text) : chars]
            logprobs = None
            if theirs.logprobs is not None and out.logprobs is not None and out.cumulative_logprob is not None:
                logprobs = theirs.logprobs[len(out.token_ids) : tokens]
                out.logprobs += logprobs
                for token, table in zip(new, logprobs, strict=True):
                    out.cumulative_logprob += table[token].logprob
            out.token_ids += new
            out.text += text
            if finished:
                out.finish_reason, out.stop_reason, out.error = theirs.finish_reason, theirs.stop_reason, theirs.error
            deltas.append(CompletionDelta(index, text, new, logprobs, out.finish_reason, out.stop_reason, out.error))
        request.finished = all(out.finished for out in request.outputs)
        first = now if request.metrics is None else request.metrics.time_to_first_token_s
        request.metrics = RequestMetrics(first, now)
        return Delta(deltas, request)


class AsyncEngine:
    """A model that serves many requests at once, from asyncio.

    max_waiting_requests, max_waiting_tokens: bounds on the samples that wait and on their prompts' tokens; what comes
        on top is refused with a QueueFullError. None: no bound.
    watchdog_s: a step that takes longer makes the engine `stuck` until it ends. Compiling counts as well.
    warm_up: on, unlike in `LLM`, so that no request waits for a compiler.
    All other arguments are those of `LLM`. Use it as an async context manager, or `await shutdown()` at the end.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Model | None = None,
        *,
        max_waiting_requests: int | None = 1024,
        max_waiting_tokens: int | None = None,
        watchdog_s: float = 60.0,
        seed: int | None = None,
        reasoning_end: str | SequenceType[int] | None = None,
        **arguments: Any,
    ) -> None:
        for name, value in (("max_waiting_requests", max_waiting_requests), ("max_waiting_tokens", max_waiting_tokens)):
            if value is not None and value < 1:
                raise RequestError(name, f"{value} is less than 1")
        engine = build_engine(model, **{"warm_up": True} | arguments)
        engine.scheduler.max_waiting, engine.scheduler.max_waiting_tokens = max_waiting_requests, max_waiting_tokens
        core = EngineCore(engine.runner, engine.scheduler)
        self.model, self.max_model_len = engine.model, engine.max_model_len
        processors = engine.runner.processors
        requests = Requests(engine.model, engine.max_model_len, seed, processors, reasoning_end)
        self._start(core, requests, watchdog_s)

    @classmethod
    def over(cls, core: EngineCore, requests: Maker, *, watchdog_s: float = 60.0) -> AsyncEngine:
        """An engine from its parts. The core belongs to the engine's thread from now on."""
        engine = cls.__new__(cls)
        engine._start(core, requests, watchdog_s)
        return engine

    def _start(self, core: EngineCore, requests: Maker, watchdog_s: float) -> None:
        if not watchdog_s > 0:
            raise RequestError("watchdog_s", f"{watchdog_s} is not more than 0")
        self._core, self._requests, self._watchdog_s = core, requests, watchdog_s
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._inbox: list[Callable[[], list[Event]]] = []
        self._incoming = (0, 0)  # samples and prompt tokens in the inbox
        self._streams: dict[str, Stream] = {}
        self._boxes: dict[asyncio.AbstractEventLoop, dict[tuple[Stream, int], Mark | InferaxError]] = {}
        self._closing = self._draining = False
        self._error: EngineDeadError | None = None
        self._step_began: float | None = None
        self._stopped = threading.Event()
        self._workers = ThreadPoolExecutor(2, "inferax-requests")
        self._thread = threading.Thread(target=self._run, name="inferax-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="inferax-watchdog", daemon=True)
        self._thread.start()
        self._watchdog.start()

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread is alive."""
        return self._thread.is_alive() and self._error is None

    @property
    def stuck(self) -> bool:
        """Whether the step under way takes longer than `watchdog_s`."""
        began = self._step_began
        return began is not None and time.monotonic() - began > self._watchdog_s

    @property
    def errored(self) -> EngineDeadError | None:
        """What the engine died of."""
        return self._error

    @property
    def ready(self) -> bool:
        """Whether a request that comes now would be served."""
        return self.is_running and not self.stuck and not self._draining

    def metrics(self) -> list[Metric]:
        """Counters, gauges and histograms of what ran so far."""
        return snapshot(self._core)

    async def render(self, messages: Messages, **kwargs: Any) -> Rendered:
        """As `LLM.render`, away from the event loop."""
        requests: Any = self._requests
        rendered: Rendered = await self._away(lambda: requests.render(messages, **kwargs))
        return rendered

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> Rendered:
        """A prompt as text, where there is one, and token ids, away from the event loop."""
        requests: Any = self._requests
        rendered: Rendered = await self._away(lambda: requests.prompt(prompt, add_special_tokens=add_special_tokens))
        return rendered

    async def generate(
        self,
        prompt: Prompt | Rendered,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Delta]:
        """Completes a prompt, giving what is new each time there is something. Leaving early ends the request.

        Raises as `submit` does before the first delta, and StepError or EngineDeadError after the last.
        """
        stream = await self.submit(prompt, sampling_params, request_id=request_id, priority=priority)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    async def submit(
        self,
        prompt: Prompt | Rendered,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Stream:
        """Takes a request in and returns its stream; who does not read it to its end calls its `abort`.

        Raises RequestError, QueueFullError, EngineClosedError or EngineDeadError.
        """
        self._refuse_if_closed()
        name = uuid.uuid4().hex if request_id is None else request_id
        arrived = self._core.clock()
        output, seqs = await self._away(
            lambda: self._requests.make(
                name, self._requests.prompt(prompt), sampling_params or SamplingParams(), priority=priority
            )
        )
        stream = Stream(output, seqs, self.abort)
        with self._lock:
            self._refuse_if_closed()
            if name in self._streams:
                raise RequestError("request_id", f"{name!r} is in use")
            requests, tokens = self._incoming
            self._core.scheduler.check(seqs, requests, tokens)
            self._incoming = (requests + len(seqs), tokens + tokens_of(seqs))
            self._streams[name] = stream
            self._inbox.append(lambda: self._add(stream, arrived))
            self._wake.notify()
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request within a step, with finish_reason "abort". One that is not there is no error."""
        self._tell(lambda: self._core.abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes between this step and the next."""

        def command() -> list[Event]:
            self._core.reset_prefix_cache()
            return []

        self._tell(command)

    async def drain(self, deadline_s: float) -> None:
        """Takes no more requests, waits until those there are have ended, and aborts what is left at the deadline."""
        self._draining = True
        await self._until(lambda: not self._streams, deadline_s)
        for request_id in list(self._streams):
            self.abort(request_id)
        await self._until(lambda: not self._streams, self._watchdog_s)

    async def shutdown(self) -> None:
        """Aborts what runs and ends the engine's threads. One that is stuck for `watchdog_s` is left behind."""
        with self._lock:
            self._draining = self._closing = True
            self._wake.notify()
        await self._until(lambda: not self._thread.is_alive(), self._watchdog_s)
        if self._thread.is_alive():
            self._die(EngineDeadError("the engine is dead: it was stuck in a step when it was shut down"))
        else:
            self._thread.join()
        self._stopped.set()
        self._workers.shutdown()
        self._watchdog.join()
        await asyncio.sleep(0)  # what the thread said last is on its way

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def _refuse_if_closed(self) -> None:
        if self._error is not None:
            raise self._error
        if self._draining:
            raise EngineClosedError("the engine takes no more requests: it is shutting down")

    async def _away(self, work: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, work)
        except RuntimeError:
            self._refuse_if_closed()
            raise

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end and self._error is None:
            await asyncio.sleep(_POLL_S)

    def _tell(self, command: Callable[[], list[Event]]) -> None:
        with self._lock:
            self._inbox.append(command)
            self._wake.notify()

    # From here on: the engine's thread, except for `_deliver` and `_watch`.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._work()
            for request_id in list(self._streams):
                self._publish(self._core.abort(request_id))
            while self._core.dead is None and not self._core.idle:
                self._publish(self._core.step())
            self._die(EngineClosedError("the engine was shut down"))
        except EngineDeadError as error:
            self._die(error)
        except BaseException as error:
            _log.exception("the engine's thread died")
            dead = EngineDeadError(f"the engine is dead: {type(error).__name__}: {error}")
            dead.__cause__ = error
            self._die(dead)

    def _work(self) -> None:
        """Obeys what was asked for, then does one step."""
        for command in self._commands():
            self._publish(command())
        if not self._core.idle:
            self._step_began = time.monotonic()
            try:
                events = self._core.step()
            finally:
                self._step_began = None
            self._publish(events)
        if self._core.dead is not None:
            raise self._core.dead

    def _commands(self) -> list[Callable[[], list[Event]]]:
        """What is in the inbox; waits for something where there is nothing else to do."""
        checked = False
        while True:
            with self._lock:
                if self._core.idle and not self._inbox and not self._closing:
                    self._wake.wait(None if checked else _IDLE_CHECK_S)
                if self._inbox or self._closing or not self._core.idle:
                    commands, self._inbox, self._incoming = self._inbox, [], (0, 0)
                    return commands
            if not checked:
                self._core.repair()
                checked = True

    def _add(self, stream: Stream, arrived: float) -> list[Event]:
        try:
            self._core.add(stream.seqs, arrived)
        except InferaxError as error:
            self._streams.pop(stream.request_id, None)
            self._post([(stream, 0, error)])
        return []

    def _publish(self, events: list[Event]) -> None:
        news: list[tuple[Stream, int, Mark | InferaxError]] = []
        for event in events:
            out, stream = event.seq.output, self._streams.get(event.seq.request_id)
            if stream is not None:
                news.append((stream, out.index, (len(out.token_ids), len(out.text), event.finished)))
                stream.unfinished -= event.finished
                if not stream.unfinished:
                    del self._streams[stream.request_id]
        if news:
            self._post(news)

    def _post(self, news: list[tuple[Stream, int, Mark | InferaxError]]) -> None:
        woken = []
        with self._lock:
            for stream, index, mark in news:
                box = self._boxes.get(stream.loop)
                if box is None:
                    box = self._boxes[stream.loop] = {}
                    woken.append(stream.loop)
                box[stream, index] = mark
        for loop in woken:
            try:
                loop.call_soon_threadsafe(self._deliver, loop)
            except RuntimeError:  # the loop is closed: nobody will ever read these
                with self._lock:
                    box = self._boxes.pop(loop, {})
                for stream, _ in box:
                    if stream.request_id in self._streams:
                        self.abort(stream.request_id)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            box = self._boxes.pop(loop, {})
        for (stream, index), mark in box.items():
            stream.put(index, mark)

    def _die(self, error: InferaxError) -> None:
        """The thread is at its end, and with it every stream that is left."""
        with self._lock:
            if isinstance(error, EngineDeadError):
                self._error = error
            self._draining = True
            streams, self._streams, self._inbox = list(self._streams.values()), {}, []
        self._post([(stream, -1, error) for stream in streams])

    def _watch(self) -> None:
        known: float | None = None
        while not self._stopped.wait(self._watchdog_s / 4):
            began = self._step_began
            if self.stuck and began != known:
                known = began
                self._core.metrics.stuck_steps += 1
                _log.error("a step takes longer than %g s", self._watchdog_s)
