"""`AsyncEngine`: streams, aborts, slow readers, drains, hangs and deaths; threads and tasks are gone afterwards."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import inferax
from inferax.engine.async_engine import AsyncEngine
from inferax.engine.core import EngineCore
from inferax.engine.outputs import Delta
from inferax.engine.params import SamplingParams
from inferax.errors import EngineClosedError, EngineDeadError, QueueFullError, RequestError, StepError
from tests.engine.harness import Maker, assert_level, core, failing

PROMPT = [3, 14, 15, 92, 65]
SHORT = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
LONG = SamplingParams(temperature=0, max_tokens=150)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No thread outlives a test, and no log is printed."""
    before = set(threading.enumerate())
    logging.getLogger("inferax").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("inferax").setLevel(logging.NOTSET)
    left = [t.name for t in set(threading.enumerate()) - before if t.name != "tqdm_monitor"]
    assert not left, f"threads are left: {left}"


@asynccontextmanager
async def serving(engine: EngineCore, **arguments: Any) -> AsyncIterator[AsyncEngine]:
    """An engine that gives everything back at its end."""
    async with AsyncEngine.over(engine, Maker(), **({"watchdog_s": 20.0} | arguments)) as served:
        yield served
    if engine.dead is None:
        assert_level(engine)
    assert len(asyncio.all_tasks()) == 1, "tasks are left"
    assert not served._streams and not served._boxes and not served.is_running and not served.ready


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(within())


