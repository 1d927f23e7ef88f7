"""From the tensors of a file to the params pytree, by a family's name table."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from inferax.errors import LoadError
from inferax.loaders.tensors import DTYPES, TensorInfo, TensorSource
from inferax.models.config import ModelConfig
from inferax.models.weights import NameTable, Part, WeightEntry, weight_entries
from inferax.ops.ggml import TYPES
from inferax.ops.packed import X16, Layout, PackedWeight, pack

# Tensors that files carry besides weights: buffers that the config already tells.
_IGNORED = ("*rotary_emb.inv_freq", "*.masked_bias", "rope_freqs.weight", "rope_factors_*.weight")

Progress = Callable[[int], object]


def load_params(
    config: ModelConfig,
    table: NameTable,
    source: TensorSource,
    file: Path,
    *,
    progress: Progress | None = None,
    dtype: Any = None,
    pack_for: str | None = None,
) -> dict[str, Any]:
    """The params of `config`, read one leaf at a time.

    pack_for: the platform in whose form packed weights are kept; None keeps the file's.
    Quantized tensors stay packed; floating matrices keep the file's dtype unless `dtype` is given; norms and biases
    become float32. `progress` is called with the bytes read since the last call.
    Raises one LoadError that lists every missing, unexpected and misshapen tensor.
    """
    entries = list(weight_entries(config))
    _check(config, entries, table, source, file)
    params: dict[str, Any] = {"layers": [{} for _ in config.layers]}
    for entry in entries:
        vectors = entry.vectors
        leaf = (
            _vectors(entry, config, table, source)
            if vectors
            else _matrix(entry, config, table, source, dtype, pack_for)
        )
        _place(params, entry.path, leaf)
        if progress is not None:
            progress(sum(source.tensors[_name(table, p)].nbytes for p in entry.parts))
    params["layers"] = tuple(params["layers"])
    return params


def abstract_params(
    config: ModelConfig,
    table: NameTable,
    source: TensorSource,
    file: Path,
    *,
    dtype: Any = None,
    pack_for: str | None = None,
) -> dict[str, Any]:
    """What `load_params` would give, as `jax.ShapeDtypeStruct`s. Only headers are read. Raises as it does."""
    entries = list(weight_entries(config))
    _check(config, entries, table, source, file)
    params: dict[str, Any] = {"layers": [{} for _ in config.layers]}
    for entry in entries:
        if entry.vectors:
            leaf: Any = jax.ShapeDtypeStruct(entry.shape, np.float32)
        else:
            runs: list[tuple[str, int]] = []
            for part in entry.parts:
                kind = _kind(source.tensors[_name(table, part)], dtype)
                before = runs.pop()[1] if runs and runs[-1][0] == kind else 0
                runs.append((kind, before + part.shape[0]))
            form = _form(entry, pack_for)
            leaves = tuple(_abstract(kind, rows, entry.shape[1], form) for kind, rows in runs)
            leaf = leaves[0] if len(leaves) == 1 else leaves
        _place(params, entry.path, leaf)
    params["layers"] = tuple(params["layers"])
    return params


def _kind(info: TensorInfo, dtype: Any) -> str:
    """What a tensor's leaf is made of: a ggml type that stays packed, or the name of a dtype."""
    if info.type in TYPES:
        return info.type
    return str(DTYPES[info.type] if dtype is None else np.dtype(dtype))


def _form(entry: WeightEntry, pack_for: str | None) -> str | None:
    # A tile must not reach across the parts of a fused weight.
    return None if any(part.shape[0] % 16 for part in entry.parts) else pack_for


