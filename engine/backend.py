"""`Backend`: the only way from the engine to a device. XLA is the first implementation."""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import jax.monitoring
import numpy as np

MAX_PROGRAMS, MAX_PROGRAM_BYTES = 512, 1 << 30  # that are kept in a folder
_PARTIAL, _ABANDONED_S = ".partial", 3600


@dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program: what goes in, comes out, is shared between the two, and is used in between."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int


class Executable(Protocol):
    """A compiled program. Calls are asynchronous; arguments and results are handles."""

    def __call__(self, *args: Any) -> Any: ...


class HostCopy(Protocol):
    """A copy to the host under way."""

    def result(self) -> np.ndarray: ...


class Backend(Protocol):
    """What the engine asks of a device."""

    def put(self, tree: Any) -> Any:
        """A pytree of host arrays on the device."""
        ...

    def compile(self, fn: Callable[..., Any], *avals: Any, donate: Sequence[int] = (), name: str) -> Executable:
        """`fn` compiled for arguments of the given shapes; results are tuples, lists and dicts of arrays.

        donate: positions of the arguments whose buffers the results may take over.
        name: identifies the program: equal names and shapes must mean equal programs.
        """
        ...

    def get_async(self, handle: Any) -> HostCopy:
        """Starts copying an array to the host."""
        ...

    def memory(self, executable: Executable) -> Memory:
        """What a program needs."""
        ...


@dataclass
class CompileStats:
    """Counts of programs built here, and read back from an earlier start; and the seconds both took."""

    compiled: int = 0
    restored: int = 0
    compile_seconds: float = 0.0
    restore_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, seconds: float, *, restored: bool) -> None:
        """One more program, from any thread."""
        with self._lock:
            if restored:
                self.restored, self.restore_seconds = self.restored + 1, self.restore_seconds + seconds
            else:
                self.compiled, self.compile_seconds = self.compiled + 1, self.compile_seconds + seconds


class _Copy:
    def __init__(self, array: jax.Array) -> None:
        self._array = array
        array.copy_to_host_async()

    def result(self) -> np.ndarray:
        return np.asarray(self._array)


@dataclass
class XlaExecutable:
    """A compiled XLA program over flat arguments."""

    compiled: Any
    results: Any  # treedef

    def __call__(self, *args: Any) -> Any:
        return jax.tree.unflatten(self.results, self.compiled(*jax.tree.leaves(args)))


@dataclass
class XlaBackend:
    """Runs programs with XLA on one device (the first unless given).

    programs: folder for serialized executables, so that a second start neither traces nor compiles; None keeps none.
    on_compile: called with a program's name before it is built.
    """

    device: Any = None
    programs: Path | None = None
    on_compile: Callable[[str], object] | None = None
    stats: CompileStats = field(default_factory=CompileStats)
    _cache_hits: _CacheHits = field(init=False, repr=False, default_factory=lambda: _CacheHits())

    def __post_init__(self) -> None:
        if self.device is None:
            self.device = jax.local_devices()[0]

    def put(self, tree: Any) -> Any:
        return jax.device_put(tree, self.device)

    def get_async(self, handle: jax.Array) -> HostCopy:
        return _Copy(handle)

    def memory(self, executable: Executable) -> Memory:
        analysis = cast(XlaExecutable, executable).compiled.memory_analysis()
        return Memory(
            arguments=analysis.argument_size_in_bytes,
            outputs=analysis.output_size_in_bytes,
            aliased=analysis.alias_size_in_bytes,
            temporaries=analysis.temp_size_in_bytes,
        )

    def compile(self, fn: Callable[..., Any], *avals: Any, donate: Sequence[int] = (), name: str) -> XlaExecutable:
        leaves, tree = jax.tree.flatten(avals)
        path = self._path(name, leaves, tree, donate)
        started = time.perf_counter()
        restored = _restore(path)
        if restored is not None:
            self.stats.add(time.perf_counter() - started, restored=True)
            return restored
        if self.on_compile is not None:
            self.on_compile(name)
        counts = [len(jax.tree.leaves(a)) for a in avals]
        starts = np.cumsum([0, *counts])
        donated = tuple(i for position in donate for i in range(starts[position], starts[position + 1]))

        results = None

        def flat(*args: Any) -> list[Any]:
            nonlocal results
            out, results = jax.tree.flatten(fn(*jax.tree.unflatten(tree, args)))
            return out

        flat.__name__ = name.split("(")[0].replace(" ", "_")
        on_device = jax.sharding.make_single_device_sharding(self.device)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device) for x in leaves]
        lowered = jax.jit(flat, donate_argnums=donated, keep_unused=True).lower(*shapes)
        with self._cache_hits.in_this_thread() as hits:
            built = XlaExecutable(lowered.compile(), results)
        self.stats.add(time.perf_counter() - started, restored=False)
        if not hits:
            _save(path, built)
        return built

    def _path(self, name: str, leaves: Sequence[Any], tree: Any, donate: Sequence[int]) -> Path | None:
        if self.programs is None:
            return None
        shapes = [(x.shape, str(x.dtype)) for x in leaves]
        key = repr((name, shapes, str(tree), tuple(donate), self.device.platform, self.device.device_kind))
        digest = hashlib.sha256((key + _environment()).encode()).hexdigest()
        return self.programs / f"{digest}.program"


