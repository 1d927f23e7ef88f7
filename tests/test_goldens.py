"""The golden answers are whole, agree with themselves, and are read as they were written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.goldens import FOLDER, Golden, load_golden

NAMES = ["smollm2", "gemma3"]


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return load_golden(request.param)


def test_prompts_are_those_of_the_list(golden: Golden) -> None:
    listed = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    assert [prompt.name for prompt in golden.prompts] == [prompt["name"] for prompt in listed]
    assert len(listed) == 20
    for prompt, source in zip(golden.prompts, listed, strict=True):
        assert prompt.messages == source.get("messages")
        if "text" in source:
            assert prompt.text == source["text"]
        else:
            assert all(message["content"] in prompt.text for message in source["messages"])
    # Gemma's window is 512 tokens; several prompts must be clearly longer.
    assert sum(len(prompt.prompt_ids) > 700 for prompt in golden.prompts) >= 3


def test_answers_agree_with_their_logits(golden: Golden) -> None:
    for prompt in golden.prompts:
        assert len(prompt.output_ids) == len(prompt.runner_up_ids) == len(prompt.margins) == 64
        assert all(margin >= 0 for margin in prompt.margins)
        last = len(prompt.prompt_ids) - 1
        assert {last, last + 7, last + 31, last + 62} <= prompt.logits.keys()
        for position, (ids, values) in prompt.logits.items():
            assert ids.shape == values.shape == (24,)
            assert np.all(np.diff(values[:8]) <= 0) and values[8:].max() <= values[0]
            if position >= last:
                step = position - last
                assert ids[:2].tolist() == [prompt.output_ids[step], prompt.runner_up_ids[step]]
                assert float(values[0] - values[1]) == pytest.approx(prompt.margins[step], abs=1e-6)


def test_llama_cpp_agrees_about_the_first_token(golden: Golden) -> None:
    """Its arithmetic is quantized, so the winner of transformers need only be among its first three."""
    checked = [prompt for prompt in golden.prompts if prompt.llama_cpp_top5]
    assert len(checked) == 5
    for prompt in checked:
        assert prompt.output_ids[0] in [token for token, _ in prompt.llama_cpp_top5[:3]]


def test_a_difference_is_explained(golden: Golden) -> None:
    prompt = golden.prompts[0]
    assert prompt.explain(prompt.output_ids) is None
    near = [*prompt.output_ids[:9], prompt.runner_up_ids[9], *prompt.output_ids[10:]]
    message = prompt.explain(near)
    assert message is not None and "step 9" in message and "the runner-up" in message
    assert f"{prompt.margins[9]:.6f}" in message
    assert "63 tokens instead of 64" in str(prompt.explain(prompt.output_ids[:-1]))


def test_another_file_is_refused(golden: Golden, tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="4 bytes"):
        golden.check_model(other)
    with pytest.raises(ValueError, match="SHA-256"):
        dataclasses.replace(golden, num_bytes=4).check_model(other)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="gemma3, smollm2"):
        load_golden("smollm3")
