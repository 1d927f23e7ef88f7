"""Every family against transformers: tiny random models, through safetensors and through GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from inferax.engine.backend import XlaBackend
from inferax.engine.loop import run
from inferax.engine.params import SamplingParams
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from inferax.engine.sequence import Sequence
from inferax.loaders.config import gguf_config, hf_config
from inferax.loaders.gguf import open_gguf
from inferax.loaders.params import load_params
from inferax.loaders.safetensors import open_safetensors
from inferax.models import decoder
from inferax.models.config import ModelConfig
from inferax.models.families import FAMILIES, family_of_gguf, family_of_hf
from tests.tiny_models import (
    TinyCase,
    cases,
    greedy,
    load_gguf_weights,
    reference_logits,
    save_hf,
    token_batch,
    write_gguf,
)

CASES = cases()
GREEDY_TOKENS = 24
# One plain case of each family, the windows, and every rotary whose frequencies follow the length.
GREEDY = [c for c in CASES if c.name.endswith(("/gqa", "/two-to-two", "/window")) or c.length_dependent]


def from_hf(directory: Path) -> tuple[ModelConfig, Any]:
    config = hf_config(directory)
    family = next(f for f in FAMILIES if f.name == config.family)
    source = open_safetensors(directory)
    return config, load_params(config, family.hf_names(config), source, directory)


def from_gguf(path: Path) -> tuple[ModelConfig, Any]:
    file = open_gguf(path)
    config = gguf_config(file, path)
    family = family_of_gguf(file.architecture, str(path))
    return config, load_params(config, family.gguf_names(config), file, path)


def logits(config: ModelConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda p, t: decoder.apply(config, p, t))(params, tokens))


def check(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Logits within 1e-4, and the same greedy token everywhere; a tie within the tolerance shows its margin."""
    assert np.abs(ours - theirs).max() < 1e-4
    top = np.sort(theirs, axis=-1)
    margin = top[..., -1] - top[..., -2]
    differs = ours.argmax(-1) != theirs.argmax(-1)
    assert not differs.any(), f"greedy differs where transformers' margin is {margin[differs]}"


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_logits_from_safetensors(case: TinyCase, tmp_path: Path) -> None:
    model = case.build()
    save_hf(model, tmp_path)
    config, params = from_hf(tmp_path)
    tokens = token_batch(config.vocab_size)
    check(logits(config, params, tokens), reference_logits(model, tokens))


@pytest.mark.parametrize("case", [c for c in CASES if c.not_in_gguf is None], ids=repr)
def test_logits_from_gguf(case: TinyCase, tmp_path: Path) -> None:
    model = case.build()
    write_gguf(model, tmp_path / "tiny.gguf")
    config, params = from_gguf(tmp_path / "tiny.gguf")
    tokens = token_batch(config.vocab_size, batch=1)
    check(logits(config, params, tokens), reference_logits(model, tokens))


@pytest.mark.parametrize("case", [c for c in CASES if c.name.endswith(("/gqa", "/two-to-two"))], ids=repr)
@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_1"])
def test_logits_from_packed_gguf(case: TinyCase, qtype: str, tmp_path: Path) -> None:
    model = case.build()
    write_gguf(model, tmp_path / "tiny.gguf", qtype)
    config, params = from_gguf(tmp_path / "tiny.gguf")
    tokens = token_batch(config.vocab_size, batch=1)
    check(logits(config, params, tokens), reference_logits(load_gguf_weights(model, tmp_path / "tiny.gguf"), tokens))


@pytest.mark.parametrize("case", GREEDY, ids=repr)
def test_greedy_through_the_engine(case: TinyCase, tmp_path: Path) -> None:
    """Two prompts at once, one of them prefilled in chunks, equal transformers' generate on each alone."""
    model = case.build()
    save_hf(model, tmp_path)
    config, params = from_hf(tmp_path)
    groups = len(config.windows)
    shape = EngineShape(2, 32, 16, (6,) * groups, (12,) * groups)
    runner = Runner(config, shape, XlaBackend(), params, jnp.float32)
    prompts = [[int(t) for t in row] for row in token_batch(config.vocab_size, length=44)]
    prompts[1] = prompts[1][:7]
    params_ = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS)
    sequences = [Sequence(str(i), p, params_, 0, 0, GREEDY_TOKENS, frozenset()) for i, p in enumerate(prompts)]
    for _ in run(runner, sequences):
        pass
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output.token_ids == greedy(model, prompt, GREEDY_TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_files(dtype: torch.dtype, tmp_path: Path) -> None:
    """Half-precision files keep their dtype in memory; the truth is transformers in float32 on the same values."""
    model = next(c for c in CASES if c.name == "llama/gqa").build()
    save_hf(model, tmp_path, dtype)
    config, params = from_hf(tmp_path)
    assert params["embed"].dtype == str(dtype).removeprefix("torch.")
    tokens = token_batch(config.vocab_size)
    check(logits(config, params, tokens), reference_logits(model.to(dtype).to(torch.float32), tokens))


def test_sharded_files_and_older_configs(tmp_path: Path) -> None:
    for case in CASES:
        if case.name in ("llama/rope-llama3", "gemma3_text/six-to-one"):
            model = case.build()
            directory = tmp_path / case.family
            save_hf(model, directory, max_shard_size="100KB", legacy_config=True)
            assert len(list(directory.glob("*.safetensors"))) > 1
            config, params = from_hf(directory)
            tokens = token_batch(config.vocab_size, batch=1)
            check(logits(config, params, tokens), reference_logits(model, tokens))


def test_every_family_has_cases() -> None:
    assert {t for f in FAMILIES for t in f.hf_types} == {c.family for c in CASES}
    for case in CASES:
        assert case.family in family_of_hf(case.family, "config.json").hf_types
