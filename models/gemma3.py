"""gemma3 (text): norms before and after each block, local layers with a window and a rotary of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from inferax.errors import LoadError
from inferax.models import llama
from inferax.models.config import LayerSpec, ModelConfig
from inferax.models.family import Family
from inferax.models.readings import HF_NAMES, GGUFConfig, HFConfig, gguf_names
from inferax.models.weights import NameTable, names

_LOCAL_THETA = 10000.0
_PATTERN = 6
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _with_local(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(layer.window, 0 if layer.window is None else 1) for layer in layers)


def from_hf(c: HFConfig) -> ModelConfig:
    c = HFConfig({**_DEFAULTS, **{k: v for k, v in c.values.items() if v is not None}}, c.file)
    if c.get("use_bidirectional_attention"):
        raise LoadError(c.file, "use_bidirectional_attention is set", "Only causal gemma3 models are supported.")
    pattern = c.integer("sliding_window_pattern", _PATTERN)
    rope = c.get("rope_parameters") or {}
    if "full_attention" in rope or "sliding_attention" in rope:
        full, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
        rotaries = (
            c.rotary(full, theta=full.get("rope_theta", 1e6)),
            c.rotary(local, theta=local.get("rope_theta", _LOCAL_THETA)),
        )
    else:
        scaling = c.get("rope_scaling") or {}
        rotaries = (
            c.rotary(scaling, theta=c.number("rope_theta", 1e6)),
            c.rotary({}, theta=c.number("rope_local_base_freq", _LOCAL_THETA)),
        )
    layers = c.layers(
        lambda i: "full_attention" if (i + 1) % pattern == 0 else "sliding_attention", c.integer("sliding_window")
    )
    base = llama.from_hf(c)
    return replace(
        base,
        family="gemma3",
        layers=_with_local(layers),
        rotaries=rotaries,
        activation=c.activation("hidden_activation", "gelu_pytorch_tanh"),
        qk_norm=True,
        post_norms=True,
        attention_scale=c.number("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=c.get("final_logit_softcapping"),
        embed_scale=_embed_scale(base.width),
    )


def _embed_scale(width: int) -> float:
    return float(np.float32(width**0.5))


def from_gguf(c: GGUFConfig) -> ModelConfig:
    base = llama.from_gguf(c)
    window = c.get("attention.sliding_window")
    count = c.integer("block_count")
    given = c.get("attention.sliding_window_pattern", _PATTERN)
    if isinstance(given, int | np.integer):
        local = [bool((i + 1) % int(given)) for i in range(count)]
    else:
        local = [bool(x) for x in given]
    if len(local) != count:
        raise LoadError(
            c.file, f"its sliding_window_pattern has {len(local)} entries for {count} layers", "They should agree."
        )
    layers = tuple(LayerSpec(int(window) if window and is_local else None) for is_local in local)
    # The file does not carry query_pre_attn_scalar: it is the head width, but for the 27B model D / H.
    width_per_head = base.width / base.num_heads
    return replace(
        base,
        family="gemma3",
        layers=_with_local(layers),
        rotaries=(
            c.rotary(theta=c.number("rope.freq_base", 1e6)),
            c.rotary(theta=c.number("rope.freq_base_swa", _LOCAL_THETA), scaled=False),
        ),
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        attention_scale=(width_per_head if base.num_layers == 62 else base.head_dim) ** -0.5,
        logit_softcap=c.get("final_logit_softcapping"),
        embed_scale=_embed_scale(base.width),
        tied_head=not c.has("output.weight"),
    )


def _one_plus(weight: np.ndarray, _: ModelConfig) -> np.ndarray:
    return weight.astype(np.float32) + np.float32(1)


def _hf_names(_: ModelConfig) -> NameTable:
    layer = "model.layers.{i}."
    table = {
        **HF_NAMES,
        "post_attn_norm": layer + "post_attention_layernorm.weight",
        "mlp_norm": layer + "pre_feedforward_layernorm.weight",
        "post_mlp_norm": layer + "post_feedforward_layernorm.weight",
    }
    norms = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "final_norm", "q_norm", "k_norm")
    return names(table, **dict.fromkeys(norms, _one_plus))


FAMILY = Family("gemma3", ("gemma3_text",), ("gemma3",), from_hf, from_gguf, _hf_names, lambda _: gguf_names())
