"""The weight table: one abstract entry per leaf of the params pytree, and where its parts stand in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from inferax.models.config import ModelConfig


@dataclass(frozen=True)
class Part:
    """One tensor of a file that goes into a leaf. `name` is what the families' name tables call it, `layer` which one.

    at: for vectors, where it stands in the leaf: leading indices and an offset into the last axis.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    at: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightEntry:
    """One leaf: its place in params, shape, logical axes, and parts.

    A matrix ([N, K], `vectors` False) stacks its parts along N and keeps their types; parts of different types stay
    side by side as a tuple. Vectors (norms, biases of all layers) are gathered into one float32 array.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    parts: tuple[Part, ...]
    vectors: bool = False


def weight_entries(config: ModelConfig) -> Iterator[WeightEntry]:
    """Every leaf of the params of `config`, in a fixed order."""
    c = config
    q, kv, d, f = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.width, c.mlp_width

    def matrix(path: tuple[str | int, ...], axes: tuple[str | None, ...], width: int, *parts: Part) -> WeightEntry:
        return WeightEntry(path, (sum(p.shape[0] for p in parts), width), axes, parts)

    yield matrix(("embed",), ("vocab", "embed"), d, Part("embed", None, (c.vocab_size, d)))
    if not c.tied_head:
        yield matrix(("head",), ("vocab", "embed"), d, Part("head", None, (c.vocab_size, d)))
    for i in range(c.num_layers):
        at = ("layers", i)
        yield matrix(
            (*at, "qkv"), ("heads", "embed"), d, Part("q", i, (q, d)), Part("k", i, (kv, d)), Part("v", i, (kv, d))
        )
        yield matrix((*at, "o"), ("embed", "heads"), q, Part("o", i, (d, q)))
        yield matrix((*at, "gate_up"), ("mlp", "embed"), d, Part("gate", i, (f, d)), Part("up", i, (f, d)))
        yield matrix((*at, "down"), ("embed", "mlp"), f, Part("down", i, (d, f)))

    kinds = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm") if c.post_norms else ("attn_norm", "mlp_norm")
    layers = range(c.num_layers)
    norms = [Part(kind, i, (d,), (i * len(kinds) + j, 0)) for i in layers for j, kind in enumerate(kinds)]
    norms.append(Part("final_norm", None, (d,), (len(norms), 0)))
    yield _vectors("norms", (len(norms), d), (None, "embed"), norms)
    if c.norm_kind == "layer":
        biases = [Part(p.name + "_bias", p.layer, p.shape, p.at) for p in norms]
        yield _vectors("norm_biases", (len(norms), d), (None, "embed"), biases)
    if c.qk_norm:
        e = c.head_dim
        heads = [Part(n, i, (e,), (i, j, 0)) for i in layers for j, n in enumerate(("q_norm", "k_norm"))]
        yield _vectors("qk_norms", (c.num_layers, 2, e), (None, None, None), heads)
    if c.qkv_bias:
        spans = (("q_bias", q, 0), ("k_bias", kv, q), ("v_bias", kv, q + kv))
        biases = [Part(n, i, (w,), (i, start)) for i in layers for n, w, start in spans]
        yield _vectors("qkv_bias", (c.num_layers, q + 2 * kv), (None, "heads"), biases)
    if c.o_bias:
        yield _vectors("o_bias", (c.num_layers, d), (None, "embed"), [Part("o_bias", i, (d,), (i, 0)) for i in layers])
    if c.mlp_bias:
        halves = (("gate_bias", 0), ("up_bias", f))
        biases = [Part(n, i, (f,), (i, start)) for i in layers for n, start in halves]
        yield _vectors("gate_up_bias", (c.num_layers, 2 * f), (None, "mlp"), biases)
        downs = [Part("down_bias", i, (d,), (i, 0)) for i in layers]
        yield _vectors("down_bias", (c.num_layers, d), (None, "embed"), downs)


def _vectors(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], parts: list[Part]) -> WeightEntry:
    return WeightEntry((name,), shape, axes, tuple(parts), vectors=True)


Transform = Callable[[np.ndarray, ModelConfig], np.ndarray]


@dataclass(frozen=True)
class FileTensor:
    """A tensor's name in a file, with `{i}` for the layer, and what turns its array into the part.

    A transform may only move rows (axis 0) of matrices, so that it works on packed blocks too.
    """

    name: str
    transform: Transform | None = None


NameTable = Mapping[str, FileTensor]


def names(table: Mapping[str, str], **transforms: Transform) -> dict[str, FileTensor]:
    """A name table from plain names, with transforms for some parts."""
    return {part: FileTensor(name, transforms.get(part)) for part, name in table.items()}


def parameter_count(config: ModelConfig) -> int:
    """How many numbers the params of `config` hold."""
    return sum(int(np.prod(p.shape)) for entry in weight_entries(config) for p in entry.parts)
