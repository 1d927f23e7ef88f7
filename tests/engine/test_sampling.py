"""What a request can ask of the sampler through the engine: words it must not say, DRY, mirostat, processors, ids to
report. The stages themselves are tested in tests/ops/test_samplers.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inferax
from inferax import SamplingParams
from inferax.engine.backend import XlaBackend
from inferax.engine.loop import run, scheduler_for
from inferax.engine.runner import Runner
from inferax.engine.sampler import LogitsProcessor
from inferax.engine.scheduler import Scheduler
from inferax.engine.sequence import Sequence
from inferax.errors import RequestError
from inferax.models import decoder
from tests.engine.tiny import CONFIG, engine, random_params, request

PROMPT = [3, 14, 15, 92, 65, 35, 14]
NEW = 24


@pytest.fixture(scope="module")
def logits_after() -> Callable[[list[int]], np.ndarray]:
    params, apply = random_params(CONFIG), jax.jit(decoder.apply, static_argnums=0)

    def logits(ids: list[int]) -> np.ndarray:
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(apply(CONFIG, params, padded), np.float64)[0, len(ids) - 1]

    return logits


def answers(runner: Any, *seqs: Sequence, scheduler: Scheduler | None = None) -> list[list[int]]:
    for _ in run(runner, seqs, scheduler):
        pass
    return [seq.output.token_ids for seq in seqs]


def greedy(
    logits_after: Callable[[list[int]], np.ndarray], change: Callable[[np.ndarray, list[int]], None]
) -> list[int]:
    ids = list(PROMPT)
    for _ in range(NEW):
        logits = logits_after(ids).copy()
        change(logits, ids)
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def runner() -> Any:
    return engine()


def test_bad_words(runner: Any, logits_after: Callable[[list[int]], np.ndarray]) -> None:
    plain = greedy(logits_after, lambda logits, ids: None)
    words = [[plain[0]], [*PROMPT[-2:], plain[1]], plain[3:6], [plain[8], plain[9]]]

    def without(logits: np.ndarray, ids: list[int]) -> None:
        for *start, last in words:
            if ids[len(ids) - len(start) :] == start:
                logits[last] = -np.inf

    params = SamplingParams(temperature=0, max_tokens=NEW, bad_words=["for the flag"])
    seqs = [request(PROMPT, params, bad_words=words), request(PROMPT, SamplingParams(temperature=0, max_tokens=NEW))]
    want = greedy(logits_after, without)
    assert answers(runner, *seqs) == [want, plain]
    assert want != plain


def test_dry_breaks_a_loop(runner: Any, logits_after: Callable[[list[int]], np.ndarray]) -> None:
    """Against a plain statement of the rule, over prompt and answer."""

    def dry(logits: np.ndarray, ids: list[int]) -> None:
        longest: dict[int, int] = {}
        for at in range(len(ids) - 1):
            length = 0
            while length <= at and ids[at - length] == ids[len(ids) - 1 - length] and ids[at - length] not in breaks:
                length += 1
            if length >= 1 and ids[at + 1] not in breaks:
                longest[ids[at + 1]] = max(longest.get(ids[at + 1], 0), length)
        for token, length in longest.items():
            logits[token] -= 2.0 * 1.5 ** (length - 1)

    params = SamplingParams(
        temperature=0,
        max_tokens=NEW,
        dry_multiplier=2.0,
        dry_base=1.5,
        dry_allowed_length=1,
        logit_bias={7: 6.0, 9: 6.0},
    )

    def biased(logits: np.ndarray, ids: list[int]) -> None:
        logits[[7, 9]] += 6.0
        dry(logits, ids)

    breaks: list[int] = []
    assert answers(runner, request(PROMPT, params)) == [greedy(logits_after, biased)]
    breaks = [7]
    assert answers(runner, request(PROMPT, params, breaks=breaks)) == [greedy(logits_after, biased)]


def test_logprobs_of_chosen_ids(runner: Any, logits_after: Callable[[list[int]], np.ndarray]) -> None:
    seq = request(PROMPT, SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=[100, 5, 130]))
    (ids,) = answers(runner, seq)
    assert seq.output.logprobs is not None
    for i, table in enumerate(seq.output.logprobs):
        logits = logits_after([*PROMPT, *ids[:i]])
        truth = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert set(table) == {ids[i], 100, 5, 130}
        for token, entry in table.items():
            assert entry.logprob == pytest.approx(truth[token], abs=1e-4)


def limit_to(logits: jax.Array, tokens: jax.Array, length: jax.Array, parameters: Mapping[str, jax.Array]) -> jax.Array:
    """Only ids near the last token."""
    near = jnp.abs(jnp.arange(logits.shape[0]) - tokens[length - 1]) <= parameters["width"]
    return jnp.where(near, logits + parameters["bias"], -jnp.inf)


WIDTH = LogitsProcessor(
    "limit_to",
    limit_to,
    {"width": jax.ShapeDtypeStruct((), jnp.int32), "bias": jax.ShapeDtypeStruct((CONFIG.vocab_size,), jnp.float32)},
)


def test_registered_processors(logits_after: Callable[[list[int]], np.ndarray]) -> None:
    plain_runner = engine()
    runner = Runner(CONFIG, plain_runner.shape, XlaBackend(), random_params(CONFIG), jnp.float32, (WIDTH,))
    bias = np.random.default_rng(0).standard_normal(CONFIG.vocab_size).astype(np.float32)

    def change(logits: np.ndarray, ids: list[int]) -> None:
        logits[:] = np.where(np.abs(np.arange(CONFIG.vocab_size) - ids[-1]) <= 9, logits + bias, -np.inf)

    params = SamplingParams(temperature=0, max_tokens=NEW, logits_processors={"limit_to": {"width": 9, "bias": bias}})
    plain = SamplingParams(temperature=0, max_tokens=NEW)
    names = ["limit_to"]
    got = answers(runner, request(PROMPT, params, processors=names), request(PROMPT, plain, processors=names))
    assert got == [greedy(logits_after, change), greedy(logits_after, lambda logits, ids: None)]


def test_mirostat_goes_on_after_preemption() -> None:
    """Its mu comes back from the host: bitwise the same answer as alone."""
    params = SamplingParams(temperature=1.3, max_tokens=40, mirostat_mode=2, mirostat_tau=3.0, logprobs=0)
    alone = request(PROMPT, params)
    answers(engine(), alone)
    runner = engine(pages=6)
    scheduler = scheduler_for(runner.shape, CONFIG.windows, policy="priority", caching=False)
    seq = request(PROMPT, params, priority=1)
    scheduler.add(seq)
    urgent = [request([i, 2, 3], SamplingParams(temperature=0, max_tokens=40), priority=0) for i in range(2)]
    answers(runner, *urgent, scheduler=scheduler)
    assert scheduler.num_preemptions > 0
    assert seq.output.token_ids == alone.output.token_ids
    other = request(PROMPT, SamplingParams(temperature=1.3, max_tokens=40, logprobs=0))
    answers(runner, other)
    assert other.output.token_ids != alone.output.token_ids


BAD: list[tuple[dict[str, Any], str]] = [
    ({"typical_p": 0}, "typical_p: 0 is not in (0.0, 1.0]"),
    ({"top_n_sigma": -3}, "top_n_sigma: -3 is not in"),
    ({"xtc_probability": 1.5}, "xtc_probability: 1.5"),
    ({"dry_allowed_length": 0}, "dry_allowed_length: 0 is less than 1"),
    ({"dry_sequence_breakers": "abc"}, "dry_sequence_breakers: 'abc' is not a list"),
    ({"dry_base": 0.5}, "dry_base: 0.5"),
    ({"mirostat_mode": 1}, "mirostat_mode: 1 is neither 0 nor 2"),
    ({"penalty_last_n": -2}, "penalty_last_n: -2 is less than -1"),
    ({"bad_words": [""]}, "bad_words: [''] is not a list of non-empty strings"),
    ({"bad_words": ["a"] * 33}, "bad_words: it has 33, more than 32"),
    ({"samplers": ["top_k", "tfs"]}, "samplers: 'tfs' is none of penalties, dry"),
    ({"samplers": ["top_k", "top_k"]}, "samplers: ['top_k', 'top_k'] names one twice"),
    ({"samplers": ["top_k"], "top_p": 0.5}, "top_p: it is 0.5, but samplers leaves out 'top_p'"),
    ({"samplers": ["top_k"], "temperature": 0.5}, "temperature: it is 0.5, but samplers leaves out 'temperature'"),
    ({"logprob_token_ids": list(range(33))}, "logprob_token_ids: it has 33, more than 32"),
    ({"max_tokens": 0}, "max_tokens: 0 is less than 1"),
]


@pytest.mark.parametrize(("given", "problem"), BAD, ids=[problem for _, problem in BAD])
def test_wrong_values_are_refused_by_name(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert str(caught.value).startswith(problem)


# With a real vocabulary.


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> inferax.LLM:
    return inferax.LLM(smollm2_path, max_model_len=256, max_num_seqs=4, logits_processors=[ONLY])


ONLY = LogitsProcessor("only", lambda x, tokens, length, p: jnp.where(jnp.arange(x.shape[0]) == p["id"], x, -jnp.inf),
                       {"id": jax.ShapeDtypeStruct((), jnp.int32)})  # fmt: skip


def test_bad_words_of_a_real_vocabulary(llm: inferax.LLM) -> None:
    def answer(**given: Any) -> str:
        params = SamplingParams(temperature=0, max_tokens=8, **given)
        return llm.generate("The capital of France is", params)[0].outputs[0].text

    assert answer().startswith(" Paris")
    assert "Paris" not in answer(bad_words=["Paris"])


def test_breakers_are_searched_in_the_vocabulary(llm: inferax.LLM) -> None:
    from inferax.engine.vocabulary import Breakers

    found = Breakers(llm.tokenizer).tokens(["\n", ": "])
    assert all("\n" in llm.tokenizer.token_text(t) or ":" in llm.tokenizer.token_text(t) or
               t == llm.tokenizer.encode(": ")[-1] for t in found)  # fmt: skip
    assert {t for t in range(llm.tokenizer.vocab_size) if "\n" in llm.tokenizer.token_text(t)} <= set(found)
    params = SamplingParams(temperature=0, max_tokens=40, dry_multiplier=1.0)
    looping = "one two three one two three one two three one two"
    assert llm.generate(looping, params)[0].outputs[0].text[:6] != " three"
    assert llm.generate(looping, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].text[:6] == " three"


def test_processors_are_checked(llm: inferax.LLM) -> None:
    def ask(**given: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=2, logits_processors=given)
        return llm.generate("Hello", params)[0].outputs[0].token_ids

    assert ask(only={"id": 4321}) == [4321, 4321]
    for given, problem in (
        ({"nothing": {}}, "logits_processors: 'nothing' is not registered; registered: only"),
        ({"only": {}}, r"logits_processors.only: it has parameters \[\], and takes \['id'\]"),
        ({"only": {"id": [1, 2]}}, r"logits_processors.only.id: it is no int32 array of shape \[\]"),
        ({"only": {"id": "x"}}, r"logits_processors.only.id: it is no int32 array of shape \[\]"),
    ):
        with pytest.raises(RequestError, match=problem):
            ask(**given)


def test_a_processor_that_cannot_be_traced_is_refused(llm: inferax.LLM) -> None:
    bad = LogitsProcessor("bad", lambda x, tokens, length, p: x[: int(length)], {})
    twice = LogitsProcessor("short", lambda x, tokens, length, p: x[:5], {})
    for processor, problem in ((bad, "'bad' cannot be traced"), (twice, "'short' returns")):
        with pytest.raises(RequestError, match=problem):
            inferax.LLM(llm.model, max_model_len=64, max_num_seqs=1, logits_processors=[processor])


def test_params_are_plain_data() -> None:
    """What a server reads from JSON can be given as it is."""
    given = json.loads('{"samplers": ["temperature", "top_p"], "top_p": 0.9, "bad_words": ["x"], "top_n_sigma": -1}')
    assert SamplingParams(**given).top_n_sigma == 0
