"""The main promise: in `exact`, the real models answer token for token what transformers answers in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

import inferax
from inferax.errors import RequestError
from tests.goldens import Golden, load_golden

LENGTHS = (192, 1024, 2048)
NEW_TOKENS = 64


@dataclass(frozen=True)
class Case:
    golden: Golden
    model: inferax.Model


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> Case:
    golden = load_golden(request.param)
    path: Path = request.getfixturevalue(f"{request.param}_path")
    golden.check_model(path)
    return Case(golden, inferax.load(path))


def test_greedy_tokens(case: Case) -> None:
    """All 20 prompts at once through the engine: chunked prefill, ragged batches, paged cache."""
    llm = inferax.LLM(case.model, compute="exact", max_model_len=2048, max_num_seqs=20)
    params = inferax.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate([p.prompt_ids for p in case.golden.prompts], params)
    differences = [
        explained
        for prompt, output in zip(case.golden.prompts, outputs, strict=True)
        if (explained := prompt.explain(output.outputs[0].token_ids)) is not None
    ]
    assert not differences, "\n".join(differences)


def test_logits(case: Case) -> None:
    """Logits within 1e-3 at prompt and answer positions; the worst difference and the nearest tie are reported."""
    apply = jax.jit(case.model.apply)
    worst = 0.0
    for prompt in case.golden.prompts:
        ids = prompt.prompt_ids + prompt.output_ids
        tokens = np.zeros((1, next(n for n in LENGTHS if n >= len(ids))), np.int32)
        tokens[0, : len(ids)] = ids
        positions = np.zeros((1, 8), np.int32)
        positions[0, : len(prompt.logits)] = sorted(prompt.logits)
        ours = np.asarray(apply(case.model.params, tokens, positions=positions))[0]
        for row, position in zip(ours, sorted(prompt.logits), strict=False):
            which, values = prompt.logits[position]
            worst = max(worst, float(np.abs(row[which] - values).max()))
    margin, name = min((min(p.margins), p.name) for p in case.golden.prompts)
    print(f"{case.golden.name}: largest difference of a logit {worst:.1e}, nearest tie {margin:.1e} in {name}")
    assert worst < 1e-3


def test_prompts_encode_as_in_transformers(case: Case) -> None:
    for prompt in case.golden.prompts:
        assert case.model.tokenizer.encode(prompt.text) == prompt.prompt_ids, prompt.name


def test_fast_answers_too(case: Case) -> None:
    """In `fast` the first token of a prompt that is no near-tie is the same."""
    llm = inferax.LLM(case.model, compute="fast", max_model_len=2048, max_num_seqs=20)
    prompts = [p for p in case.golden.prompts if p.margins[0] > 1.0]
    assert len(prompts) > 5
    outputs = llm.generate([p.prompt_ids for p in prompts], inferax.SamplingParams(temperature=0, max_tokens=1))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == prompt.output_ids[:1], prompt.name


def test_prompt_longer_than_the_context(case: Case) -> None:
    llm = inferax.LLM(case.model, compute="exact", max_model_len=64, max_num_seqs=1)
    with pytest.raises(RequestError, match="prompt: it has 80 tokens.*context of 64 tokens"):
        llm.generate([[5] * 80])
