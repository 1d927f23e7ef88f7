"""`norm`: RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from inferax.ops.op import Op


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """A norm's weights, to be passed as one operand. `kind` is "rms" or "layer"."""

    weight: Float[Array, " D"]
    bias: Float[Array, " D"] | None = None
    eps: float = field(default=1e-6, metadata={"static": True})
    kind: str = field(default="rms", metadata={"static": True})


def norm_reference(x: Float[Array, "... D"], norm: Norm) -> Float32[Array, "... D"]:
    x = x.astype(jnp.float32)
    if norm.kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm.eps) * norm.weight.astype(jnp.float32)
    return y if norm.bias is None else y + norm.bias.astype(jnp.float32)


_norm = Op("norm", norm_reference, rows=(0,))


def norm(x: Float[Array, "T D"], weights: Norm) -> Float32[Array, "T D"]:
    """Normalizes each row of `x` in float32 and scales it."""
    return _norm(x, weights)
