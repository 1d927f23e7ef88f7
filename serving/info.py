"""What a model is, from its headers: the weights are not read."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from inferax.errors import InferaxError
from inferax.loaders.config import config_json, gguf_config, hf_config
from inferax.loaders.gguf import open_gguf
from inferax.loaders.safetensors import open_safetensors
from inferax.loaders.sources import resolve
from inferax.loaders.template import load_template, template_from_gguf
from inferax.loaders.tensors import MappedTensors
from inferax.loaders.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from inferax.models.config import ModelConfig
from inferax.models.weights import parameter_count
from inferax.serving.text import printable, with_unit


@dataclass(frozen=True)
class TypeShare:
    """The tensors of one type in a file."""

    type: str
    tensors: int
    weights: int
    bytes: int


@dataclass(frozen=True)
class TokenizerInfo:
    """kind: the algorithm, and where the file names them, its vocabulary's model and pre-tokenizer."""

    kind: str
    size: int
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    unk: int | None
    adds_bos: bool


@dataclass(frozen=True)
class ModelInfo:
    """What `inferax info` says; `--json` prints these fields. Sizes are in bytes, lengths in tokens.

    windows: the layers in order, as (window or None for full attention, how many in a row). tokenizer, chat_template:
    None where the model has none or a broken one; `problems` says what is wrong.
    """

    source: str
    files: Mapping[str, int]
    format: str
    name: str | None
    architecture: str
    family: str
    parameters: int
    types: tuple[TypeShare, ...]
    weight_bytes: int
    kv_bytes_per_token: Mapping[str, int]
    context_length: int
    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[tuple[int | None, int], ...]
    tied_head: bool
    tokenizer: TokenizerInfo | None
    chat_template: str | None
    problems: tuple[str, ...]


def info(args: Namespace) -> int:
    """The command: prints what the model is and returns the exit code."""
    from inferax.serving.session import shows_progress

    found = describe(resolve(args.model, progress=shows_progress(args), revision=args.revision))
    print(json.dumps(asdict(found), indent=2, ensure_ascii=False) if args.json else printable(_table(found)))
    return 0


def describe(path: Path) -> ModelInfo:
    """Reads the headers of a GGUF file or of a model folder. Raises LoadError for one that cannot be loaded."""
    problems: list[str] = []

    def attempt(read: Any, *where: Any) -> Any:
        try:
            return read(*where)
        except InferaxError as error:
            problems.append(str(error))
            return None

    if path.is_file():
        with open_gguf(path) as file:
            meta = file.metadata
            config = gguf_config(file, path)
            tokenizer = attempt(tokenizer_from_gguf, meta, path)
            template = attempt(template_from_gguf, meta, path)
            kind = " ".join(str(meta[k]) for k in ("tokenizer.ggml.model", "tokenizer.ggml.pre") if k in meta)
            name, format, architecture = meta.get("general.name"), f"GGUF v{file.version}", file.architecture
            tensors: MappedTensors = file
    else:
        with open_safetensors(path) as tensors:
            config = hf_config(path)
            tokenizer = attempt(load_tokenizer, path)
            template = attempt(load_template, path)
            kind, name, format = "", None, "safetensors"
            architecture = config_json(path)["model_type"]
    return ModelInfo(
        source=str(path),
        files={file.name: file.stat().st_size for file in tensors.files},
        format=format,
        name=name if isinstance(name, str) else None,
        architecture=architecture,
        family=config.family,
        parameters=parameter_count(config),
        types=_types(tensors),
        weight_bytes=sum(t.nbytes for t in tensors.tensors.values()),
        kv_bytes_per_token={name: config.kv_bytes_per_token(name) for name in ("bfloat16", "float32")},
        context_length=config.context_length,
        layers=config.num_layers,
        width=config.width,
        mlp_width=config.mlp_width,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        windows=_windows(config),
        tied_head=config.tied_head,
        tokenizer=None if tokenizer is None else _tokenizer(tokenizer, kind),
        chat_template=None if template is None else template.source,
        problems=tuple(problems),
    )


