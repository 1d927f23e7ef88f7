"""The tiny models are what they claim to be: llama.cpp reads the files as transformers computes them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_models import (
    CHAT_TEMPLATE,
    SEQUENCE,
    TinyCase,
    cases,
    greedy,
    load_gguf_weights,
    reference_logits,
    save_hf,
    tiny_tokenizer,
    token_batch,
    write_gguf,
)

CASES = cases()
IN_GGUF = [case for case in CASES if case.not_in_gguf is None]
# llama.cpp looks GELU up in a table of float16 numbers; everything else is float32 on both sides.
LLAMA_CPP_TOLERANCE = {"gemma3_text": 1e-2}


def by_name(name: str) -> TinyCase:
    return next(case for case in CASES if case.name == name)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_models_are_not_degenerate(case: TinyCase) -> None:
    model = case.build()
    assert all(value.std() > 0.02 for value in model.state_dict().values())
    assert model.config._attn_implementation == "eager" and not model.training
    logits = reference_logits(model, token_batch(model.config.vocab_size))
    assert logits.dtype == np.float32 and logits.shape == (2, SEQUENCE, model.config.vocab_size)
    assert 0.5 < logits.std() < 4


@pytest.mark.parametrize("name", ["llama/all-biases-tied", "gemma3_text/untied"])
def test_weights_are_fixed(name: str) -> None:
    model = by_name(name).build()
    torch.manual_seed(1)
    again = by_name(name).build().state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_every_case_computes_something_of_its_own(family: str) -> None:
    """With the weights of another case that has the same shapes the logits change, so no setting is ignored."""
    mine = [case for case in CASES if case.family == family]
    models = {case.name: case.build() for case in mine}
    silent = {"qwen2/window-off", "gemma3_text/attention-softcap-unused", "llama/rope-longrope-no-factor"}
    seen: dict[bytes, str] = {}
    base = {name: value.clone() for name, value in models[mine[0].name].state_dict().items()}
    tokens = token_batch(models[mine[0].name].config.vocab_size, batch=1)
    for name, model in models.items():
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        if name in silent or shapes != {key: value.shape for key, value in base.items()}:
            continue
        if model.config.tie_word_embeddings != models[mine[0].name].config.tie_word_embeddings:
            continue
        model.load_state_dict(base)
        logits = np.round(reference_logits(model, tokens), 3).tobytes()
        assert logits not in seen, f"{name} computes the same as {seen[logits]}"
        seen[logits] = name
    assert len(seen) >= 6


@pytest.mark.parametrize("name", ["llama/gqa", "mistral/window", "qwen2/window-from-layer-1", "gemma3_text/two-to-two"])
def test_greedy_is_the_largest_logit_with_and_without_a_cache(name: str) -> None:
    model = by_name(name).build()
    ids = token_batch(model.config.vocab_size, batch=1, length=40)[0].tolist()
    new = greedy(model, ids, 12)
    assert new == greedy(model, ids, 12, use_cache=False)
    assert new == reference_logits(model, [ids + new])[0, len(ids) - 1 : -1].argmax(-1).tolist()


def test_references_do_not_depend_on_earlier_calls() -> None:
    model = by_name("llama/rope-dynamic").build()
    tokens = token_batch(model.config.vocab_size)
    short = reference_logits(model, tokens[:, :40])
    reference_logits(model, tokens)
    np.testing.assert_array_equal(reference_logits(model, tokens[:, :40]), short)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_saved_directory_reads_back(case: TinyCase, tmp_path: Path) -> None:
    """The older layout of config.json is ours, so each case is held to it; the current one is transformers' own."""
    model = case.build()
    save_hf(model, tmp_path, legacy_config=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" not in config and "rope_theta" in config
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = token_batch(model.config.vocab_size)
    np.testing.assert_array_equal(reference_logits(again, tokens), reference_logits(model, tokens))


def test_saved_directory_in_shards_and_bfloat16(tmp_path: Path) -> None:
    model = by_name("llama/gqa").build()
    save_hf(model, tmp_path, torch.bfloat16, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert next(model.parameters()).dtype == torch.float32
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = "the shoe 😀 has\n\ttwo ends"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer(text)["input_ids"] == tiny_tokenizer(272).encode(text).ids


@pytest.mark.parametrize("qtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama/all-biases-tied", "qwen3/gqa", "gemma3_text/untied"])
def test_quantized_file_gives_its_weights_back(name: str, qtype: str, tmp_path: Path) -> None:
    model = by_name(name).build()
    write_gguf(model, tmp_path / "a.gguf", qtype)
    types = {
        tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors if len(tensor.shape) > 1
    }
    assert types == {qtype}
    quantized = load_gguf_weights(model, tmp_path / "a.gguf")
    for key, value in model.state_dict().items():
        error = float((quantized.state_dict()[key] - value).abs().max())
        if value.ndim > 1:
            assert 0 < error <= float(value.abs().max()) / 7
        else:
            assert error < 1e-6


def test_file_with_too_small_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="131"):
        write_gguf(by_name("llama/small-vocab").build(), tmp_path / "a.gguf")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """llama.cpp writes to file descriptor 2 whatever `verbose` says."""
    saved = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def llama_cpp_logits(path: Path, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """llama.cpp's logits [L, V] for tokens [L], with a float32 cache and all scaling as the file says."""
    llama_cpp = pytest.importorskip("llama_cpp")
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def without_repacking() -> Any:
        # Its AMX path traps where the kernel does not grant the tile registers.
        params = defaults()
        params.use_extra_bufts = False
        return params

    with quiet(), mock.patch.object(llama_cpp.llama_cpp, "llama_model_default_params", without_repacking):
        model = llama_cpp.Llama(
            str(path),
            n_ctx=len(tokens),
            n_threads=1,
            logits_all=True,
            type_k=0,
            type_v=0,
            yarn_attn_factor=-1.0,
            yarn_beta_fast=-1.0,
            yarn_beta_slow=-1.0,
            verbose=False,
        )
        model.eval(tokens.tolist())
        logits = np.array(model.scores[: len(tokens)], np.float32)
        model.close()
    return logits


@pytest.mark.llama_cpp
@pytest.mark.parametrize("case", IN_GGUF, ids=repr)
def test_llama_cpp_computes_the_same_from_the_file(case: TinyCase, tmp_path: Path) -> None:
    model = case.build()
    write_gguf(model, tmp_path / "a.gguf")
    tokens = token_batch(model.config.vocab_size, batch=1)[0]
    logits = llama_cpp_logits(tmp_path / "a.gguf", tokens)
    tolerance = LLAMA_CPP_TOLERANCE.get(case.family, 1e-4)
    np.testing.assert_allclose(logits, reference_logits(model, [tokens])[0], rtol=0, atol=tolerance)
