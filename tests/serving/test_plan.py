"""`inferax plan`: it tells what an engine takes, from headers alone, and what would fit."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import inferax
from inferax.engine.build import build_engine
from inferax.loaders.model import read_headers
from inferax.serving.cli import _size, main
from tests.tiny_models import cases, save_hf, write_gguf


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    built = next(case for case in cases() if case.name == "llama/gqa").build()
    folder = tmp_path_factory.mktemp("tiny")
    save_hf(built, folder / "hf", max_shard_size="150KB")
    write_gguf(built, folder / "tiny.gguf", "Q8_0")
    return {"safetensors": folder / "hf", "gguf": folder / "tiny.gguf"}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, jax's own compilation cache included: a program found there would not be saved anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def fields(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *map(str, args), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_the_plan_is_what_the_engine_takes(
    kind: str, models: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--max-num-seqs", 3, "--kv-memory", "300K", "--kv-cache-dtype", "int8", "--no-compile")
    plan = fields(capsys, models[kind], *flags)
    engine = build_engine(models[kind], max_num_seqs=3, kv_cache_memory_bytes=300 * 1024, kv_cache_dtype="int8")
    rows = {row["name"]: row["bytes"] for row in plan["rows"]}
    assert rows["weights"] == sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.params))
    cache_bytes = sum(leaf.nbytes for leaf in engine.runner._cache)
    assert sum(size for name, size in rows.items() if name.startswith("KV")) == cache_bytes <= 300 * 1024
    assert plan["max_model_len"] == engine.max_model_len and plan["kv_cache_dtype"] == "int8"
    assert plan["total"] == sum(rows.values())
    _, params = read_headers(models[kind], pack_for="cpu")
    assert jax.tree.structure(params) == jax.tree.structure(engine.runner.params)


def test_no_weight_is_read(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("inferax.loaders.tensors.MappedTensors.read", read)
    for path in models.values():
        fields(capsys, path, "--no-compile")


def test_the_compiled_step_tells_its_temporaries(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    args = ["plan", str(models["gguf"]), "--max-num-seqs", "2", "--max-num-batched-tokens", "16"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert "by the compiled programs' own analysis" in out and "[compiling" in err
    assert len(list(cache.rglob("*.program"))) == 2
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert {"weights", "sampler state", "temporaries", "reserve", "total", "context", "KV tokens"} <= rows.keys()
    assert main([*args, "--no-compile"]) == 0
    out, err = capsys.readouterr()
    assert "estimated" in out and err == ""


def test_what_does_not_fit_exits_with_advice_that_works(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", str(models["gguf"]), "--no-compile", "--max-model-len", "128"]
    assert main([*args, "--kv-memory", "20000"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("inferax: error: --kv-cache-memory-bytes: 20000 bytes hold")
    ways = re.findall(r"(--[a-z-]+) (\w+)", err.split("what fits: ")[1])
    assert {name for name, _ in ways} >= {"--max-model-len", "--kv-cache-memory-bytes"}
    for way in ways:
        assert main([*args, "--kv-memory", "20000", *way]) == 0, way


def test_wrong_values_are_wrong_usage(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(models["gguf"]), "--max-num-seqs", "0"]) == 2
    assert "--max-num-seqs: 0 is less than 1" in capsys.readouterr().err
    assert main(["plan", str(models["gguf"]), "--max-model-len", "4000"]) == 2
    assert "--max-model-len: 4000 is not in [2, 128]" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--kv-cache-dtype", "f8"])


def test_sizes() -> None:
    assert [_size(x) for x in ("4096", "512M", "2g", "1.5GiB", "500MB", "10 kib", "7B")] == [
        4096, 512 << 20, 2 << 30, 3 << 29, 500_000_000, 10 << 10, 7,
    ]  # fmt: skip
    for wrong in ("", "5Q", "-1", "1e9", "G", "1.5.2M"):
        with pytest.raises(ArgumentTypeError, match="is not a size"):
            _size(wrong)


def test_kv_dtypes_by_name(models: dict[str, Path]) -> None:
    with pytest.raises(
        inferax.errors.RequestError, match="kv_cache_dtype: 'half' is none of auto, f32, bf16, int8, fp8"
    ):
        inferax.LLM(models["gguf"], kv_cache_dtype="half")
    for name, stored in (("fp8", "float8_e4m3fn"), ("f32", "float32"), ("auto", "bfloat16")):
        engine = build_engine(models["gguf"], kv_cache_dtype=name, kv_cache_memory_bytes=1 << 20)
        assert {leaf.dtype.name for leaf in engine.runner._cache} == {stored}
