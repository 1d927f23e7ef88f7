"""GGUF files (versions 2 and 3, little-endian, whole or split): metadata and tensors of a memory-mapped file.

The format is described in ggml's docs/gguf.md. The header is parsed here, in one pass over the mapping, because a
vocabulary of 262,144 tokens takes the gguf package's reader 14 seconds and this one a tenth of a second.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, Keys

from inferax.errors import LoadError
from inferax.loaders.tensors import DTYPES, FETCH_AGAIN, MappedTensors, Stored, TensorInfo, map_file
from inferax.ops.ggml import TYPES

MAX_DIMS = 4  # GGML_MAX_DIMS

_SCALARS: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        GGUFValueType.UINT8: np.dtype("u1"),
        GGUFValueType.INT8: np.dtype("i1"),
        GGUFValueType.UINT16: np.dtype("<u2"),
        GGUFValueType.INT16: np.dtype("<i2"),
        GGUFValueType.UINT32: np.dtype("<u4"),
        GGUFValueType.INT32: np.dtype("<i4"),
        GGUFValueType.UINT64: np.dtype("<u8"),
        GGUFValueType.INT64: np.dtype("<i8"),
        GGUFValueType.FLOAT32: np.dtype("<f4"),
        GGUFValueType.FLOAT64: np.dtype("<f8"),
        GGUFValueType.BOOL: np.dtype("?"),
    }
)
_REMOVED: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)
_PART = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_CONVERT = "Make the file again from the original model with llama.cpp's convert_hf_to_gguf.py"


class GGUFFile(MappedTensors):
    """An open GGUF model; a `TensorSource`.

    `metadata` holds Python scalars, strings, lists of strings, and numpy arrays for numeric arrays. Of a split model it
    is the first part's; `files` are all parts in order.
    """

    def __init__(
        self, files: tuple[Path, ...], stored: Mapping[str, Stored], metadata: Mapping[str, Any], version: int
    ) -> None:
        super().__init__(files, stored)
        self.metadata: Mapping[str, Any] = MappingProxyType(dict(metadata))
        self.version = version

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises LoadError if it is missing or not a string."""
        name = self.metadata.get(Keys.General.ARCHITECTURE)
        if not isinstance(name, str):
            problem = f"metadata {Keys.General.ARCHITECTURE} should name the model's architecture, and is {name!r}"
            raise LoadError(self.files[0], problem, _CONVERT)
        return name

    @property
    def alignment(self) -> int:
        """Bytes to which tensor data is aligned in the first file."""
        return int(self.metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT))


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Maps a GGUF file, with all other parts of it if it is one part of a split model.

    Raises LoadError, naming the file, if anything in it is missing, broken or unknown.
    """
    given = Path(path)
    given_part = _read_part(given)
    count = given_part.split_value(Keys.Split.LLM_KV_SPLIT_COUNT)
    if count <= 1:
        return GGUFFile((given,), given_part.stored, given_part.metadata, given_part.version)

    named = _PART.fullmatch(given.name)
    if named is None or int(named["count"]) != count:
        problem = f"the file is one of {count} parts of a split model, and its name does not say so"
        raise LoadError(given, problem, f"Give all parts their names again: NAME-00001-of-{count:05d}.gguf and so on")
    files = tuple(given.with_name(f"{named['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count))
    for file in files:
        if not file.exists():
            problem = f"this part of the split model {given.name} is missing"
            raise LoadError(file, problem, f"Put all {count} parts in one directory")

    stored: dict[str, Stored] = {}
    first = given_part
    for i, file in enumerate(files):
        part = given_part if file == given else _read_part(file)
        no, of = part.split_value(Keys.Split.LLM_KV_SPLIT_NO), part.split_value(Keys.Split.LLM_KV_SPLIT_COUNT)
        if (no, of) != (i, count):
            problem = f"by its name this is part {i + 1} of {count}, by its metadata part {no + 1} of {of}"
            raise LoadError(file, problem, "Give the parts the names again that they had where they come from")
        if i == 0:
            first = part
        for name, tensor in part.stored.items():
            if name in stored:
                problem = f"tensor {name!r} is in {stored[name].file.name} too"
                raise LoadError(file, problem, "Fetch all parts again from one source")
            stored[name] = tensor
    total = first.split_value(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    if total != len(stored):
        problem = f"the {count} parts of the model hold {len(stored)} tensors where {total} are announced"
        raise LoadError(files[0], problem, "Fetch all parts again from one source")
    return GGUFFile(files, stored, first.metadata, first.version)


@dataclass(frozen=True)
class _Part:
    file: Path
    version: int
    metadata: Mapping[str, Any]
    stored: Mapping[str, Stored]

    def split_value(self, key: str) -> int:
        value = self.metadata.get(key, 0)
        if not isinstance(value, int) or value < 0:
            problem = f"metadata {key} should be a number, and is {value!r}"
            raise LoadError(self.file, problem, "Split the model again with llama.cpp's gguf-split")
        return value


class _Cursor:
    """A position in a mapped file, from which values are taken in order. `what` names the thing for errors."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.size, self.at = file, data, len(data), 0

    def fail(self, problem: str, remedy: str = FETCH_AGAIN) -> NoReturn:
        raise LoadError(self.file, problem, remedy)

    def need(self, size: int, what: str) -> None:
        if size > self.size - self.at:
            self.fail(f"{what} needs {size} bytes at offset {self.at}, and the file ends at {self.size}")

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def count(self, each: int, what: str) -> int:
        """A number of things of at least `each` bytes, so that a count can ask for no more than the file holds."""
        value = self.u64(f"the number of {what}")
        if value * each > self.size - self.at:
            self.fail(f"it announces {value} {what}, more than fit in the {self.size - self.at} bytes that follow")
        return value

    def text(self, what: str) -> str:
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings. Vocabularies have 10**5 and more, hence the local names."""
        data, size, at, length_at = self.data, self.size, self.at, _U64.unpack_from
        found = []
        for i in range(count):
            start = at + 8
            if start > size:
                self.fail(f"the file ends at offset {size}, within the length of {what}{f'[{i}]' if count > 1 else ''}")
            at = start + length_at(data, at)[0]
            if at > size:
                self.fail(
                    f"{what}{f'[{i}]' if count > 1 else ''} has a length of {at - start} bytes at offset {start}, "
                    f"and the file ends at {size}"
                )
            try:
                found.append(data[start:at].decode())
            except UnicodeDecodeError as e:
                self.fail(f"{what}{f'[{i}]' if count > 1 else ''} is not UTF-8 ({e.reason} at byte {e.start})")
        self.at = at
        return found

    def numbers(self, dtype: np.dtype[Any], count: int, what: str) -> np.ndarray:
        self.need(count * dtype.itemsize, what)
        stored = np.dtype("u1") if dtype.kind == "b" else dtype
        found = np.frombuffer(self.data, stored, count, self.at)
        self.at += count * dtype.itemsize
        return found != 0 if dtype.kind == "b" else found.copy()

    def value(self, what: str) -> Any:
        """One metadata value with its type before it."""
        kind = self.u32(f"the type of {what}")
        if kind == GGUFValueType.STRING:
            return self.text(what)
        if kind == GGUFValueType.ARRAY:
            kind = self.u32(f"the type of the elements of {what}")
            if kind == GGUFValueType.ARRAY:
                self.fail(f"{what} is an array of arrays, which no reader of GGUF knows", _CONVERT)
            if kind == GGUFValueType.STRING:
                return self.texts(self.count(8, f"strings in {what}"), what)
            dtype = self.dtype(kind, f"the elements of {what}")
            return self.numbers(dtype, self.count(dtype.itemsize, f"numbers in {what}"), what)
        return self.numbers(self.dtype(kind, what), 1, what)[0].item()

    def dtype(self, kind: int, what: str) -> np.dtype[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            self.fail(f"{what} has value type {kind}; known are 0 to {max(GGUFValueType)}")
        return dtype


def _read_part(path: Path) -> _Part:
    data = map_file(path)
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        cursor.fail(f"it starts with {data[:4]!r}, and a GGUF file with b'GGUF'", "Check that this is a GGUF file")
    cursor.at = 4
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        cursor.fail(
            "the file is big-endian, which is not supported",
            "Convert it with `gguf-convert-endian FILE little` of the gguf package",
        )
    if version not in (2, 3):
        cursor.fail(f"the file is GGUF version {version}; versions 2 and 3 can be read", _CONVERT)
    num_tensors = cursor.count(24, "tensors")
    num_values = cursor.count(13, "metadata values")

    metadata: dict[str, Any] = {}
    for i in range(num_values):
        key = cursor.text(f"the key of metadata value {i}")
        if key in metadata:
            cursor.fail(f"metadata {key} occurs twice", _CONVERT)
        metadata[key] = cursor.value(f"metadata {key}")
    alignment = metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        cursor.fail(f"metadata {Keys.General.ALIGNMENT} is {alignment!r}, and should be a power of two", _CONVERT)

    found: list[tuple[int, TensorInfo]] = []
    names: set[str] = set()
    for i in range(num_tensors):
        offset, info = _tensor_info(cursor, i)
        if info.name in names:
            cursor.fail(f"tensor {info.name!r} occurs twice", _CONVERT)
        if offset % alignment:
            cursor.fail(f"tensor {info.name!r} is at offset {offset}, which is not a multiple of {alignment}")
        names.add(info.name)
        found.append((offset, info))

    for (at, before), (offset, info) in pairwise(sorted(found, key=lambda item: item[0])):
        if offset < at + before.nbytes:
            cursor.fail(f"tensors {before.name!r} and {info.name!r} overlap")
    start = -(-cursor.at // alignment) * alignment
    return _Part(path, version, metadata, {info.name: _stored(cursor, info, start + at) for at, info in found})


def _tensor_info(cursor: _Cursor, index: int) -> tuple[int, TensorInfo]:
    """The next tensor's entry, after the offset of its data from the start of all data."""
    name = cursor.text(f"the name of tensor {index}")
    what = f"tensor {name!r}"
    num_dims = cursor.u32(f"the number of dimensions of {what}")
    if num_dims > MAX_DIMS:
        cursor.fail(f"{what} has {num_dims} dimensions; at most {MAX_DIMS} are known")
    shape = tuple(cursor.u64(f"a dimension of {what}") for _ in range(num_dims))[::-1]
    if 0 in shape:
        cursor.fail(f"{what} has shape {list(shape)}, which holds nothing")
    id = cursor.u32(f"the type of {what}")
    offset = cursor.u64(f"the offset of {what}")

    type = _TYPE_NAMES.get(id)
    if type is None and id in _REMOVED:
        cursor.fail(f"{what} has ggml type {id} ({_REMOVED[id]}), which was removed from the format", _CONVERT)
    if type is None:
        cursor.fail(
            f"{what} has ggml type {id}, which is not known here",
            "Quantize the model to a known type, for example Q4_K_M; if the type is new, update inferax",
        )
    block, block_bytes = (TYPES[type].block, TYPES[type].block_bytes) if type in TYPES else (1, DTYPES[type].itemsize)
    row = shape[-1] if shape else 1
    if row % block:
        cursor.fail(f"{what} has rows of {row} weights, not a multiple of the {block} in a block of {type}")
    return offset, TensorInfo(name, shape, type, prod(shape) // block * block_bytes)


def _stored(cursor: _Cursor, info: TensorInfo, at: int) -> Stored:
    if info.nbytes > cursor.size - at:
        cursor.fail(
            f"the data of tensor {info.name!r} {list(info.shape)} {info.type} ends at offset {at + info.nbytes}, "
            f"and the file at {cursor.size}"
        )
    if info.type in DTYPES:
        shape, dtype = info.shape, DTYPES[info.type]
    else:
        known = TYPES[info.type]
        shape = (*info.shape[:-1], info.shape[-1] // known.block, known.block_bytes)
        dtype = np.dtype("u1")
    return Stored(info, cursor.file, np.ndarray(shape, dtype, cursor.data, at))


def _type_names() -> dict[int, str]:
    plain = {int(id): id.name for id in GGMLQuantizationType if id.name in DTYPES}
    return plain | {info.id: name for name, info in TYPES.items()}


_TYPE_NAMES: Mapping[int, str] = MappingProxyType(_type_names())
