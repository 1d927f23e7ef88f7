"""qwen3: Llama with a norm on each query and key head."""

from __future__ import annotations

from dataclasses import replace

from inferax.models import llama, qwen2
from inferax.models.config import ModelConfig
from inferax.models.family import Family
from inferax.models.readings import GGUFConfig, HFConfig, gguf_names, hf_names


def from_hf(c: HFConfig) -> ModelConfig:
    values = {"head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 32} | {
        k: v for k, v in c.values.items() if v is not None
    }
    c = HFConfig(values, c.file)
    return replace(llama.from_hf(c), family="qwen3", layers=qwen2.windowed_layers(c), qk_norm=True, mlp_bias=False)


def from_gguf(c: GGUFConfig) -> ModelConfig:
    return replace(llama.from_gguf(c), family="qwen3", qk_norm=True)


FAMILY = Family("qwen3", ("qwen3",), ("qwen3",), from_hf, from_gguf, lambda _: hf_names(), lambda _: gguf_names())