def _abstract(kind: str, rows: int, width: int, pack_for: str | None) -> Any:
    if kind not in TYPES:
        return jax.ShapeDtypeStruct((rows, width), np.dtype(kind))
    layout = Layout(kind)
    blocks = width // layout.block
    data = jax.ShapeDtypeStruct((rows, blocks, layout.block_bytes), np.uint8)
    if pack_for == "cpu" and kind in X16 and rows % 16 == 0:
        data = jax.ShapeDtypeStruct((rows // 16, blocks, 16 * layout.block_bytes), np.uint8)
        layout = Layout(kind, "x16")
    return PackedWeight(data, layout)  # type: ignore[arg-type]


def _name(table: NameTable, part: Part) -> str:
    name = table[part.name].name
    return name if part.layer is None else name.format(i=part.layer)


def _check(
    config: ModelConfig, entries: Iterable[WeightEntry], table: NameTable, source: TensorSource, file: Path
) -> None:
    missing, misshapen, wanted = [], [], set()
    for entry in entries:
        for part in entry.parts:
            name = _name(table, part)
            wanted.add(name)
            info = source.tensors.get(name)
            if info is None:
                missing.append(name)
            elif info.shape != part.shape:
                misshapen.append(f"{name} is {_shape(info)}, expected {list(part.shape)}")
    if config.tied_head and "head" in table:
        wanted.add(table["head"].name)
    unexpected = sorted(
        name
        for name in source.tensors
        if name not in wanted and not any(fnmatch.fnmatch(name, pattern) for pattern in _IGNORED)
    )
    problems = []
    for kind, names in (("missing", missing), ("misshapen", misshapen), ("unexpected", unexpected)):
        if names:
            problems.append(f"{len(names)} {kind}: " + ", ".join(names))
    if problems:
        raise LoadError(
            file,
            f"its tensors do not fit a {config.family} model of {config.num_layers} layers: {'; '.join(problems)}",
            "The config and the weights must come from the same model; fetch it again, or mend the config.",
        )


def _shape(info: TensorInfo) -> str:
    return f"{list(info.shape)}"


def _read(part: Part, config: ModelConfig, table: NameTable, source: TensorSource) -> np.ndarray:
    array = source.read(_name(table, part))
    transform = table[part.name].transform
    return array if transform is None else transform(array, config)


def _matrix(
    entry: WeightEntry, config: ModelConfig, table: NameTable, source: TensorSource, dtype: Any, pack_for: str | None
) -> PackedWeight | jax.Array | tuple[PackedWeight | jax.Array, ...]:
    runs: list[tuple[str, list[np.ndarray]]] = []
    for part in entry.parts:
        kind = source.tensors[_name(table, part)].type
        array = _read(part, config, table, source)
        if kind not in TYPES:
            array = array if dtype is None else array.astype(dtype)
            kind = str(array.dtype)
        if runs and runs[-1][0] == kind:
            runs[-1][1].append(array)
        else:
            runs.append((kind, [array]))
    form = _form(entry, pack_for)
    leaves = tuple(_leaf(kind, arrays, form) for kind, arrays in runs)
    return leaves[0] if len(leaves) == 1 else leaves


def _leaf(kind: str, arrays: list[np.ndarray], pack_for: str | None) -> PackedWeight | jax.Array:
    joined = np.concatenate(arrays, axis=0) if len(arrays) > 1 else arrays[0]
    layout = Layout(kind) if kind in TYPES else None
    if layout is not None and pack_for is not None:
        packed = pack(PackedWeight(joined, layout), pack_for)  # type: ignore[arg-type]
        joined, layout = np.asarray(packed.data), packed.layout
    if joined is arrays[0]:
        joined = joined.copy()  # so that no leaf keeps the file's mapping alive
    array = jax.device_put(joined)  # not jnp.asarray, which compiles a program for each shape
    return array if layout is None else PackedWeight(array, layout)


def _vectors(entry: WeightEntry, config: ModelConfig, table: NameTable, source: TensorSource) -> jax.Array:
    out = np.zeros(entry.shape, np.float32)
    for part in entry.parts:
        *lead, start = part.at
        out[tuple(lead)][start : start + part.shape[0]] = _read(part, config, table, source).astype(np.float32)
    array: jax.Array = jax.device_put(out)
    return array


def _place(params: dict[str, Any], path: tuple[str | int, ...], leaf: Any) -> None:
    node: Any = params
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = leaf
