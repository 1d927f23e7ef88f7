"""Bias, penalties and minimum length on the device, against transformers' processors and plain statements in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from inferax.engine.loop import run
from inferax.engine.params import SamplingParams
from inferax.engine.runner import Runner
from inferax.models import decoder
from tests.engine.tiny import CONFIG, engine, random_params, request

PROMPT = [3, 14, 15, 92, 65, 35, 14]
NEW = 24
Shape = Callable[[np.ndarray, list[int]], np.ndarray]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return engine()


@pytest.fixture(scope="module")
def logits_after() -> Callable[[list[int]], np.ndarray]:
    params, apply = random_params(CONFIG), jax.jit(decoder.apply, static_argnums=0)

    def logits(ids: list[int]) -> np.ndarray:
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(apply(CONFIG, params, padded))[0, len(ids) - 1]

    return logits


def by_transformers(processor: Any) -> Shape:
    def shape(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        out: np.ndarray = processor(torch.tensor([ids]), torch.tensor(logits)[None].clone())[0].numpy()
        return out

    return shape


def openai(presence: float, frequency: float) -> Shape:
    """logit[j] - count[j] * frequency - (count[j] > 0) * presence, over the answer: OpenAI's published statement."""

    def shape(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        out = logits.copy()
        for token in set(ids[len(PROMPT) :]):
            out[token] -= ids[len(PROMPT) :].count(token) * frequency + presence
        return out

    return shape


def biased(bias: dict[int, float]) -> Shape:
    def shape(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        out = logits.copy()
        for token, value in bias.items():
            out[token] += value
        return out

    return shape


def allowed(tokens: list[int]) -> Shape:
    def shape(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        out = np.full_like(logits, -np.inf)
        out[tokens] = logits[tokens]
        return out

    return shape


ENDS = list(range(0, 131, 3))
CASES: dict[str, tuple[dict[str, Any], Shape]] = {
    "repetition": ({"repetition_penalty": 1.7}, by_transformers(RepetitionPenaltyLogitsProcessor(1.7))),
    "repetition below 1": ({"repetition_penalty": 0.6}, by_transformers(RepetitionPenaltyLogitsProcessor(0.6))),
    "presence": ({"presence_penalty": 1.5}, openai(1.5, 0)),
    "frequency": ({"frequency_penalty": 0.9}, openai(0, 0.9)),
    "negative": ({"frequency_penalty": -0.5, "presence_penalty": -0.5}, openai(-0.5, -0.5)),
    "bias": ({"logit_bias": {5: 4.0, 6: -50.0}}, biased({5: 4.0, 6: -50.0})),
    "allowed": ({"allowed_token_ids": [1, 50, 99, 100]}, allowed([1, 50, 99, 100])),
    "min tokens": (
        {"min_tokens": 9, "stop_token_ids": ENDS},
        by_transformers(MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, ENDS)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_greedy(case: str, runner: Runner, logits_after: Callable[[list[int]], np.ndarray]) -> None:
    """Beside a plain request in the same batch, which it leaves alone."""
    given, shape = CASES[case]
    params = SamplingParams(temperature=0, max_tokens=NEW, **given)
    want, plain = list(PROMPT), list(PROMPT)
    while len(want) < len(PROMPT) + NEW and not (len(want) > len(PROMPT) and want[-1] in (params.stop_token_ids or ())):
        want.append(int(shape(logits_after(want), want).argmax()))
    for _ in range(NEW):
        plain.append(int(logits_after(plain).argmax()))
    assert want[len(PROMPT) :] != plain[len(PROMPT) :][: len(want) - len(PROMPT)], "the case changes nothing"
    seqs = [request(PROMPT, params), request(PROMPT, SamplingParams(temperature=0, max_tokens=NEW))]
    for _ in run(runner, seqs):
        pass
    assert seqs[0].output.token_ids == want[len(PROMPT) :]
    assert seqs[1].output.token_ids == plain[len(PROMPT) :]


def test_a_slot_remembers_nothing_of_the_last_request(runner: Runner) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW, presence_penalty=1.5, repetition_penalty=1.2)
    results = []
    for _ in range(3):
        crowd = [request([i, 2, 3], params) for i in range(6)]
        for _ in run(runner, crowd):
            pass
        results.append([seq.output.token_ids for seq in crowd])
    assert results[0] == results[1] == results[2]


def test_logprobs_are_those_before_shaping(runner: Runner, logits_after: Callable[[list[int]], np.ndarray]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias={5: 100.0}, logprobs=0)
    seq = request(PROMPT, params)
    for _ in run(runner, [seq]):
        pass
    logits = logits_after(PROMPT).astype(np.float64)
    assert seq.output.token_ids == [5] and seq.output.logprobs is not None
    assert seq.output.logprobs[0][5].logprob == pytest.approx(logits[5] - np.log(np.exp(logits).sum()), abs=1e-4)
    assert seq.output.logprobs[0][5].rank == 1 + int((logits > logits[5]).sum())
