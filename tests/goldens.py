"""Reads the golden answers of tests/golden (its README.md says how they are made and what they hold)."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class GoldenPrompt:
    """One prompt and what transformers answers, in float32 on the CPU.

    name:           unique in its golden
    text:           the prompt; for a chat the rendered template (or a plain transcript where the model has none)
    messages:       of a chat, else None
    prompt_ids:     the tokens of the text, with the model's BOS where it wants one
    output_ids:     64 greedy tokens; nothing ends the answer early
    runner_up_ids:  at each of these steps the token with the second largest logit
    margins:        at each step the largest logit minus the second
    eos_step:       the first step that gives the end token, None where it does not come
    logits:         position in prompt + output -> (ids [24] int64, values [24] float32): the eight largest logits that
                    predict the token after that position, and those of sixteen fixed ids
    llama_cpp_top5: llama.cpp's first token in its quantized arithmetic, as (id, log-probability); else empty
    """

    name: str
    text: str
    messages: list[dict[str, str]] | None
    prompt_ids: list[int]
    output_ids: list[int]
    runner_up_ids: list[int]
    margins: list[float]
    eos_step: int | None
    logits: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]
    llama_cpp_top5: list[tuple[int, float]]

    def explain(self, output_ids: list[int]) -> str | None:
        """None where the ids are the golden's; else one line that says where they part and how near a tie that was."""
        if output_ids == self.output_ids:
            return None
        pairs = zip(output_ids, self.output_ids, strict=False)
        step = next((i for i, (given, golden) in enumerate(pairs) if given != golden), None)
        if step is None:
            return f"{self.name}: {len(output_ids)} tokens instead of {len(self.output_ids)}"
        kind = "the runner-up" if output_ids[step] == self.runner_up_ids[step] else "not even the runner-up"
        return (
            f"{self.name}: step {step} gives token {output_ids[step]}, {kind}, instead of {self.output_ids[step]}, "
            f"which leads by {self.margins[step]:.6f}"
        )


@dataclass(frozen=True)
class Golden:
    """The golden answers for one model file. `made` holds the date and the versions, `checks` what was verified."""

    name: str
    file: str
    sha256: str
    num_bytes: int
    made: dict[str, str]
    checks: dict[str, Any]
    prompts: list[GoldenPrompt]

    def check_model(self, path: Path) -> None:
        """Raises ValueError where `path` is not the file that the golden was made with."""
        if (num_bytes := path.stat().st_size) != self.num_bytes:
            raise ValueError(f"{path} has {num_bytes} bytes, the golden {self.name} is for {self.num_bytes} bytes")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            raise ValueError(f"{path} has SHA-256 {digest}, the golden {self.name} is for {self.sha256}")


def load_golden(name: str) -> Golden:
    """The golden of that name ("smollm2", "gemma3"). Raises ValueError for a name or a format that is not there."""
    path = FOLDER / f"{name}.json.gz"
    if not path.exists():
        names = sorted(found.name.removesuffix(".json.gz") for found in FOLDER.glob("*.json.gz"))
        raise ValueError(f"no golden {name!r}; there are {', '.join(names)}")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        data = json.load(file)
    if data["format"] != 1:
        raise ValueError(f"{path}: format {data['format']}, this reads 1")
    return Golden(
        name=data["name"],
        file=data["model"]["file"],
        sha256=data["model"]["sha256"],
        num_bytes=data["model"]["bytes"],
        made=data["made"],
        checks=data["checks"],
        prompts=[_prompt(prompt) for prompt in data["prompts"]],
    )


def _prompt(data: dict[str, Any]) -> GoldenPrompt:
    return GoldenPrompt(
        name=data["name"],
        text=data["text"],
        messages=data["messages"],
        prompt_ids=data["prompt_ids"],
        output_ids=data["output_ids"],
        runner_up_ids=data["runner_up_ids"],
        margins=data["margins"],
        eos_step=data["eos_step"],
        logits={
            row["position"]: (np.array(row["ids"], np.int64), np.array(row["values"], np.float32))
            for row in data["logits"]
        },
        llama_cpp_top5=[(int(token), float(logprob)) for token, logprob in data.get("llama_cpp_top5", [])],
    )
