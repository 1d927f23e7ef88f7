"""qwen2: Qwen2 and Qwen2.5; Llama with biases on Q, K and V."""

from __future__ import annotations

from dataclasses import replace

from inferax.models import llama
from inferax.models.config import LayerSpec, ModelConfig
from inferax.models.family import Family
from inferax.models.readings import GGUFConfig, HFConfig, gguf_names, hf_names


def windowed_layers(c: HFConfig) -> tuple[LayerSpec, ...]:
    """Layers from max_window_layers on have the window, where use_sliding_window says so."""
    window = c.integer("sliding_window", 4096) if c.get("use_sliding_window", False) else None
    first = int(c.get("max_window_layers", 28))

    def kind(i: int) -> str:
        return "sliding_attention" if window is not None and i >= first else "full_attention"

    return c.layers(kind, window)


def from_hf(c: HFConfig) -> ModelConfig:
    return replace(
        llama.from_hf(c),
        family="qwen2",
        num_kv_heads=c.integer("num_key_value_heads", 32),
        context_length=c.integer("max_position_embeddings", 32768),
        layers=windowed_layers(c),
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
    )


def from_gguf(c: GGUFConfig) -> ModelConfig:
    return replace(llama.from_gguf(c), family="qwen2")


FAMILY = Family("qwen2", ("qwen2",), ("qwen2",), from_hf, from_gguf, lambda _: hf_names(), lambda _: gguf_names())
