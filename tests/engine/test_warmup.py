"""Programs are built ahead, in threads; after that no request waits for a compiler, and none compiles unnoticed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from inferax.engine import backend as backends
from inferax.engine.backend import Memory, XlaBackend
from inferax.engine.build import build_engine
from inferax.engine.core import EngineCore
from inferax.engine.loop import scheduler_for
from inferax.engine.memory import estimate_temporaries
from inferax.engine.params import SamplingParams
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from inferax.errors import LoadError, MemoryPlanError
from inferax.loaders.model import load
from tests.engine.tiny import CONFIG, engine, random_params, request
from tests.tiny_models import cases, write_gguf

FEW: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_gguf(next(case for case in cases() if case.name == "llama/gqa").build(), file, "Q8_0")
    return file


@contextmanager
def compiler_events() -> Iterator[list[str]]:
    """Traces and compilations within, in any thread."""
    events: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        del seconds
        if event.endswith(("jaxpr_trace_duration", "backend_compile_duration")):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class SlowBackend(XlaBackend):
    """Names the programs that it builds, and builds those of some kinds only once `go` is set."""

    def __init__(self, *held: str) -> None:
        super().__init__()
        self.held, self.go = held, threading.Event()
        self.names: list[str] = []

    def compile(self, fn: Callable[..., Any], *avals: Any, name: str, **more: Any) -> Any:
        if name.startswith(self.held):
            assert self.go.wait(60)
        self.names.append(name.split("(")[0])
        return super().compile(fn, *avals, name=name, **more)


def answer(core: EngineCore, *seqs: Any) -> list[list[int]]:
    core.add(seqs)
    while not core.idle or not all(seq.finished for seq in seqs):
        core.step()
    return [list(seq.output.token_ids) for seq in seqs]


PLAIN = SamplingParams(temperature=0.8, max_tokens=5, logprobs=2, presence_penalty=0.5, logit_bias={3: 1.0})


def test_after_warm_up_requests_compile_nothing_and_a_second_start_nothing_at_all(path: Path, tmp_path: Path) -> None:
    def start(backend: XlaBackend) -> list[list[int]]:
        built = build_engine(path, warm_up=True, backend=backend, **FEW)
        core = EngineCore(built.runner, built.scheduler)
        before = replace(backend.stats)
        with compiler_events() as events:
            got = [
                *answer(core, request([5, 6], PLAIN)),
                *answer(core, request(list(range(40)), PLAIN), request([9], PLAIN)),
            ]
        assert events == [] and backend.stats == before
        return got

    first = XlaBackend(programs=tmp_path)
    want = start(first)
    # 3 forward (1, 4, 16 tokens), 2 sample (1, 2 rows), the empty state and the program that loads a slot.
    assert (first.stats.compiled, first.stats.restored) == (7, 0)
    assert first.stats.compile_seconds > 0
    second = XlaBackend(programs=tmp_path)
    with compiler_events() as events:
        assert start(second) == want
    assert events == [] and (second.stats.compiled, second.stats.restored) == (0, 7)


def test_programs_are_built_while_weights_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SlowBackend("nothing")
    began = threading.Event()
    compile_, read = backend.compile, load.__globals__["load_params"]

    def compile(*args: Any, **more: Any) -> Any:
        began.set()
        return compile_(*args, **more)

    def load_params(*args: Any, **more: Any) -> Any:
        assert began.wait(60), "no program was begun before the weights were there"
        return read(*args, **more)

    monkeypatch.setattr(backend, "compile", compile)
    monkeypatch.setitem(load.__globals__, "load_params", load_params)
    built = build_engine(path, warm_up=True, backend=backend, **FEW)
    assert {row.how for row in built.plan.rows if row.name == "temporaries"} == {
        "by the compiled programs' own analysis"
    }


def test_without_warm_up_programs_wait_until_they_are_needed(path: Path) -> None:
    backend = SlowBackend()
    built = build_engine(path, backend=backend, **FEW)
    assert backend.names == ["empty cache"]
    answer(EngineCore(built.runner, built.scheduler), request([5], SamplingParams(max_tokens=1)))
    assert sorted(backend.names) == ["empty cache", "forward", "sample"]


def test_a_broken_file_stops_the_building(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_params(*_: Any, **__: Any) -> Any:
        raise LoadError("file", "broken", "mend it")

    backend = SlowBackend("forward", "sample", "empty", "load")
    monkeypatch.setitem(load.__globals__, "load_params", load_params)
    with pytest.raises(LoadError, match="broken"):
        build_engine(path, warm_up=True, backend=backend, **FEW)
    backend.go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("inferax-build"):
            thread.join(60)
    assert len(backend.names) <= 2, "what was not begun is not built"


def test_a_program_that_can_not_be_built_fails_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SlowBackend):
        def compile(self, fn: Callable[..., Any], *avals: Any, name: str, **more: Any) -> Any:
            if name.startswith("load slot"):
                raise RuntimeError("no such instruction")
            return super().compile(fn, *avals, name=name, **more)

    with pytest.raises(RuntimeError, match="no such instruction"):
        build_engine(path, warm_up=True, backend=Broken(), **FEW)


def test_what_programs_say_of_themselves_corrects_the_plan(path: Path) -> None:
    class Hungry(XlaBackend):
        def memory(self, executable: Any) -> Memory:
            return replace(super().memory(executable), temporaries=self.temporaries)

        temporaries = 1 << 50

    with pytest.raises(MemoryPlanError, match="memory|kv_cache_memory_bytes"):
        build_engine(path, warm_up=True, backend=Hungry(), **FEW)
    more = Hungry()
    more.temporaries = 123_456
    built = build_engine(path, warm_up=True, backend=more, **FEW)
    assert {row.name: row.bytes for row in built.plan.rows}["temporaries"] == 123_456


def test_estimates_are_above_what_programs_need() -> None:
    for seqs, tokens in ((1, 1), (4, 32), (16, 256)):
        shape = EngineShape(seqs, tokens, 16, (16, 16), (64, 64))
        runner = Runner(CONFIG, shape, XlaBackend(), random_params(CONFIG), jnp.bfloat16)
        measured = runner.compiled.temporaries()
        assert measured <= estimate_temporaries(CONFIG, shape) <= 10 * measured + (2 << 20)


def test_scoring_waits_for_its_programs_alone() -> None:
    """Plain requests go on while the programs that score prompts are built; afterwards nothing is built any more."""
    backend = SlowBackend("forward_all", "score")
    runner = engine(backend=backend, seqs=2, budget=16)
    for future in runner.compiled.start(runner.compiled.steps):
        future.result()
    core = EngineCore(runner, scheduler_for(runner.shape, CONFIG.windows))
    warm = backend.stats.compiled
    assert warm == len(runner.compiled.steps) == 7
    scored = request(list(range(1, 30)), SamplingParams(max_tokens=3, prompt_logprobs=1))
    plain = request([5, 6, 7], SamplingParams(max_tokens=40))
    scored.request_id, plain.request_id = "scored", "plain"
    core.add([scored])
    core.add([plain])
    while not plain.finished:
        core.step()
    assert len(plain.output.token_ids) == 40 and not scored.output.token_ids
    assert backend.stats.compiled == warm
    backend.go.set()
    deadline = time.monotonic() + 60
    while not scored.finished and time.monotonic() < deadline:
        core.step()
    assert scored.finished and scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 29
    assert backend.stats.compiled == warm + len(runner.compiled.scoring)
    assert sorted(set(backend.names[warm:])) == ["forward_all", "score"]
    core.check_integrity()


@pytest.mark.parametrize(
    ("seqs", "tokens"), [(1, 1), (1, 256), (16, 256), (64, 1024), (256, 1500), (256, 2048), (300, 8192), (1024, 2048)]
)
def test_a_ladder_has_twelve_programs_at_most(seqs: int, tokens: int) -> None:
    shape = EngineShape(seqs, tokens, 16, (16,), (64,))
    assert len(shape.token_ladder) + len(shape.row_ladder) <= 12
    for count in {1, min(2, tokens), tokens // 3 + 1, tokens}:
        assert shape.batch_shape(count).rows in shape.row_ladder, (
            "a step would need a program that is not in the ladder"
        )
        assert shape.batch_shape(count).rows >= min(count, seqs)


# -- the folder of programs


def double(x: jax.Array) -> tuple[jax.Array]:
    return (x * 2,)


def test_old_programs_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "MAX_PROGRAMS", 3)
    backend = XlaBackend(programs=tmp_path)
    x = jnp.arange(4.0)
    files: dict[str, Path] = {}
    for age, name in enumerate("abc"):
        backend.compile(double, x, name=name)
        (files[name],) = set(tmp_path.glob("*.program")) - set(files.values())
        os.utime(files[name], (time.time() - 100 + age,) * 2)
    backend.compile(double, x, name="a")  # restored: used now
    backend.compile(double, x, name="d")
    assert files["a"].exists() and not files["b"].exists() and files["c"].exists()
    size = files["a"].stat().st_size
    monkeypatch.setattr(backends, "MAX_PROGRAM_BYTES", size + size // 2)
    backend.compile(double, x, name="e")
    assert len(list(tmp_path.glob("*.program"))) == 1
    assert backend.compile(double, x, name="e")(x)[0][1] == 2.0 and backend.stats.restored == 2


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left, under_way = tmp_path / "x.partial", tmp_path / "y.partial"
    for file in (left, under_way):
        file.write_bytes(b"half")
    os.utime(left, (1, 1))
    XlaBackend(programs=tmp_path).compile(double, jnp.arange(4.0), name="f")
    assert not left.exists() and under_way.exists()
    assert len(list(tmp_path.glob("*.program"))) == 1
