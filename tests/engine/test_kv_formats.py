"""What the caches of codes cost in accuracy, through the engine: a tiny random model, and a real one.

That codes are written and read as stated is shown in tests/ops; that a request's answer does not depend on its company,
by tests/engine/test_invariance.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import inferax
from inferax.engine.backend import XlaBackend
from inferax.engine.loop import run
from inferax.engine.params import SamplingParams
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from inferax.models.config import ModelConfig
from tests.engine.tiny import CONFIG, random_params, request
from tests.goldens import load_golden


def likelihoods(
    config: ModelConfig, params: Any, shape: EngineShape, prompts: list[list[int]], cache_dtype: Any
) -> np.ndarray:
    """Log-probabilities of all tokens of the prompts but their first, with that cache."""
    runner = Runner(config, shape, XlaBackend(), params, jnp.dtype(cache_dtype))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    seqs = [request(prompt, asked) for prompt in prompts]
    for _ in run(runner, seqs):
        pass
    found = []
    for seq in seqs:
        assert seq.prompt_logprobs is not None and len(seq.output.token_ids) == 1
        for table, token in zip(seq.prompt_logprobs[1:], seq.prompt[1:], strict=True):
            assert table is not None
            found.append(table[token].logprob)
    return np.array(found)


# In both tests the bounds are about twice what was measured.


def test_a_tiny_model_stays_near_float32() -> None:
    """In chunks of 64. Its random weights make sharp distributions, which show every rounding."""
    params, shape = random_params(CONFIG), EngineShape(4, 64, 16, (16, 16), (64, 64))
    prompts = [[int(t) for t in np.random.default_rng(i).integers(0, 131, n)] for i, n in enumerate((90, 42, 60))]
    exact, *coded = (likelihoods(CONFIG, params, shape, prompts, d) for d in ("float32", "int8", "float8_e4m3fn"))
    for name, scores, bound in zip(("int8", "float8"), coded, (0.07, 0.35), strict=True):
        mean = np.abs(scores - exact).mean()
        print(f"{name}: mean |change| {mean:.4f}, at most {np.abs(scores - exact).max():.3f}")
        assert bound / 10 < mean < bound


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[inferax.Model, list[list[int]]]:
    """The model, and golden prompts with transformers' answers to them."""
    names = ("plain_fact", "plain_story", "code_python", "chinese", "chat_system")
    golden = {p.name: p for p in load_golden("smollm2").prompts}
    return inferax.load(smollm2_path), [golden[n].prompt_ids + golden[n].output_ids for n in names]


def test_a_real_model_stays_near_float32(smollm2: tuple[inferax.Model, list[list[int]]]) -> None:
    """Teacher-forced, the mean |difference| of a token's log-probability, and what perplexity loses."""
    model, prompts = smollm2
    shape = EngineShape(len(prompts), 512, 16, (16,), (16 * len(prompts),))
    assert sum(map(len, prompts)) <= 512
    scores = {
        dtype: likelihoods(model.config, model.params, shape, prompts, dtype)
        for dtype in ("float32", "int8", "float8_e4m3fn")
    }
    for dtype, bound in (("int8", 0.05), ("float8_e4m3fn", 0.1)):
        change = scores[dtype] - scores["float32"]
        print(f"{dtype}: mean |change| {np.abs(change).mean():.4f}, mean {change.mean():+.4f} of {len(change)} tokens")
        assert 1e-3 < np.abs(change).mean() < bound
        assert abs(change.mean()) < 0.02
