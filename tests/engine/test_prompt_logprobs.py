"""Likelihoods of prompts: against full logits, in chunks, and without ever holding [tokens, vocabulary]."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import inferax
from inferax.engine.backend import XlaBackend
from inferax.engine.core import EngineCore
from inferax.engine.loop import run, scheduler_for
from inferax.engine.params import SamplingParams
from inferax.engine.programs import sampler_params, score
from inferax.engine.sequence import Sequence
from inferax.models import decoder
from tests.engine.tiny import CONFIG, engine, random_params, request
from tests.goldens import load_golden

PARAMS = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, 131, 90)]


def sums(seq: Sequence) -> list[float]:
    assert seq.prompt_logprobs is not None and seq.prompt_logprobs[0] is None
    assert len(seq.prompt_logprobs) == seq.prompt_len
    return [t[token].logprob for t, token in zip(seq.prompt_logprobs[1:], seq.prompt[1:], strict=True) if t is not None]


def test_in_chunks_beside_others_equal_full_logits() -> None:
    logits = np.asarray(decoder.apply(CONFIG, random_params(CONFIG), np.array([PROMPT], np.int32)), np.float64)[0]
    top = logits.max(-1, keepdims=True)
    truth = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    runner = engine(budget=32)
    plain = SamplingParams(temperature=0, max_tokens=9)
    seq, others = request(PROMPT, PARAMS), [request(PROMPT[i : i + 40], plain) for i in range(5)]
    scheduler = scheduler_for(runner.shape, CONFIG.windows)
    for _ in run(runner, [others[0], seq, *others[1:]], scheduler):
        scheduler.check_integrity()
    np.testing.assert_allclose(sums(seq), truth[np.arange(89), PROMPT[1:]], atol=1e-4)
    for row, table, token in zip(truth, (seq.prompt_logprobs or [])[1:], PROMPT[1:], strict=False):
        assert table is not None and set(table) == {int(t) for t in np.argsort(-row)[:2]} | {token}
        assert table[token].rank == 1 + int((row > row[token]).sum())
    # A cached prefix is not read, nor is what comes after changed.
    again = request(PROMPT, PARAMS)
    for _ in run(runner, [again], scheduler):
        pass
    assert (again.cached, sums(again), again.output.token_ids) == (0, sums(seq), seq.output.token_ids)


def test_memory_is_flat_in_the_length_of_the_prompt(smollm2_path: Path) -> None:
    model = inferax.load(smollm2_path)
    backend, sizes = XlaBackend(), []
    for tokens in (64, 1024):
        hidden = jax.ShapeDtypeStruct((tokens, model.config.width), np.float32)
        ids = jax.ShapeDtypeStruct((tokens,), np.int32)
        program = backend.compile(
            lambda p, h, i: score(model.config, p, h, i),
            sampler_params(model.config, model.params),
            hidden,
            ids,
            name="s",
        )
        sizes.append(backend.memory(program).temporaries)
    print(f"temporaries at 64 and 1,024 tokens: {sizes[0] / 1e6:.1f} and {sizes[1] / 1e6:.1f} MB")
    whole = 1024 * model.config.vocab_size * 4
    assert sizes[1] < whole / 10 and sizes[1] - sizes[0] < 8e6


def test_likelihood_of_a_long_text(smollm2_path: Path) -> None:
    """The sum over a text of 2,000 tokens equals the full-logits computation, token by token to 1e-4."""
    model = inferax.load(smollm2_path)
    prompts = {p.name: list(p.prompt_ids) for p in load_golden("smollm2").prompts}
    prompt = (prompts.pop("long_log") + sum(prompts.values(), []))[:2000]
    assert len(prompt) == 2000
    tokens = np.array([prompt], np.int32)
    apply = jax.jit(model.apply)
    logits = np.concatenate(
        [np.asarray(apply(model.params, tokens, positions=np.arange(i, i + 400)[None]))[0] for i in range(0, 2000, 400)]
    )[:-1].astype(np.float64)
    top = logits.max(-1)
    truth = logits[np.arange(len(prompt) - 1), prompt[1:]] - top - np.log(np.exp(logits - top[:, None]).sum(-1))
    llm = inferax.LLM(model, compute="exact", max_model_len=2048, max_num_seqs=1)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    ours = [table[t].logprob for table, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True) if table]
    print(f"sum {sum(ours):.4f}, full logits {truth.sum():.4f}, largest difference {np.abs(ours - truth).max():.1e}")
    np.testing.assert_allclose(ours, truth, atol=1e-4)
    assert sum(ours) == pytest.approx(truth.sum(), rel=1e-6)


class Slow(XlaBackend):
    """A compiler that waits for leave to build what scores prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.leave, self.scored = threading.Event(), 0

    def compile(self, fn: Any, *avals: Any, donate: Any = (), name: str) -> Any:
        if name.startswith(("score", "forward_all")):
            assert threading.current_thread() is not threading.main_thread(), "built on a request's path"
            assert self.leave.wait(60)
            self.scored += 1
        return super().compile(fn, *avals, donate=donate, name=name)


def test_others_go_on_while_the_scoring_programs_are_built() -> None:
    backend = Slow()
    runner = engine(backend=backend)
    core = EngineCore(runner, scheduler_for(runner.shape, CONFIG.windows))
    seq, plain = request(PROMPT, PARAMS), request(PROMPT[:40], SamplingParams(temperature=0, max_tokens=30))
    aborted = request(PROMPT[:50], PARAMS)
    seq.request_id, plain.request_id, aborted.request_id = "scored", "plain", "aborted"
    for each in (seq, aborted, plain):
        core.add([each])
    while not plain.finished:
        core.step()
        core.check_integrity()
    core.abort("aborted")
    assert not core.idle and seq.prompt_logprobs == [None] and not seq.finished
    before = backend.stats.compiled
    backend.leave.set()
    while not core.idle:
        core.step()
        core.check_integrity()
    assert len(sums(seq)) == len(PROMPT) - 1 and aborted.output.finish_reason == "abort"
    assert backend.scored == len(runner.compiled.scoring) == backend.stats.compiled - before
