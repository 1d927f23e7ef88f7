"""`inferax perplexity` against full logits, and what it says of wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import inferax
from inferax.serving.cli import main
from tests.goldens import load_golden

CONTEXT = 96


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    del smollm2_path  # the default model is there
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(next(p.text for p in load_golden("smollm2").prompts if p.name == "long_prose"))
    return file


def test_as_full_logits_say(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perplexity", str(text), "--context", str(CONTEXT), "--compute", "exact", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = inferax.load()
    ids = model.tokenizer.encode(text.read_text())
    windows = np.array(ids[: len(ids) // CONTEXT * CONTEXT], np.int32).reshape(-1, CONTEXT)
    first, scores = CONTEXT // 2 + 1, []
    apply = jax.jit(model.apply)
    for window in windows:
        logits = np.asarray(apply(model.params, window[None]), np.float64)[0, first - 1 : -1]
        top = logits.max(-1)
        scores += list(np.take_along_axis(logits, window[first:, None], 1)[:, 0] - top
                       - np.log(np.exp(logits - top[:, None]).sum(-1)))  # fmt: skip
    assert found["tokens"] == len(scores) and found["windows"] == len(windows) and found["context"] == CONTEXT
    assert found["perplexity"] == pytest.approx(np.exp(-np.mean(scores)), rel=1e-5)
    error = np.exp(-np.mean(scores)) * np.std(scores, ddof=1) / np.sqrt(len(scores))
    assert found["standard_error"] == pytest.approx(error, rel=1e-4)


def test_int8_products_stay_near(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for compute in ("exact", "fast"):
        assert (
            main(["perplexity", str(text), "--context", str(CONTEXT), "--compute", compute, "--json", "--quiet"]) == 0
        )
        results.append(json.loads(capsys.readouterr().out)["perplexity"])
    assert results[1] == pytest.approx(results[0], rel=0.03)  # a few hundred tokens


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (
            ["{text}", "--context", "8192"],
            2,
            "--context: a window of 8192 tokens and one more: 8193 is not in [2, 8192]",
        ),
        (["{text}", "--context", "2"], 2, "'2' is not a number of tokens, 4 or more"),
        (["nowhere.txt"], 1, "nowhere.txt: No such file or directory"),
        (["{binary}"], 1, "is not UTF-8"),
        (["{short}"], 1, "a window takes 512"),
    ],
)
def test_wrong_input(
    arguments: list[str], code: int, problem: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("A few words.")
    names = {"text": text, "binary": tmp_path / "binary", "short": tmp_path / "short"}
    try:
        got = main(["perplexity", *(a.format(**names) for a in arguments)])
    except SystemExit as stop:
        got = int(stop.code or 0)
    err = capsys.readouterr().err
    assert got == code and problem in err.splitlines()[-1], err
