"""llama: Llama 2 and 3.x, SmolLM2, TinyLlama and their many finetunes."""

from __future__ import annotations

import numpy as np

from inferax.errors import LoadError
from inferax.models.config import LayerSpec, ModelConfig
from inferax.models.family import Family
from inferax.models.readings import GGUFConfig, HFConfig, gguf_names, hf_names
from inferax.models.weights import NameTable


def from_hf(c: HFConfig) -> ModelConfig:
    heads = c.integer("num_attention_heads")
    bias = bool(c.get("attention_bias", False))
    return ModelConfig(
        family="llama",
        vocab_size=c.integer("vocab_size"),
        width=c.integer("hidden_size"),
        num_heads=heads,
        num_kv_heads=c.integer("num_key_value_heads", heads),
        head_dim=c.head_dim(),
        mlp_width=c.integer("intermediate_size"),
        context_length=c.integer("max_position_embeddings", 2048),
        layers=c.layers(lambda _: "full_attention", None),
        rotaries=(c.rotary(),),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        activation=c.activation("hidden_act", "silu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(c.get("mlp_bias", False)),
        tied_head=bool(c.get("tie_word_embeddings", False)),
    )


def from_gguf(c: GGUFConfig) -> ModelConfig:
    if c.get("expert_count"):
        raise LoadError(
            c.file, f"it is a mixture of {c.get('expert_count')} experts", "Only dense llama files are supported."
        )
    heads = c.integer("attention.head_count")
    window = c.get("attention.sliding_window")
    return ModelConfig(
        family="llama",
        vocab_size=c.vocab_size(),
        width=c.integer("embedding_length"),
        num_heads=heads,
        num_kv_heads=c.integer("attention.head_count_kv", heads),
        head_dim=c.head_dim(),
        mlp_width=c.integer("feed_forward_length"),
        context_length=c.integer("context_length"),
        layers=(LayerSpec(int(window) if window else None),) * c.integer("block_count"),
        rotaries=(c.rotary(),),
        norm_eps=c.number("attention.layer_norm_rms_epsilon"),
        qkv_bias=c.has("blk.0.attn_q.bias"),
        o_bias=c.has("blk.0.attn_output.bias"),
        mlp_bias=c.has("blk.0.ffn_gate.bias"),
        tied_head=not c.has("output.weight"),
    )


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    # The file pairs neighbouring rows of a head for rotation; the decoder pairs row i with i + half.
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(rows.shape)


def _half_split_q(rows: np.ndarray, config: ModelConfig) -> np.ndarray:
    return _half_split(rows, config.num_heads)


def _half_split_k(rows: np.ndarray, config: ModelConfig) -> np.ndarray:
    return _half_split(rows, config.num_kv_heads)


def _gguf_names(_: ModelConfig) -> NameTable:
    return gguf_names(q=_half_split_q, k=_half_split_k, q_bias=_half_split_q, k_bias=_half_split_k)


FAMILY = Family("llama", ("llama",), ("llama",), from_hf, from_gguf, lambda _: hf_names(), _gguf_names)
