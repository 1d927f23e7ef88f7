"""`ModelConfig`: everything a forward pass needs to know, as one frozen, hashable value."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp

from inferax.ops.cache import cache_shape
from inferax.ops.linear import Activation, Compute
from inferax.ops.rotary import RotarySpec


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer: the window (None: full attention) and which rotary (None: no positions)."""

    window: int | None = None
    rotary: int | None = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Widths are in elements, `context_length` in tokens."""

    family: str
    vocab_size: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    context_length: int
    layers: tuple[LayerSpec, ...]
    rotaries: tuple[RotarySpec, ...]
    norm_eps: float
    norm_kind: str = "rms"
    activation: Activation = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    post_norms: bool = False
    tied_head: bool = False
    attention_scale: float = 0.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    compute: Compute = "exact"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The cache groups: each distinct window once, full attention first. A group's index is its place here."""
        return tuple(sorted({layer.window for layer in self.layers}, key=lambda w: (w is not None, w or 0)))

    def group(self, layer: int) -> int:
        """The cache group of a layer."""
        return self.windows.index(self.layers[layer].window)

    @property
    def norms_per_layer(self) -> int:
        return 4 if self.post_norms else 2

    def kv_bytes_per_token(self, dtype: Any) -> int:
        """Bytes of a cache of `dtype` that one more token of context takes over all layers, windowed ones too."""
        row = cache_shape(1, 1, self.num_kv_heads, self.head_dim, dtype)
        return int(self.num_layers * prod(row) * jnp.dtype(dtype).itemsize)