def _types(source: MappedTensors) -> tuple[TypeShare, ...]:
    tensors = sorted(source.tensors.values(), key=lambda t: t.type)
    shares = []
    for kind, group in groupby(tensors, key=lambda t: t.type):
        same = list(group)
        shares.append(TypeShare(kind, len(same), sum(prod(t.shape) for t in same), sum(t.nbytes for t in same)))
    return tuple(sorted(shares, key=lambda share: -share.bytes))


def _windows(config: ModelConfig) -> tuple[tuple[int | None, int], ...]:
    return tuple((window, len(list(run))) for window, run in groupby(layer.window for layer in config.layers))


def _tokenizer(t: Tokenizer, kind: str) -> TokenizerInfo:
    algorithm = type(t.backend.model).__name__
    kind = f"{algorithm} ({kind})" if kind else algorithm
    return TokenizerInfo(kind, t.vocab_size, t.bos_id, t.eos_ids, t.pad_id, t.unk_id, t.add_bos)


def _table(m: ModelInfo) -> str:
    bf16, f32 = m.kv_bytes_per_token["bfloat16"], m.kv_bytes_per_token["float32"]
    rows = [
        ("model", m.name or Path(m.source).name),
        *(("file", f"{name}, {with_unit(size)}") for name, size in m.files.items()),
        ("folder", str(Path(m.source).parent if m.format.startswith("GGUF") else m.source)),
        ("format", m.format),
        ("architecture", m.architecture if m.architecture == m.family else f"{m.architecture}, read as {m.family}"),
        ("parameters", f"{m.parameters:,}"),
        ("weights", f"{with_unit(m.weight_bytes)}, {8 * m.weight_bytes / m.parameters:.2f} bits per parameter"),
        *(("", f"{s.type}: {s.tensors} tensors, {s.weights:,} weights, {with_unit(s.bytes)}") for s in m.types),
        ("context", f"{m.context_length:,} tokens"),
        ("KV cache", f"per token {with_unit(bf16)} in bfloat16, {with_unit(f32)} in float32"),
        ("", f"full context {with_unit(bf16 * m.context_length)}, {with_unit(f32 * m.context_length)}"),
        ("layers", f"{m.layers} of width {m.width}, MLP {m.mlp_width}"),
        ("attention", f"{m.heads} heads over {m.kv_heads} KV heads, each {m.head_dim} wide; {_spans(m)}"),
        ("vocabulary", f"{m.vocab_size:,}, {'head tied to the embedding' if m.tied_head else 'head of its own'}"),
        ("tokenizer", "none" if m.tokenizer is None else f"{m.tokenizer.kind}, {m.tokenizer.size:,} tokens"),
    ]
    if m.tokenizer is not None:
        t = m.tokenizer
        ids = {"BOS": t.bos, "EOS": " ".join(map(str, t.eos)) or None, "PAD": t.pad, "UNK": t.unk}
        named = ", ".join(f"{name} {'none' if value is None else value}" for name, value in ids.items())
        rows.append(("", named + (", BOS goes before a text" if t.adds_bos else "")))
    first, *more = (m.chat_template or "").strip().splitlines() or [""]
    shown = first if len(first) <= 80 else first[:79] + "…"
    rows.append(("template", "none" if m.chat_template is None else f"yes, {1 + len(more)} lines: {shown}"))
    rows += [("problem", problem) for problem in m.problems]
    return "\n".join(f"{label:<14}{' '.join(value.split())}" for label, value in rows)


def _spans(m: ModelInfo) -> str:
    counts: dict[int | None, int] = {}
    for window, count in m.windows:
        counts[window] = counts.get(window, 0) + count
    spans = [f"{n} layers {'in full' if w is None else f'in a window of {w:,} tokens'}" for w, n in counts.items()]
    return ", ".join(spans)
