"""Safetensors checkpoints: one file, or shards with an index.

The safetensors library decides whether a file is valid. Its own numpy view copies every tensor and does not know
float8, so the header of a valid file is read here, and the tensors are views of the mapped file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from inferax.errors import LoadError
from inferax.loaders.tensors import DTYPES, FETCH_AGAIN, MappedTensors, Stored, TensorInfo, map_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# Without the types of 4 and 6 bits (F4, F6_E2M3, F6_E3M2), several of which share a byte.
_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        **DTYPES,
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
        "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
        "U8": np.dtype("u1"),
        "U16": np.dtype("<u2"),
        "U32": np.dtype("<u4"),
        "U64": np.dtype("<u8"),
        "BOOL": np.dtype("?"),
        "C64": np.dtype("<c8"),
    }
)
_TO_SAFETENSORS = (
    "Convert it where you trust it, for example with transformers: "
    "AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW_DIRECTORY)"
)


class SafetensorsDir(MappedTensors):
    """An open safetensors checkpoint; a `TensorSource`. `TensorInfo.type` is the file's own name ("BF16")."""


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsDir:
    """Maps the tensors of a safetensors file, of an index file's shards, or of a checkpoint directory.

    In a directory, model.safetensors is taken, else the shards of model.safetensors.index.json, else the only
    .safetensors file. Files that the index does not name are not read. Raises LoadError, naming the file, if anything
    is missing or broken, or if there are only pickle files.
    """
    given = Path(path)
    if not given.is_dir():
        return _open_index(given) if given.name.endswith(".index.json") else _open_files((given,), {})
    try:
        names = sorted(p.name for p in given.iterdir())
    except OSError as e:
        raise LoadError(given, f"the directory cannot be read ({e})", "Check its permissions and the disk") from e
    if SINGLE in names:
        return _open_files((given / SINGLE,), {})
    if INDEX in names:
        return _open_index(given / INDEX)
    weights = [n for n in names if n.endswith(".safetensors")]
    if len(weights) == 1:
        return _open_files((given / weights[0],), {})
    if weights:
        problem = f"it holds {len(weights)} .safetensors files ({_some(weights)}) and no {INDEX}"
        raise LoadError(given, problem, f"Put the {INDEX} of the checkpoint beside them, or name one of the files")
    pickles = [n for n in names if n.endswith(PICKLES)]
    if pickles:
        problem = (
            f"the weights are in pickle files ({_some(pickles)}), which inferax never reads: they can run any code"
        )
        raise LoadError(given, problem, _TO_SAFETENSORS)
    raise LoadError(given, "there are no weights in it", f"It should hold {SINGLE}, or {INDEX} and its shards")


def _open_index(index: Path) -> SafetensorsDir:
    weight_map = _weight_map(index)
    shards = sorted(set(weight_map.values()))
    missing = [s for s in shards if not (index.parent / s).exists()]
    if missing:
        problem = f"this shard is missing{f', and {len(missing) - 1} more' if len(missing) > 1 else ''}"
        raise LoadError(index.parent / missing[0], problem, f"Fetch every file that {index.name} names")
    return _open_files(tuple(index.parent / s for s in shards), weight_map)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        content = json.loads(map_file(index)[:])
    except (ValueError, RecursionError) as e:
        raise LoadError(index, f"it is not valid JSON ({e})", FETCH_AGAIN) from e
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(index, "it has no weight_map from tensor names to files", FETCH_AGAIN)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            problem = f"it places tensor {name!r} in {shard!r}, which is not the name of a file beside it"
            raise LoadError(index, problem, "Let the weight_map name only files in the same directory")
        if not shard.endswith(".safetensors"):
            problem = f"it places tensor {name!r} in {shard!r}, which is not a .safetensors file"
            raise LoadError(index, problem, _TO_SAFETENSORS)
    return weight_map


def _open_files(files: tuple[Path, ...], weight_map: Mapping[str, str]) -> SafetensorsDir:
    stored: dict[str, Stored] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if weight_map.get(name, file.name) != file.name:
                continue  # the index takes it from another shard
            if name in stored:
                problem = f"tensor {name!r} is in {stored[name].file.name} too, and the index names neither"
                raise LoadError(file, problem, FETCH_AGAIN)
            stored[name] = tensor
    absent = [name for name in weight_map if name not in stored]
    if absent:
        shard = files[0].with_name(weight_map[absent[0]])
        raise LoadError(shard, f"the index places tensors in it that it lacks ({_some(absent)})", FETCH_AGAIN)
    return SafetensorsDir(files, stored)


def _read_file(file: Path) -> dict[str, Stored]:
    if file.suffix in PICKLES:
        problem = "this is a pickle file, which inferax never reads: it can run any code"
        raise LoadError(file, problem, _TO_SAFETENSORS)
    data = map_file(file)
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as e:
        raise LoadError(file, f"it is not a valid safetensors file ({e})", FETCH_AGAIN) from e
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, dict[str, Any]] = json.loads(data[8:start])
    header.pop("__metadata__", None)
    stored = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), _DTYPES.get(entry["dtype"])
        array = None
        if dtype is not None:
            array = np.frombuffer(data, dtype, prod(shape), start + begin) if end > begin else np.empty(0, dtype)
            try:
                array = array.reshape(shape)
            except ValueError as e:
                problem = f"tensor {name!r} has a shape that no array can have: {list(shape)} ({e})"
                raise LoadError(file, problem, FETCH_AGAIN) from e
        stored[name] = Stored(TensorInfo(name, shape, entry["dtype"], end - begin), file, array)
    return stored


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