async def collect(served: AsyncEngine, prompt: list[int], params: SamplingParams, **more: Any) -> list[Delta]:
    return [delta async for delta in served.generate(prompt, params, **more)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_deltas_add_up_to_the_answer() -> None:
    async def test() -> None:
        async with serving(core()) as served:
            assert served.ready and served.is_running and not served.stuck and served.errored is None
            params = SamplingParams(temperature=1.0, max_tokens=8, logprobs=1, n=3)
            deltas = await collect(served, PROMPT, params)
            request = deltas[-1].request
            assert request.finished and request.metrics is not None
            for out in request.outputs:
                mine = [d for delta in deltas for d in delta.outputs if d.index == out.index]
                assert "".join(d.text for d in mine) == out.text and len(out.token_ids) == 8
                assert [t for d in mine for t in d.token_ids] == out.token_ids
                assert [t for d in mine for t in d.logprobs or []] == out.logprobs
                assert [d.finish_reason for d in mine][-1] == out.finish_reason == "length"
                assert out.text == "".join(f"{t} " for t in out.token_ids) + "."
            alone = await collect(served, PROMPT, params)
            assert [o.token_ids for o in alone[-1].request.outputs] == [o.token_ids for o in request.outputs]
            assert alone[-1].request.outputs[0].cumulative_logprob == request.outputs[0].cumulative_logprob

    run(test)


def test_many_at_once() -> None:
    async def test() -> None:
        async with serving(core()) as served:
            each = await asyncio.gather(*(collect(served, [i % 7, 5], SHORT) for i in range(40)))
            texts = [deltas[-1].request.outputs[0].text for deltas in each]
            assert len(set(texts)) <= 7 and texts[:7] == texts[7:14] and all(d[-1].request.finished for d in each)
            names = {m.name: m.value for m in served.metrics()}
            assert names["generation_tokens"] == 320 and names["num_requests_running"] == 0

    run(test)


@pytest.mark.parametrize("how", ["abort", "break", "cancel", "stream"])
def test_leaving_ends_the_request_within_a_step(how: str) -> None:
    async def test() -> None:
        engine = core()
        async with serving(engine) as served:
            if how == "abort":
                deltas = []
                async for delta in served.generate(PROMPT, LONG, request_id="mine"):
                    deltas.append(delta)
                    served.abort("mine")
                assert deltas[-1].request.outputs[0].finish_reason == "abort" and deltas[-1].request.finished
            elif how == "break":
                async for _ in served.generate(PROMPT, LONG):
                    break
            elif how == "cancel":
                task = asyncio.create_task(collect(served, PROMPT, LONG))
                await until(lambda: bool(engine.scheduler.running))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                stream = await served.submit(PROMPT, LONG)
                await anext(stream)
                stream.abort()
            await until(lambda: engine.idle)
            assert engine.metrics.finished["abort"] == 1
            served.abort("nobody")

    run(test)


def test_a_reader_that_stops_costs_one_mark_and_stalls_nobody() -> None:
    async def test() -> None:
        async with serving(core()) as served:
            slow = await served.submit(PROMPT, LONG)
            await anext(slow)
            others = await asyncio.gather(*(collect(served, [i, 5], SHORT) for i in range(12)))
            assert all(deltas[-1].request.finished for deltas in others)
            await until(lambda: served._core.idle)
            await asyncio.sleep(0.01)
            assert len(slow._marks) == 1
            rest = [delta async for delta in slow]
            assert len(rest) == 1 and len(slow.request.outputs[0].token_ids) == 150

    run(test)


def test_a_blocked_event_loop_gets_one_call() -> None:
    async def test() -> None:
        engine = core()
        async with serving(engine) as served:
            stream = await served.submit(PROMPT, LONG)
            time.sleep(0.05)  # the loop's own thread: nothing is delivered meanwhile
            while not engine.idle:
                time.sleep(0.005)
            assert len(served._boxes) == 1 and all(len(box) == 1 for box in served._boxes.values())
            assert len([delta async for delta in stream]) <= 2

    run(test)


def test_a_bounded_queue_refuses_and_recovers() -> None:
    async def test() -> None:
        engine = core(max_waiting=3)
        gate = threading.Event()
        forward = engine.runner.forward
        engine.runner.forward = lambda chunks: gate.wait(10) and forward(chunks)  # type: ignore[method-assign]
        try:
            async with serving(engine) as served:
                streams = [await served.submit(PROMPT, SHORT)]
                await until(lambda: bool(engine.scheduler.running))
                streams += [await served.submit(PROMPT, SHORT) for _ in range(3)]
                with pytest.raises(QueueFullError, match="max_waiting is 3; 3 wait and 1 more") as caught:
                    await served.submit(PROMPT, SHORT)
                assert (caught.value.limit, caught.value.allowed, caught.value.waiting) == ("max_waiting", 3, 3)
                gate.set()
                for stream in streams:
                    assert [delta async for delta in stream][-1].request.finished
                assert (await collect(served, PROMPT, SHORT))[-1].request.finished
        finally:
            del engine.runner.forward

    run(test)


def test_wrong_requests_are_refused_by_name() -> None:
    async def test() -> None:
        async with serving(core(pages=4)) as served:
            with pytest.raises(RequestError, match="prompt: its 64 tokens and one more do not fit"):
                await served.submit([1] * 64, SHORT)
            stream = await served.submit(PROMPT, LONG, request_id="a")
            with pytest.raises(RequestError, match="request_id: 'a' is in use"):
                await served.submit(PROMPT, LONG, request_id="a")
            stream.abort()

    run(test)
    with pytest.raises(RequestError, match="watchdog_s: 0 is not more than 0"):
        AsyncEngine.over(core(), Maker(), watchdog_s=0)
    with pytest.raises(RequestError, match="max_waiting_requests: 0 is less than 1"):
        AsyncEngine(max_waiting_requests=0)


def test_a_failing_step_raises_in_its_streams_only() -> None:
    async def test() -> None:
        engine = core()
        async with serving(engine) as served:
            with failing(engine.runner, "sample", lambda n: n == 3, RuntimeError("the device is gone")):
                results = await asyncio.gather(
                    *(collect(served, [i, 5], SHORT) for i in range(9)), return_exceptions=True
                )
            failed = [r for r in results if isinstance(r, BaseException)]
            assert 1 <= len(failed) <= 4 and all(isinstance(e, StepError) for e in failed)
            assert served.ready and (await collect(served, PROMPT, SHORT))[-1].request.finished

    run(test)


def test_a_dead_engine_ends_every_stream() -> None:
    async def test() -> None:
        engine = core()
        async with serving(engine) as served:
            with failing(engine.runner, "forward", lambda n: True, RuntimeError("the device is gone")):
                results = await asyncio.gather(
                    *(collect(served, [i, 5], SHORT) for i in range(20)), return_exceptions=True
                )
            assert all(isinstance(r, StepError | EngineDeadError) for r in results)
            await until(lambda: not served.is_running)
            assert isinstance(served.errored, EngineDeadError) and not served.ready
            with pytest.raises(EngineDeadError):
                await served.submit(PROMPT, SHORT)

    run(test)


def test_a_thread_that_dies_ends_every_stream() -> None:
    async def test() -> None:
        engine = core()
        served = AsyncEngine.over(engine, Maker())
        streams = [await served.submit(PROMPT, LONG) for _ in range(3)]
        with failing(engine, "step", lambda n: True, SystemExit(1)):
            for stream in streams:
                with pytest.raises(EngineDeadError, match="SystemExit"):
                    async for _ in stream:
                        pass
        assert served.errored is not None
        await served.shutdown()

    run(test)


def test_a_step_that_hangs_is_marked_and_others_resume() -> None:
    async def test() -> None:
        engine = core()
        gate, forward = threading.Event(), engine.runner.forward

        def hanging(chunks: Any) -> Any:
            gate.wait(20)
            return forward(chunks)

        async with serving(engine, watchdog_s=0.6) as served:
            assert (await collect(served, PROMPT, SHORT))[-1].request.finished
            engine.runner.forward = hanging  # type: ignore[method-assign]
            try:
                stuck = asyncio.create_task(collect(served, PROMPT, SHORT))
                await until(lambda: served.stuck)
                assert served.is_running and not served.ready
                await until(lambda: engine.metrics.stuck_steps > 0)
                later = await served.submit([9, 9], SHORT)
                gate.set()
                assert (await stuck)[-1].request.finished
                assert [delta async for delta in later][-1].request.finished
                await until(lambda: not served.stuck)
                assert served.ready
            finally:
                gate.set()
                del engine.runner.forward

    run(test)


def test_shutdown_of_a_stuck_engine_ends_every_stream() -> None:
    async def test() -> None:
        engine = core()
        gate, forward = threading.Event(), engine.runner.forward
        engine.runner.forward = lambda chunks: gate.wait(20) and forward(chunks)  # type: ignore[method-assign]
        served = AsyncEngine.over(engine, Maker(), watchdog_s=0.1)
        try:
            stream = await served.submit(PROMPT, LONG)
            await served.shutdown()
            with pytest.raises(EngineDeadError, match="stuck in a step"):
                await anext(stream)
        finally:
            gate.set()
            del engine.runner.forward
            served._thread.join(20)

    run(test)


@pytest.mark.parametrize("deadline_s", [20.0, 0.0])
def test_drain(deadline_s: float) -> None:
    async def test() -> None:
        engine = core()
        async with serving(engine) as served:
            streams = [await served.submit([i, 5], LONG) for i in range(6)]
            draining = asyncio.create_task(served.drain(deadline_s))
            await asyncio.sleep(0)
            with pytest.raises(EngineClosedError):
                await served.submit(PROMPT, SHORT)
            assert not served.ready
            await draining
            assert engine.idle or engine._flight is not None
            reasons = set()
            for stream in streams:
                async for delta in stream:
                    reasons.add(delta.outputs[0].finish_reason)
            assert reasons - {None} == ({"length"} if deadline_s else {"abort"})

    run(test)


def test_shutdown_aborts_what_runs() -> None:
    async def test() -> None:
        async with serving(core()) as served:
            streams = [await served.submit([i, 5], LONG) for i in range(6)]
        for stream in streams:
            try:
                async for _ in stream:
                    pass
                assert stream.request.outputs[0].finish_reason in ("abort", "length")
            except EngineClosedError:
                assert not stream.request.finished
        with pytest.raises(EngineClosedError):
            await served.submit(PROMPT, SHORT)

    run(test)


def test_a_closed_loop_ends_its_requests() -> None:
    engine = core()
    kept: list[AsyncEngine] = []

    async def leave() -> None:
        served = AsyncEngine.over(engine, Maker())
        kept.append(served)
        await served.submit(PROMPT, LONG)

    asyncio.run(leave())

    async def test() -> None:
        await until(lambda: engine.idle)
        assert (await collect(kept[0], PROMPT, SHORT))[-1].request.finished
        await kept[0].shutdown()

    run(test)
    assert_level(engine)


def test_a_real_model(smollm2_path: Path) -> None:
    async def test() -> None:
        async with inferax.AsyncEngine(smollm2_path, max_model_len=256, max_num_seqs=4) as served:
            messages = [{"role": "user", "content": "What is the capital city of Japan?"}]
            prompt = await served.render(messages, add_generation_prompt=True)
            params = SamplingParams(temperature=0, max_tokens=8)
            text = "".join([delta.text async for delta in served.generate(prompt, params)])
            assert text == "The capital city of Japan is Tokyo."
            with pytest.raises(RequestError, match="^prompt: it has no tokens"):
                await served.submit([], params)

    run(test)
