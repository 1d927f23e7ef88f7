"""A request's tokens and log-probabilities are bitwise the same whatever else happens in the engine.

This compares inferax with itself: it shows invariance; tests/engine/test_golden.py and tests/models show correctness.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from inferax.engine.backend import XlaBackend
from inferax.engine.loop import run, scheduler_for
from inferax.engine.params import SamplingParams
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from inferax.engine.scheduler import Scheduler
from inferax.engine.sequence import Sequence
from inferax.kernels import cpu
from inferax.models.config import LayerSpec, ModelConfig
from inferax.ops.ggml import TYPES
from inferax.ops.linear import Compute
from inferax.ops.packed import Layout, PackedWeight, pack
from inferax.ops.rotary import RotarySpec
from tests.engine.tiny import random_params

pytestmark = pytest.mark.skipif(not cpu.available(), reason="XLA's own dots are not batch-invariant")

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [int(t) for t in np.random.default_rng(7).integers(0, 500, 150)]
NEW = 12
Result = tuple[list[int], list[float], list[list[tuple[int, float]]]]


def config(compute: Compute, layers: int) -> ModelConfig:
    return ModelConfig(
        family="tiny", vocab_size=509, width=96, num_heads=6, num_kv_heads=2, head_dim=16, mlp_width=160,
        context_length=512, layers=(LayerSpec(40), LayerSpec(None), LayerSpec(40))[:layers], rotaries=(RotarySpec(16),),
        norm_eps=1e-5, qk_norm=True, compute=compute,
    )  # fmt: skip


@dataclass(frozen=True)
class Mode:
    compute: Compute
    cache: str
    layers: int = 3
    packed: bool = False  # weights of four types in the form x16, whose products are with int8


MODES = {
    "exact": Mode("exact", "float32"),
    "fast": Mode("fast", "bfloat16", packed=True),
    "int8 cache": Mode("exact", "int8", layers=2),
    "float8 cache": Mode("fast", "float8_e4m3fn", layers=2),
}


@functools.cache  # programs are compiled once for each shape
def runner(mode: Mode, shape: EngineShape) -> Runner:
    c = config(mode.compute, mode.layers)
    params = random_params(c)
    return Runner(c, shape, XlaBackend(), packed(params) if mode.packed else params, jnp.dtype(mode.cache))


def packed(params: dict[str, Any]) -> dict[str, Any]:
    """The layers' matrices quantized, each layer to another type."""
    types = ("Q4_0", "Q8_0", "Q5_1")

    def quantized(matrix: Any, name: str) -> PackedWeight:
        info = TYPES[name]
        rows = quants.quantize(np.asarray(matrix), GGMLQuantizationType[name])
        data = rows.reshape(matrix.shape[0], matrix.shape[1] // info.block, info.block_bytes)
        tiled = pack(PackedWeight(data, Layout(name)), "cpu")
        assert tiled.layout.form == "x16"
        return jax.tree.map(jnp.asarray, tiled)  # type: ignore[no-any-return]

    layers = tuple(
        {key: quantized(leaf, name) if leaf.ndim == 2 else leaf for key, leaf in layer.items()}
        for layer, name in zip(params["layers"], types, strict=True)
    )
    return params | {"layers": layers}


class Engine:
    """An empty engine with the sizes that a test asks for."""

    def __init__(self, mode: Mode, *, budget: int = 256, seqs: int = 4, pages: int = 1200, **scheduling: Any):
        shape = EngineShape(seqs, budget, 16, (24, 24), (pages, pages))
        self.runner = runner(mode, shape)
        self.runner.reset()
        self.scheduler: Scheduler = scheduler_for(shape, self.runner.config.windows, **scheduling)

    def run(self, *seqs: Sequence) -> None:
        for _ in run(self.runner, seqs, self.scheduler):
            self.scheduler.check_integrity()
        self.scheduler.check_integrity()


def request(params: SamplingParams, prompt: list[int] = PROMPT, *, index: int = 0, priority: int = 0) -> Sequence:
    return Sequence("x", prompt, params, 1234567, index, params.max_tokens or 1, frozenset(), priority=priority)


def result(seq: Sequence) -> Result:
    """Tokens, and log-probabilities of the chosen and the most likely ones, to the last bit."""
    assert seq.output.logprobs is not None and len(seq.output.token_ids) == NEW
    return (
        seq.output.token_ids,
        [table[t].logprob for t, table in zip(seq.output.token_ids, seq.output.logprobs, strict=True)],
        [sorted((t, entry.logprob) for t, entry in table.items()) for table in seq.output.logprobs],
    )


def others(count: int) -> Iterator[Sequence]:
    rng = np.random.default_rng(3)
    for i in range(count):
        prompt = [int(t) for t in rng.integers(0, 500, int(rng.integers(1, 90)))]
        params = SamplingParams(temperature=float(i % 3), top_k=i % 7 * 5, max_tokens=1 + i % 20)
        yield request(params, prompt, index=i)


SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW, logprobs=5),
    "seeded": SamplingParams(temperature=1.1, top_p=0.95, top_k=40, min_p=0.01, max_tokens=NEW, logprobs=5),
    "penalized": SamplingParams(
        temperature=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={7: 2.0},
        min_tokens=4,
        max_tokens=NEW,
        logprobs=5,
    ),
    "whole vocabulary": SamplingParams(temperature=1.5, max_tokens=NEW, logprobs=5),
}


