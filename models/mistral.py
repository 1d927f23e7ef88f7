"""mistral: Mistral 7B and its finetunes; Llama with an optional sliding window. Its GGUF files say "llama"."""

from __future__ import annotations

from dataclasses import replace

from inferax.models import llama
from inferax.models.config import LayerSpec, ModelConfig
from inferax.models.family import Family
from inferax.models.readings import HFConfig, hf_names


def from_hf(c: HFConfig) -> ModelConfig:
    # An explicit null switches the window off; a config that leaves the key out has the original model's.
    window = c.values["sliding_window"] if "sliding_window" in c.values else 4096
    base = llama.from_hf(c)
    return replace(
        base,
        family="mistral",
        num_kv_heads=c.integer("num_key_value_heads", 8),
        context_length=c.integer("max_position_embeddings", 4096 * 32),
        layers=(LayerSpec(window),) * base.num_layers,
    )


FAMILY = Family("mistral", ("mistral",), (), from_hf, llama.from_gguf, lambda _: hf_names(), llama.FAMILY.gguf_names)
