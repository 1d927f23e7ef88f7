"""Ops against torch and transformers, which define what the models' own code computes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.shapes import PREFILL, SMOLLM2_135M
from inferax.ops.attention import AttentionSpec, attention
from inferax.ops.linear import linear
from inferax.ops.norm import Norm, norm
from inferax.ops.rotary import rotate
from tests.ops.batches import paged

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_norms(eps: float) -> None:
    x, w, b = normal(5, 96) * 3 + 1, normal(96), normal(96)
    tensors = [torch.from_numpy(a) for a in (x, w, b)]
    rms = torch.nn.functional.rms_norm(tensors[0], (96,), tensors[1], eps)
    np.testing.assert_allclose(norm(jnp.asarray(x), Norm(jnp.asarray(w), eps=eps)), rms, rtol=1e-5, atol=1e-6)
    layer = torch.nn.functional.layer_norm(tensors[0], (96,), tensors[1], tensors[2], eps)
    weights = Norm(jnp.asarray(w), jnp.asarray(b), eps=eps, kind="layer")
    np.testing.assert_allclose(norm(jnp.asarray(x), weights), layer, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("relu", torch.nn.functional.relu),
    ],
)
def test_activations(name: str, function: torch.nn.Module) -> None:
    x = np.linspace(-12, 12, 481, dtype=np.float32)[:, None]
    got = linear(jnp.asarray(x), jnp.ones((1, 1)), activation=name)  # type: ignore[arg-type]
    np.testing.assert_allclose(got, function(torch.from_numpy(x)), rtol=1e-5, atol=1e-6)


def test_rotate() -> None:
    x = normal(7, 3, 32)
    angles = normal(7, 16)
    both = torch.from_numpy(np.concatenate([angles, angles], axis=-1))
    want, _ = apply_rotary_pos_emb(torch.from_numpy(x), torch.from_numpy(x), both.cos(), both.sin())
    np.testing.assert_allclose(rotate(jnp.asarray(x), jnp.cos(angles), jnp.sin(angles)), want, rtol=1e-5, atol=1e-6)


# Protects: head order, grouping and causality as torch has them.
def test_attention() -> None:
    m = SMOLLM2_135M
    layout = paged(PREFILL, num_kv_heads=m.num_kv_heads, head_dim=m.head_dim, spare_rows=0)
    tokens = PREFILL.num_tokens
    qkv = normal(tokens, m.qkv_width)
    spec = AttentionSpec(m.num_heads, m.num_kv_heads, m.head_dim, scale=0.2)
    got, _ = attention(jnp.asarray(qkv), layout.cache, layout.batch, spec)
    widths = [m.num_heads * m.head_dim] + [m.num_kv_heads * m.head_dim] * 2
    q, k, v = (
        part.reshape(tokens, -1, m.head_dim).transpose(0, 1) for part in torch.from_numpy(qkv).split(widths, dim=1)
    )
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    np.testing.assert_allclose(got, want.transpose(0, 1).reshape(tokens, -1), rtol=1e-4, atol=1e-5)
