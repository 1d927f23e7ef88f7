"""What families share when they read a config.json or a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inferax.errors import LoadError
from inferax.models.config import LayerSpec
from inferax.models.weights import FileTensor, names
from inferax.ops.rotary import RotarySpec

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class HFConfig:
    """A config.json, with errors that name it. `text_config` is merged in where there is one."""

    values: Mapping[str, Any]
    file: str

    def need(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise LoadError(self.file, f"{key!r} is missing", "It should stand in the model's config.json.")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise LoadError(self.file, f"{key} is {value!r}", "It should be a positive integer.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise LoadError(self.file, f"{key} is {value!r}", "It should be a number.")
        return float(value)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def activation(self, key: str, default: str) -> Any:
        name = self.get(key, default)
        if name not in _ACTIVATIONS:
            raise LoadError(self.file, f"{key} is {name!r}", f"Known activations: {', '.join(sorted(_ACTIVATIONS))}.")
        return _ACTIVATIONS[name]

    def head_dim(self) -> int:
        heads, width = self.integer("num_attention_heads"), self.integer("hidden_size")
        if self.get("head_dim") is None and width % heads:
            raise LoadError(
                self.file, f"hidden_size {width} is not a multiple of num_attention_heads {heads}", "Set head_dim."
            )
        return self.integer("head_dim", width // heads)

    def rotary(self, scaling: Mapping[str, Any] | None = None, *, theta: float | None = None) -> RotarySpec:
        """The rotary of this config, or of one entry of its rope_parameters."""
        given = scaling if scaling is not None else self.get("rope_parameters") or self.get("rope_scaling") or {}
        base = theta or given.get("rope_theta") or self.number("rope_theta", 10000.0)
        part = float(given.get("partial_rotary_factor") or self.number("partial_rotary_factor", 1.0))
        kind = given.get("rope_type") or given.get("type") or "default"
        dim = int(self.head_dim() * part)
        context = self.integer("max_position_embeddings", 2048)
        spec = RotarySpec(dim=dim, theta=float(base), original_length=context)
        if kind in ("default", "mrope"):
            return spec

        def number(key: str, default: float | None = None) -> float:
            value = given.get(key)
            value = default if value is None else value
            if not isinstance(value, int | float):
                raise LoadError(self.file, f"rope scaling {kind!r} has {key} = {value!r}", f"{key} should be a number.")
            return float(value)

        if kind == "linear":
            return RotarySpec(dim=dim, theta=spec.theta, kind="linear", factor=number("factor"))
        if kind == "dynamic":
            return RotarySpec(
                dim=dim, theta=spec.theta, kind="dynamic", factor=number("factor"), original_length=context
            )
        top = self.values.get("original_max_position_embeddings")
        original = int(number("original_max_position_embeddings", float(top or context)))
        if kind == "llama3":
            return RotarySpec(
                dim=dim, theta=spec.theta, kind="llama3", factor=number("factor"), original_length=original,
                low_freq_factor=number("low_freq_factor"), high_freq_factor=number("high_freq_factor"),
            )  # fmt: skip
        if kind == "yarn":
            factor = number("factor", context / original)
            attention = given.get("attention_factor")
            if attention is None:
                mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
                attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if mscale and all_dim else None
            return RotarySpec(
                dim=dim, theta=spec.theta, kind="yarn", factor=factor, original_length=original,
                attention_factor=yarn_mscale(factor) if attention is None else float(attention),
                beta_fast=number("beta_fast", 32.0), beta_slow=number("beta_slow", 1.0),
                truncate=bool(given.get("truncate", True)),
            )  # fmt: skip
        if kind == "longrope":
            factors = {}
            for key in ("short_factor", "long_factor"):
                values = given.get(key)
                if not isinstance(values, list) or len(values) != dim // 2:
                    raise LoadError(self.file, f"longrope's {key} is not a list of {dim // 2} numbers", "Mend it.")
                factors[key] = tuple(float(v) for v in values)
            stretch = number("factor", context / original) if top is None else context / original
            attention = given.get("attention_factor")
            return RotarySpec(
                dim=dim, theta=spec.theta, kind="longrope", factor=stretch, original_length=original,
                attention_factor=longrope_mscale(stretch, original) if attention is None else float(attention),
                short_factors=factors["short_factor"], long_factors=factors["long_factor"],
            )  # fmt: skip
        known = "default, linear, dynamic, llama3, yarn, longrope"
        raise LoadError(self.file, f"rope type {kind!r} is unknown", f"Known: {known}.")

    def layers(self, default: Callable[[int], str], window: int | None) -> tuple[LayerSpec, ...]:
        """Layer specs from layer_types, or from `default(i)` where the config has none."""
        count = self.integer("num_hidden_layers")
        types = self.get("layer_types") or [default(i) for i in range(count)]
        if len(types) != count:
            raise LoadError(self.file, f"layer_types has {len(types)} entries for {count} layers", "They should agree.")
        known = {"full_attention": LayerSpec(None), "sliding_attention": LayerSpec(window)}
        for i, kind in enumerate(types):
            if kind not in known:
                raise LoadError(self.file, f"layer {i} has type {kind!r}", f"Known: {', '.join(known)}.")
        return tuple(known[kind] for kind in types)


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """The attention temperature of YaRN (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def longrope_mscale(factor: float, original_length: int) -> float:
    """The attention factor of LongRoPE as Phi-3 uses it."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))


@dataclass(frozen=True)
class GGUFConfig:
    """A GGUF file's metadata under its architecture's prefix, with errors that name the file."""

    metadata: Mapping[str, Any]
    file: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray] = field(repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value <= 0:
            full = f"{self.architecture}.{key}"
            problem = f"metadata {full!r} is missing" if value is None else f"metadata {full!r} is {value!r}"
            raise LoadError(self.file, problem, "It should be a positive integer.")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise LoadError(self.file, f"metadata '{self.architecture}.{key}' is {value!r}", "It should be a number.")
        return float(value)

    def has(self, tensor: str) -> bool:
        return tensor in self.shapes

    def vocab_size(self) -> int:
        if "token_embd.weight" not in self.shapes:
            raise LoadError(self.file, "tensor 'token_embd.weight' is missing", "Every decoder's file has it.")
        return self.shapes["token_embd.weight"][0]

    def head_dim(self) -> int:
        default = self.integer("embedding_length") // self.integer("attention.head_count")
        return self.integer("attention.key_length", default)

    def rotary(self, *, theta: float | None = None, scaled: bool = True) -> RotarySpec:
        base = theta or self.number("rope.freq_base", 10000.0)
        dim = self.integer("rope.dimension_count", self.head_dim())
        context = self.integer("context_length")
        original = self.integer("rope.scaling.original_context_length", context)
        if not scaled:
            return RotarySpec(dim=dim, theta=base)
        if self.has("rope_freqs.weight"):
            factors = tuple(float(x) for x in self.read("rope_freqs.weight"))
            return RotarySpec(dim=dim, theta=base, freq_factors=self._checked("rope_freqs.weight", factors, dim))
        if self.has("rope_factors_long.weight"):
            both = {}
            for which in ("short", "long"):
                name = f"rope_factors_{which}.weight"
                values = tuple(float(x) for x in self.read(name)) if self.has(name) else ()
                both[which] = self._checked(name, values, dim)
            default = longrope_mscale(context / original, original)
            return RotarySpec(
                dim=dim, theta=base, kind="longrope", factor=context / original, original_length=original,
                attention_factor=self.number("rope.scaling.attn_factor", default),
                short_factors=both["short"], long_factors=both["long"],
            )  # fmt: skip
        kind = self.get("rope.scaling.type", "none")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        if kind == "yarn":
            # The file's factor comes on top of the temperature that the scaling itself implies.
            return RotarySpec(
                dim=dim, theta=base, kind="yarn", factor=factor, original_length=original,
                attention_factor=yarn_mscale(factor) * self.number("rope.scaling.attn_factor", 1.0),
                beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            )  # fmt: skip
        if kind == "linear" or (kind == "none" and factor != 1.0):
            return RotarySpec(dim=dim, theta=base, kind="linear", factor=factor)
        if kind in ("none", "longrope"):
            return RotarySpec(dim=dim, theta=base)
        raise LoadError(
            self.file, f"rope scaling type {kind!r} is unknown", "Known: none, linear, yarn, longrope, rope_freqs."
        )

    def _checked(self, name: str, values: tuple[float, ...], dim: int) -> tuple[float, ...]:
        if len(values) != dim // 2:
            raise LoadError(self.file, f"tensor {name!r} has {len(values)} elements", f"It should have {dim // 2}.")
        return values


HF_NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    **{p: f"model.layers.{{i}}.self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"{p}_bias": f"model.layers.{{i}}.self_attn.{p}_proj.bias" for p in "qkvo"},
    **{f"{p}_norm": f"model.layers.{{i}}.self_attn.{p}_norm.weight" for p in "qk"},
    **{p: f"model.layers.{{i}}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
    **{f"{p}_bias": f"model.layers.{{i}}.mlp.{p}_proj.bias" for p in ("gate", "up", "down")},
}

GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
    "attn_norm": "blk.{i}.attn_norm.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "post_attn_norm": "blk.{i}.post_attention_norm.weight",
    "post_mlp_norm": "blk.{i}.post_ffw_norm.weight",
    **{p: f"blk.{{i}}.attn_{p}.weight" for p in "qkv"},
    **{f"{p}_bias": f"blk.{{i}}.attn_{p}.bias" for p in "qkv"},
    **{f"{p}_norm": f"blk.{{i}}.attn_{p}_norm.weight" for p in "qk"},
    "o": "blk.{i}.attn_output.weight",
    "o_bias": "blk.{i}.attn_output.bias",
    **{p: f"blk.{{i}}.ffn_{p}.weight" for p in ("gate", "up", "down")},
    **{f"{p}_bias": f"blk.{{i}}.ffn_{p}.bias" for p in ("gate", "up", "down")},
}


def hf_names(**transforms: Any) -> dict[str, FileTensor]:
    """The usual names in safetensors files."""
    return names(HF_NAMES, **transforms)


def gguf_names(**transforms: Any) -> dict[str, FileTensor]:
    """The usual names in GGUF files."""
    return names(GGUF_NAMES, **transforms)
