"""What a user may name as a model: paths, names on the hub, nothing at all."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferax.errors import SourceError
from inferax.loaders import hub, sources
from inferax.loaders.cache import cache_folder
from inferax.loaders.sources import DEFAULT_MODEL, resolve


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(folder: Path, *names: str) -> Path:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"GGUF" if name.endswith("gguf") else b"{}")
    return folder


def test_default_model(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.sha256
    monkeypatch.setattr(subprocess, "Popen", None)
    assert resolve() == resolve(None) == smollm2_path


def test_default_model_without_a_network(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "cache_folder", lambda: here / "cache" / "inferax")
    monkeypatch.setattr("inferax.loaders.wheels._installed", lambda model: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(SourceError) as caught:
        resolve()
    place = here / "cache" / "inferax" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert f"place {place.name} (98362432 bytes, SHA-256 {DEFAULT_MODEL.sha256}" in caught.value.remedy
    assert caught.value.remedy.endswith(f"at {place}")
    assert not place.exists()


def test_default_model_has_no_choices() -> None:
    for choices in ({"quant": "Q8_0"}, {"revision": "main"}):
        with pytest.raises(SourceError, match="no revisions or quantizations"):
            resolve(None, **choices)  # type: ignore[arg-type]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == Path("/home/someone/.cache/inferax")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path("/home/someone/.cache/inferax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/inferax")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == Path("/home/someone/Library/Caches/inferax")
    monkeypatch.setattr("sys.platform", "win32")
    assert cache_folder() == Path("/local/inferax")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LOCALAPPDATA")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(SourceError, match="cache folder"):
        cache_folder()


def test_paths(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(here, "m.gguf", "org/name/m.gguf", "blobs/sha256-1.gguf")
    blob = (here / "blobs" / "sha256-1.gguf").rename(here / "blobs" / "sha256-1")  # a GGUF by its first bytes
    monkeypatch.setenv("HOME", str(here))
    for source in ("m.gguf", "./m.gguf", here / "m.gguf", str(here / "m.gguf"), "~/m.gguf", "org/../m.gguf"):
        assert resolve(source).samefile(here / "m.gguf")
    assert resolve("org/name") == Path("org/name/m.gguf"), "what exists is a path, though it looks like a hub name"
    assert resolve(blob) == blob


@pytest.mark.parametrize(
    ("names", "quant", "chosen"),
    [
        (["a.gguf", "README.md"], None, "a.gguf"),
        (["a.gguf", "mmproj-a.gguf", "a.imatrix.gguf", "._a.gguf"], None, "a.gguf"),
        (["a-00002-of-00002.gguf", "a-00001-of-00002.gguf"], None, "a-00001-of-00002.gguf"),
        (["a.Q4_0.gguf", "a.Q8_0.gguf"], "q8_0", "a.Q8_0.gguf"),
        (["a_q4_0.gguf", "a_bf16.gguf"], "BF16", "a_bf16.gguf"),
        (["a-Q4_0.gguf", "a-IQ4_0.gguf", "a-Q4_0_X.gguf"], "Q4_0", "a-Q4_0.gguf"),
        (["a-UD-Q4_K_XL.gguf", "a-Q4_K_XL.gguf"], "a-Q4_K_XL.gguf", "a-Q4_K_XL.gguf"),
        (["config.json", "model.safetensors"], None, "."),
        (["config.json", "model.safetensors", "a.gguf"], None, "."),
        (["config.json", "model.safetensors", "a-Q8_0.gguf"], "Q8_0", "a-Q8_0.gguf"),
        (["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None, "."),
        (["config.json", "weights.safetensors"], None, "."),
        (["model.safetensors", "a.gguf"], None, "a.gguf"),
    ],
)
def test_folder(here: Path, names: list[str], quant: str | None, chosen: str) -> None:
    folder = make(here / "x", *names)
    assert resolve(folder, quant=quant) == folder / chosen


@pytest.mark.parametrize(
    ("names", "quant", "said"),
    [
        (["a-Q4_K_M.gguf", "b.gguf"], None, "holds 2 GGUF models: a-Q4_K_M.gguf, b.gguf"),
        (
            ["a-UD-Q4_K_XL.gguf", "a-Q4_K_XL.gguf"],
            "Q4_K_XL",
            "2 GGUF models of quantization 'Q4_K_XL': a-Q4_K_XL.gguf, a-",
        ),
        ([f"m{i:02d}.gguf" for i in range(25)], None, "m19.gguf and 5 more"),
        (["a.gguf"], "Q8_0", "no GGUF file of quantization 'Q8_0'; it holds a.gguf"),
        (["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], None, "incomplete: a-00002-of-00003.gguf"),
        (["config.json", "model-00001-of-00002.safetensors"], None, "incomplete: model-00002-of-00002.safetensors"),
        (["config.json", "pytorch_model.bin", "x.pt"], None, r"only pickled .* weights \(pytorch_model.bin, x.pt\)"),
        (["model.safetensors"], None, "no config.json to go with model.safetensors"),
        (["adapter_model.safetensors", "config.json"], None, "adapter only: adapter_model.safetensors"),
        (["README.md"], None, "holds no model file"),
    ],
)
def test_folder_without_one_model(here: Path, names: list[str], quant: str | None, said: str) -> None:
    folder = make(here / "x", *names)
    with pytest.raises(SourceError, match=said) as caught:
        resolve(folder, quant=quant)
    assert caught.value.file == str(folder) and caught.value.remedy


def test_any_part_of_a_split_file_stands_for_it(here: Path) -> None:
    make(here, *(f"a-0000{i}-of-00003.gguf" for i in (1, 2, 3)))
    assert resolve("a-00003-of-00003.gguf") == Path("a-00001-of-00003.gguf")
    (here / "a-00002-of-00003.gguf").unlink()
    with pytest.raises(SourceError, match="is split, and a-00002-of-00003.gguf is missing"):
        resolve("a-00001-of-00003.gguf")


@pytest.mark.parametrize("name", ["model.bin", "model.pth", "model.safetensors", "notes"])
def test_file_of_another_kind(here: Path, name: str) -> None:
    make(here, name)
    with pytest.raises(SourceError, match=f"{name}: is not a GGUF file"):
        resolve(here / name)


@pytest.mark.parametrize(
    "source",
    [
        "./x/y",
        "../x",
        "/nowhere/x",
        "~/nowhere",
        "org/name.gguf",
        "m.gguf",
        "gpt2",
        "a/b/c",
        "org/",
        "/name",
        "org/na me",
    ]
    + [
        "https://hub/org/name",
        "org/name@",
        "org/name:",
        "org/name@a@b:c",
        "org/é",
        "../nowhere",
        "C:\\models\\m",
        Path("org/name"),
    ]
    + ["", "a\0b", "x" * 5000, "~nobody-of-this-name/x", " "],
)
def test_neither_a_path_nor_a_hub_name(here: Path, source: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch", None)
    with pytest.raises(SourceError) as caught:
        resolve(source)
    assert caught.value.remedy
    assert str(source).strip("\0")[:1] in caught.value.file


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("org/name", (None, None)),
        ("org/name:Q4_K_M", (None, "Q4_K_M")),
        ("org/name@v1.0", ("v1.0", None)),
        ("org/name@refs/pr/1:Q8_0", ("refs/pr/1", "Q8_0")),
        ("org/name:Q8_0@main", ("main", "Q8_0")),
        ("org/name:m.gguf", (None, "m.gguf")),
        ("Org-1/Na.me_2-GGUF", (None, None)),
    ],
)
def test_hub_names(source: str, asked: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(repo: str, *, revision: str | None, quant: str | None, **_: object) -> Path:
        calls.append((repo, revision, quant))
        return Path("x")

    monkeypatch.setattr(hub, "fetch", fetch)
    resolve(source)
    revision, quant = asked
    resolve(source, revision=revision, quant=quant)
    repo = source.partition(":")[0].partition("@")[0]
    assert calls == [(repo, *asked)] * 2
    with pytest.raises(SourceError, match="Name only one"):
        resolve(f"{repo}@v2", revision="v1")


def test_local_path_leaves_nothing_to_choose(here: Path) -> None:
    make(here, "m.gguf")
    with pytest.raises(SourceError, match="is one file, so quantization 'Q8_0' cannot be chosen"):
        resolve("m.gguf", quant="Q8_0")
    with pytest.raises(SourceError, match="local path and has no revision 'main'"):
        resolve("m.gguf", revision="main")


def test_importing_costs_nothing() -> None:
    """The command line answers fast: neither the hub's library nor jax is imported before a model is asked for."""
    program = (
        "import sys, inferax.loaders.sources; print(*{'huggingface_hub', 'jax', 'numpy', 'tqdm'} & {*sys.modules})"
    )
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert out == "\n"