@lru_cache(maxsize=1)
def _environment() -> str:
    """What a serialized executable depends on besides its program: versions, our code and extension, and the CPU."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    for text in (jax.__version__, version("jaxlib"), platform.machine(), platform.processor()):
        digest.update(text.encode())
    for file in _code_files():
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        digest.update("".join(sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})).encode())
    except OSError:
        pass
    return digest.hexdigest()


def _code_files() -> list[Path]:
    import inferax.engine
    import inferax.models
    import inferax.ops
    from inferax.kernels import cpu

    files: list[Path] = []
    for package in (inferax.engine, inferax.models, inferax.ops, cpu):
        for folder in package.__path__:
            files += Path(folder).rglob("*.py")
    extension = find_spec("inferax.kernels.cpu._native")
    if extension is not None and extension.origin is not None:
        files.append(Path(extension.origin))
    return sorted(set(files))


def _restore(path: Path | None) -> XlaExecutable | None:
    """The executable in a file, or None where there is none to be trusted: absent, stale, damaged."""
    if path is None:
        return None
    from jax.experimental.serialize_executable import deserialize_and_load

    try:
        data = path.read_bytes()
        digest, body = data[:32], data[32:]
        if hashlib.sha256(body).digest() != digest:
            return None
        payload, arguments, outputs, results = pickle.loads(body)
        with suppress(OSError):  # a folder may be for reading only
            os.utime(path)  # used now; see _trim
        return XlaExecutable(deserialize_and_load(payload, arguments, outputs), results)
    except FileNotFoundError:
        return None
    except Exception:  # whatever is wrong with it, it is only a cache
        return None


class _CacheHits:
    """Notes which threads' programs came from jax's own compilation cache.

    Such an executable has lost its code's symbols on CPU: serialized once more, it loads and then fails when it runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[int, list[str]] = {}

    def _note(self, event: str, **_: Any) -> None:
        hits = self._threads.get(threading.get_ident())
        if hits is not None and event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    @contextmanager
    def in_this_thread(self) -> Iterator[list[str]]:
        hits: list[str] = []
        # One listener for all threads: jax goes through its list of them without a lock, and would pass one over if
        # another before it were removed meanwhile.
        with self._lock:
            if not self._threads:
                jax.monitoring.register_event_listener(self._note)
            self._threads[threading.get_ident()] = hits
        try:
            yield hits
        finally:
            with self._lock:
                del self._threads[threading.get_ident()]
                if not self._threads:
                    jax.monitoring.unregister_event_listener(self._note)


def _save(path: Path | None, executable: XlaExecutable) -> None:
    if path is None:
        return
    from jax.experimental.serialize_executable import serialize

    try:
        payload, arguments, outputs = serialize(executable.compiled)
        body = pickle.dumps((payload, arguments, outputs, executable.results))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=_PARTIAL, delete=False) as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(file.name, path)
        _trim(path.parent)
    except (OSError, ValueError, pickle.PicklingError):
        return  # a full disk or a program that cannot be serialized costs the next start time, nothing else


def _trim(folder: Path) -> None:
    """Removes the programs that have not been used for longest beyond the folder's bounds, and what a process that was
    killed left half written."""
    for path in folder.glob(f"*{_PARTIAL}"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()
    files = []
    for path in folder.glob("*.program"):
        with suppress(FileNotFoundError):  # another process trims too
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    size = 0
    for count, (_, bytes_, path) in enumerate(sorted(files, key=lambda f: f[0], reverse=True), start=1):
        size += bytes_
        if count > MAX_PROGRAMS or size > MAX_PROGRAM_BYTES:
            path.unlink(missing_ok=True)


def avals(tree: Any) -> Any:
    """The shapes and dtypes of a pytree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