# Every way of sampling, and one for the caches of codes: what they share does not depend on the sampler.
MATRIX = [
    pytest.param((mode, params), id=f"{mode}-{params}")
    for mode in MODES
    for params in (SAMPLING if mode in ("exact", "fast") else ["seeded"])
]


@pytest.fixture(scope="module", params=MATRIX)
def cell(request: pytest.FixtureRequest) -> tuple[str, str]:
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture(scope="module")
def mode(cell: tuple[str, str]) -> Mode:
    return MODES[cell[0]]


@pytest.fixture(scope="module")
def params(cell: tuple[str, str]) -> SamplingParams:
    return SAMPLING[cell[1]]


@pytest.fixture(scope="module")
def alone(mode: Mode, params: SamplingParams) -> Result:
    seq = request(params)
    Engine(mode, caching=False).run(seq)
    return result(seq)


def test_among_63_others(mode: Mode, params: SamplingParams, alone: Result) -> None:
    engine = Engine(mode, seqs=64, caching=False)
    crowd = list(others(63))
    seq = request(params)
    engine.run(*crowd[:31], seq, *crowd[31:])
    assert result(seq) == alone


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_in_chunks(budget: int, mode: Mode, params: SamplingParams, alone: Result) -> None:
    seq = request(params)
    Engine(mode, budget=budget, caching=False).run(seq)
    assert result(seq) == alone


def test_after_preemption(mode: Mode, params: SamplingParams, alone: Result) -> None:
    engine = Engine(mode, budget=64, pages=26, caching=False, policy="priority")
    seq = request(params, priority=1)
    urgent = [request(SamplingParams(temperature=0, max_tokens=40), PROMPT[:100][::-1], priority=0) for _ in range(2)]
    engine.scheduler.add(seq)
    engine.run(*urgent)
    assert engine.scheduler.num_preemptions > 0
    assert result(seq) == alone


def test_after_a_prefix_hit(mode: Mode, params: SamplingParams, alone: Result) -> None:
    engine = Engine(mode)
    engine.run(request(replace(params, max_tokens=3, min_tokens=0)), request(SamplingParams(max_tokens=2), PROMPT[:70]))
    seq = request(params)
    engine.run(seq)
    assert seq.cached == 144
    assert result(seq) == alone
    whole = request(params, PROMPT[:144])
    cold = request(params, PROMPT[:144])
    engine.run(whole)
    Engine(mode, caching=False).run(cold)
    assert whole.cached == 143, "a prompt that is cached whole computes its last token only"
    assert result(whole) == result(cold)


def test_as_a_sample_of_n(mode: Mode, params: SamplingParams, alone: Result) -> None:
    engine = Engine(mode)
    samples = [request(params, index=i) for i in range(4)]
    for sample in samples[1:]:
        sample.sibling = samples[0]
    engine.run(*samples)
    assert result(samples[0]) == alone
    lone = request(params, index=2)
    Engine(mode, seqs=1, caching=False).run(lone)
    assert result(samples[2]) == result(lone)
    if params.temperature > 0:
        assert samples[1].output.token_ids != samples[0].output.token_ids


def test_after_a_reset(mode: Mode, params: SamplingParams, alone: Result) -> None:
    engine = Engine(mode)
    engine.run(*others(5))
    engine.runner.reset()
    engine.scheduler.pages.reset()
    seq = request(params)
    engine.run(seq)
    assert result(seq) == alone


# A process of its own: one request for every way of sampling, and how many programs were built and restored.
PROCESS = """
import json, sys
from pathlib import Path
import jax.numpy as jnp
from inferax.engine.backend import XlaBackend
from inferax.engine.loop import run
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from tests.engine.test_invariance import MODES, SAMPLING, config, packed, request, result
from tests.engine.tiny import random_params

mode = MODES[sys.argv[1]]
backend = XlaBackend(programs=Path(sys.argv[2]))
c = config(mode.compute, mode.layers)
params = random_params(c)
shape = EngineShape(4, 256, 16, (24, 24), (1200, 1200))
runner = Runner(c, shape, backend, packed(params) if mode.packed else params, jnp.dtype(mode.cache))
results = []
for params in SAMPLING.values():
    runner.reset()
    seq = request(params)
    for _ in run(runner, [seq]):
        pass
    results.append(result(seq))
print(json.dumps([results, backend.stats.compiled, backend.stats.restored]))
"""


@pytest.mark.parametrize("name", ["exact", "fast"])
def test_after_a_restart(name: str, tmp_path: Path) -> None:
    """Three processes: this one, one that compiles, and one that restores what that has compiled."""

    def process() -> list[Any]:
        command = [sys.executable, "-c", PROCESS, name, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        found: list[Any] = json.loads(done.stdout)
        return found

    first, second = process(), process()
    here = []
    for params in SAMPLING.values():
        seq = request(params)
        Engine(MODES[name], caching=False).run(seq)
        here.append(result(seq))
    # JSON writes a float with the digits that give back its bits.
    assert first[0] == second[0] == json.loads(json.dumps(here))
    assert first[1] > 0 and first[2] == 0
    assert (second[1], second[2]) == (0, first[1])
