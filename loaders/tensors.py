"""What the file readers share: named tensors in memory-mapped files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import ml_dtypes
import numpy as np

from inferax.errors import LoadError, UnsupportedError

FETCH_AGAIN = "The file is cut off or damaged: fetch it again and compare its size and checksum with the source's"

# Types that numpy arrays can hold, under the names that both file formats use.
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "I8": np.dtype("i1"),
        "I16": np.dtype("<i2"),
        "I32": np.dtype("<i4"),
        "I64": np.dtype("<i8"),
    }
)


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: row-major `shape` in weights, the file format's name of its `type`, and its size in bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int


class TensorSource(Protocol):
    """Named tensors of one or more files."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def files(self) -> tuple[Path, ...]: ...

    def file_of(self, name: str) -> Path:
        """The file that holds tensor `name`. Raises LoadError if there is none."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Tensor `name`, as a read-only view of the mapped file.

        Numbers that numpy can hold have the tensor's shape and their own dtype; ggml's quantized types are
        uint8[*shape[:-1], shape[-1] // block, block_bytes]. Raises LoadError if there is no such tensor, and
        UnsupportedError if its type has no array form.
        """
        ...

    def close(self) -> None:
        """Forgets the mappings. Memory is given back when the last array that was read is gone too."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor, the file it lies in, and its bytes there as an array (None if the type has no array form)."""

    info: TensorInfo
    file: Path
    array: np.ndarray | None


class MappedTensors:
    """The `TensorSource` of both readers."""

    def __init__(self, files: tuple[Path, ...], stored: Mapping[str, Stored]) -> None:
        self.files = files
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({name: s.info for name, s in stored.items()})
        self._stored = dict(stored)

    def file_of(self, name: str) -> Path:
        return self._find(name).file

    def read(self, name: str) -> np.ndarray:
        stored = self._find(name)
        if stored.array is None:
            raise UnsupportedError(f"{stored.file}: tensor {name!r} has type {stored.info.type}, which cannot be read")
        return stored.array

    def close(self) -> None:
        self._stored.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _find(self, name: str) -> Stored:
        stored = self._stored.get(name)
        if stored is None:
            if name in self.tensors:
                raise ValueError(f"tensor {name!r} was asked for after close()")
            raise LoadError(
                self.files[0],
                f"there is no tensor {name!r}",
                f"The {len(self.tensors)} tensors in it belong to a model of another kind, or a part is missing",
            )
        return stored


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes, mapped read-only. Raises LoadError if it is missing, not a file, unreadable or empty."""
    try:
        if not path.is_file():  # opening a pipe would wait for its other end
            kind = "a directory" if path.is_dir() else "not a regular file" if path.exists() else "not there"
            raise LoadError(path, f"a file is expected here, and this is {kind}", "Check the path")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise LoadError(path, "the file is empty", FETCH_AGAIN)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:
        raise LoadError(path, f"the file cannot be read ({e})", "Check the path, its permissions and the disk") from e
    if data[:24] == b"version https://git-lfs.":
        raise LoadError(path, "this is a Git LFS pointer, not the file itself", "Fetch the file with `git lfs pull`")
    return data
