"""`linear`, `gated_mlp` and `embed`: products with dense or packed weights.

The meaning of `linear` is `x @ dequantize(w).T` in float32; no rounding enters a reference.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from inferax.ops.norm import Norm, norm_reference
from inferax.ops.op import Op
from inferax.ops.packed import PackedWeight, canonical, dequantize

Compute = Literal["exact", "fast"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
# A weight [N, K]; a tuple holds the row ranges of one fused weight whose parts differ in type.
Weight = Float[Array, "N K"] | PackedWeight
FusedWeight = Weight | tuple[Weight, ...]

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def parts(w: FusedWeight) -> tuple[Weight, ...]:
    """The row ranges of a fused weight."""
    return w if isinstance(w, tuple) else (w,)


def out_width(w: FusedWeight) -> int:
    """N, over all parts."""
    return sum(int(p.shape[0]) for p in parts(w))


def in_width(w: FusedWeight) -> int:
    """K."""
    return int(parts(w)[0].shape[1])


def dense(w: Weight) -> Float32[Array, "N K"]:
    """The weight's values in float32."""
    return dequantize(w) if isinstance(w, PackedWeight) else w.astype(jnp.float32)


def matmul_reference(x: Float[Array, "T K"], w: FusedWeight) -> Float32[Array, "T N"]:
    x = x.astype(jnp.float32)
    outs = [jax.lax.dot_general(x, dense(p), (((1,), (1,)), ((), ())), precision="highest") for p in parts(w)]
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=-1)


def _finish(
    y: Float32[Array, "T N"], residual: Float[Array, "T N"] | None, post_norm: Norm | None, scale: float
) -> Float32[Array, "T N"]:
    if post_norm is not None:
        y = norm_reference(y, post_norm)
    if scale != 1.0:
        y = y * jnp.float32(scale)
    return y if residual is None else residual.astype(jnp.float32) + y


def linear_reference(
    x: Float[Array, "T K"],
    w: FusedWeight,
    norm: Norm | None,
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "T N"] | None,
    post_norm: Norm | None,
    count: Int32[Array, ""] | None = None,
    *,
    activation: Activation | None,
    scale: float,
    compute: Compute,
) -> Float32[Array, "T N"]:
    del compute, count
    y = matmul_reference(x if norm is None else norm_reference(x, norm), w)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return _finish(y, residual, post_norm, scale)


def gated_mlp_reference(
    x: Float[Array, "T D"],
    gate_up: FusedWeight,
    down: FusedWeight,
    norm: Norm | None,
    gate_up_bias: Float[Array, " F2"] | None,
    down_bias: Float[Array, " D"] | None,
    residual: Float[Array, "T D"] | None,
    post_norm: Norm | None,
    count: Int32[Array, ""] | None = None,
    *,
    activation: Activation,
    scale: float,
    compute: Compute,
) -> Float32[Array, "T D"]:
    del compute, count
    h = matmul_reference(x if norm is None else norm_reference(x, norm), gate_up)
    if gate_up_bias is not None:
        h = h + gate_up_bias.astype(jnp.float32)
    gate, up = jnp.split(h, 2, axis=-1)
    y = matmul_reference(ACTIVATIONS[activation](gate) * up, down)
    if down_bias is not None:
        y = y + down_bias.astype(jnp.float32)
    return _finish(y, residual, post_norm, scale)


def embed_reference(ids: Int32[Array, " T"], w: Weight, *, scale: float) -> Float32[Array, "T D"]:
    if isinstance(w, PackedWeight):
        w = canonical(w)
        rows = dequantize(PackedWeight(w.data[ids], w.layout))
    else:
        rows = w[ids].astype(jnp.float32)
    return rows if scale == 1.0 else rows * jnp.float32(scale)


_linear = Op("linear", linear_reference, rows=(0, 4), hints=(6,))
_gated_mlp = Op("gated_mlp", gated_mlp_reference, rows=(0, 6), hints=(8,))
_embed = Op("embed", embed_reference, rows=(0,))


def linear(
    x: Float[Array, "T K"],
    w: FusedWeight,
    *,
    norm: Norm | None = None,
    bias: Float[Array, " N"] | None = None,
    activation: Activation | None = None,
    residual: Float[Array, "T N"] | None = None,
    post_norm: Norm | None = None,
    scale: float = 1.0,
    count: Int32[Array, ""] | None = None,
    compute: Compute = "exact",
) -> Float32[Array, "T N"]:
    """`residual + scale * post_norm(activation(norm(x) @ w.T + bias))`, each part where it is given.

    count: how many leading rows are wanted; what the others hold is not defined. `compute="fast"` allows a platform to
    quantize activations where `w` is packed.
    """
    return _linear(x, w, norm, bias, residual, post_norm, count, activation=activation, scale=scale, compute=compute)


def gated_mlp(
    x: Float[Array, "T D"],
    gate_up: FusedWeight,
    down: FusedWeight,
    *,
    activation: Activation,
    norm: Norm | None = None,
    gate_up_bias: Float[Array, " F2"] | None = None,
    down_bias: Float[Array, " D"] | None = None,
    residual: Float[Array, "T D"] | None = None,
    post_norm: Norm | None = None,
    scale: float = 1.0,
    count: Int32[Array, ""] | None = None,
    compute: Compute = "exact",
) -> Float32[Array, "T D"]:
    """`residual + scale * post_norm((activation(gate) * up) @ down.T)` with `gate, up = norm(x) @ gate_up.T`.

    GLU variants: Shazeer 2020. `gate_up` [2F, D] holds the gate's rows first. count: as in `linear`.
    """
    return _gated_mlp(
        x, gate_up, down, norm, gate_up_bias, down_bias, residual, post_norm, count,
        activation=activation, scale=scale, compute=compute,
    )  # fmt: skip


def embed(ids: Int32[Array, " T"], w: Weight, *, scale: float = 1.0) -> Float32[Array, "T D"]:
    """Rows `ids` of `w` in float32, times `scale`."""
    return _embed(ids, w, scale=scale)
