"""`Model` and `load`: the pure door. A model is a config, a params pytree and a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, Float32, Int32

from inferax.errors import LoadError
from inferax.loaders.config import config_json, gguf_config, hf_config
from inferax.loaders.gguf import open_gguf
from inferax.loaders.params import abstract_params, load_params
from inferax.loaders.progress import progress_class
from inferax.loaders.safetensors import open_safetensors
from inferax.loaders.sources import resolve
from inferax.loaders.template import ChatTemplate, load_template, template_from_gguf
from inferax.loaders.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from inferax.models import decoder
from inferax.models.config import ModelConfig
from inferax.models.decoder import Params, Tap
from inferax.models.families import family_of_gguf, family_of_hf
from inferax.ops.linear import Compute

OnHeaders = Callable[[ModelConfig, Params], object]


@dataclass(frozen=True)
class Model:
    """A loaded model. `apply` is pure: it can be jitted, differentiated with respect to float params, and vmapped."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    template: ChatTemplate | None
    source: Path

    def apply(
        self,
        params: Params,
        tokens: Int32[Array, "B L"],
        *,
        positions: Int32[Array, "B J"] | None = None,
        compute: Compute = "exact",
        tap: Tap | None = None,
    ) -> Float32[Array, "B L V"]:
        """Logits at every position, or [B, J, V] at `positions` only.

        `tap(name, value)` sees and may replace named activations (models/decoder.py).
        """
        return decoder.apply(replace(self.config, compute=compute), params, tokens, positions=positions, tap=tap)


def load(
    source: str | os.PathLike[str] | None = None,
    *,
    dtype: Any = None,
    revision: str | None = None,
    progress: bool = False,
    pack_for: str | None = None,
    on_headers: OnHeaders | None = None,
) -> Model:
    """Loads a model from a path, a Hugging Face id, or (None) the built-in default model.

    pack_for: "cpu" keeps packed weights in the form that its kernels read fastest; the same bytes in another order.
    dtype: converts floating matrices; packed ones stay packed. progress: bars on stderr while fetching and reading.
    on_headers: called before any weight is read, with the config and the params as `jax.ShapeDtypeStruct`s.
    Raises LoadError or SourceError, naming the file, what is wrong with it, and the remedy.
    """
    path = resolve(source, progress=progress, revision=revision)
    bar = progress_class(progress)(desc="Loading", unit="B", unit_scale=True, leave=False)
    with bar:
        if path.suffix == ".gguf":
            return _load_gguf(path, dtype, pack_for, on_headers, bar)
        return _load_safetensors(path, dtype, pack_for, on_headers, bar)


def read_headers(path: Path, *, dtype: Any = None, pack_for: str | None = None) -> tuple[ModelConfig, Params]:
    """What `load` would give to `on_headers`, and nothing more. path: as `resolve` gives it."""
    if path.suffix == ".gguf":
        with open_gguf(path) as file:
            config = gguf_config(file, path)
            table = family_of_gguf(file.architecture, str(path)).gguf_names(config)
            return config, abstract_params(config, table, file, path, dtype=dtype, pack_for=pack_for)
    config = hf_config(path)
    table = family_of_hf(config_json(path).get("model_type"), str(path)).hf_names(config)
    with open_safetensors(path) as source:
        return config, abstract_params(config, table, source, path, dtype=dtype, pack_for=pack_for)


def _load_gguf(path: Path, dtype: Any, pack_for: str | None, on_headers: OnHeaders | None, bar: Any) -> Model:
    file = open_gguf(path)
    try:
        config = gguf_config(file, path)
        table = family_of_gguf(file.architecture, str(path)).gguf_names(config)
        tokenizer = tokenizer_from_gguf(file.metadata, path)
        template = template_from_gguf(file.metadata, path)
        bar.total = sum(info.nbytes for info in file.tensors.values())
        if on_headers is not None:
            on_headers(config, abstract_params(config, table, file, path, dtype=dtype, pack_for=pack_for))
        params = load_params(config, table, file, path, progress=bar.update, dtype=dtype, pack_for=pack_for)
    finally:
        file.close()
    return _checked(Model(config, params, tokenizer, template, path))


def _load_safetensors(path: Path, dtype: Any, pack_for: str | None, on_headers: OnHeaders | None, bar: Any) -> Model:
    config = hf_config(path)
    table = family_of_hf(config_json(path).get("model_type"), str(path)).hf_names(config)
    source = open_safetensors(path)
    try:
        tokenizer = load_tokenizer(path)
        template = load_template(path)
        bar.total = sum(info.nbytes for info in source.tensors.values())
        if on_headers is not None:
            on_headers(config, abstract_params(config, table, source, path, dtype=dtype, pack_for=pack_for))
        params = load_params(config, table, source, path, progress=bar.update, dtype=dtype, pack_for=pack_for)
    finally:
        source.close()
    return _checked(Model(config, params, tokenizer, template, path))


def _checked(model: Model) -> Model:
    # A few ids past the embedding are tokens of other modalities (Gemma 3 has one); the engine refuses them when used.
    if model.tokenizer.vocab_size > model.config.vocab_size + 256:
        raise LoadError(
            model.source,
            f"the tokenizer has {model.tokenizer.vocab_size} tokens, the model's embedding {model.config.vocab_size}",
            "The tokenizer and the weights must come from the same model.",
        )
    return model


def weight_bytes(params: Params) -> int:
    """Bytes of all weight leaves."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(params))
