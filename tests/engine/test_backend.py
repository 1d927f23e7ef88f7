"""Backends: XLA's store of programs, an eager one that runs the engine too, and nothing that goes around them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferax.engine.backend import Memory, XlaBackend
from inferax.engine.loop import run
from inferax.engine.params import SamplingParams
from tests.engine.tiny import engine, request

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, logprobs=2)
PROMPTS = [[5, 6, 7], list(range(40)), [9]]


class EagerBackend:
    """Runs a program's operations one by one, on the host's own arrays."""

    def put(self, tree: Any) -> Any:
        return tree

    def compile(self, fn: Callable[..., Any], *avals: Any, donate: Sequence[int] = (), name: str) -> Any:
        del avals, donate, name
        return lambda *args: fn(*jax.tree.map(jnp.asarray, args))

    def get_async(self, handle: Any) -> Any:
        class Copy:
            def result(self) -> np.ndarray:
                return np.asarray(handle)

        return Copy()

    def memory(self, executable: Any) -> Memory:
        del executable
        return Memory(0, 0, 0, 0)


def tokens(backend: Any) -> list[list[int]]:
    seqs = [request(prompt, PARAMS, index=i) for i, prompt in enumerate(PROMPTS)]
    for _ in run(engine(backend=backend), seqs):
        pass
    return [seq.output.token_ids for seq in seqs]


def test_an_eager_backend_gives_the_same_tokens() -> None:
    assert tokens(EagerBackend()) == tokens(XlaBackend())


def test_a_second_start_neither_traces_nor_compiles(tmp_path: Path) -> None:
    first = XlaBackend(programs=tmp_path)
    want = tokens(first)
    assert first.stats.compiled > 0 and first.stats.restored == 0
    events: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        del seconds
        if event.endswith(("jaxpr_trace_duration", "backend_compile_duration")):
            events.append(event)

    second = XlaBackend(programs=tmp_path)
    runner = engine(backend=second)
    seqs = [request(prompt, PARAMS, index=i) for i, prompt in enumerate(PROMPTS)]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in run(runner, seqs):
            pass
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [seq.output.token_ids for seq in seqs] == want
    assert (second.stats.compiled, second.stats.restored) == (0, first.stats.compiled)
    assert events == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_program_is_rebuilt(damage: str, tmp_path: Path) -> None:
    def double(x: jax.Array) -> tuple[jax.Array]:
        return (x * 2,)

    x = jnp.arange(4.0)
    XlaBackend(programs=tmp_path).compile(double, x, name="double")
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    elif damage == "empty":
        data = bytearray()
    else:
        data[32:] = b"not a pickle"
    file.write_bytes(data)
    again = XlaBackend(programs=tmp_path)
    assert np.asarray(again.compile(double, x, name="double")(x)[0]).tolist() == [0, 2, 4, 6]
    assert (again.stats.compiled, again.stats.restored) == (1, 0)
    third = XlaBackend(programs=tmp_path)
    third.compile(double, x, name="double")
    assert third.stats.restored == 1, "the rebuilt program was not kept"


def test_names_shapes_and_donation_are_part_of_the_key(tmp_path: Path) -> None:
    def same(x: jax.Array) -> tuple[jax.Array]:
        return (x + 1,)

    backend = XlaBackend(programs=tmp_path)
    for x, name, donate in (
        (jnp.ones(2), "a", ()),
        (jnp.ones(3), "a", ()),
        (jnp.ones(2), "b", ()),
        (jnp.ones(2), "a", (0,)),
    ):
        backend.compile(same, x, name=name, donate=donate)
    assert backend.stats.compiled == len(list(tmp_path.iterdir())) == 4


def test_a_folder_that_can_not_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    backend = XlaBackend(programs=blocked / "programs")
    assert float(backend.compile(lambda x: (x + 1,), jnp.float32(1), name="f")(jnp.float32(1))[0]) == 2


def test_only_the_backend_touches_the_device() -> None:
    banned = {"jit", "device_put", "block_until_ready", "device_get"}
    for file in (Path(__file__).parents[2] / "engine").glob("*.py"):
        if file.name == "backend.py":
            continue
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & banned, f"{file.name} uses {names & banned}"
