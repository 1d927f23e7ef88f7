"""`logprobs`: log-probabilities of chosen tokens, without ever holding [T, V]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from inferax.ops.linear import Compute, Weight, matmul_reference
from inferax.ops.norm import Norm, norm_reference
from inferax.ops.op import Op
from inferax.ops.packed import PackedWeight

_TILE = 4096


def _cap(logits: Array, softcap: float | None, scale: float) -> Array:
    logits = logits * jnp.float32(scale) if scale != 1.0 else logits
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def logprobs_reference(
    x: Float[Array, "T D"],
    head: Weight,
    norm: Norm | None,
    ids: Int32[Array, "T J"],
    *,
    softcap: float | None,
    scale: float,
    compute: Compute = "exact",
) -> tuple[Float32[Array, "T J"], Float32[Array, " T"]]:
    x = x if norm is None else norm_reference(x, norm)
    logits = _cap(matmul_reference(x, head), softcap, scale)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.take_along_axis(logits, ids, axis=1) - lse[:, None], lse


def logprobs_tiled(
    x: Float[Array, "T D"],
    head: Weight,
    norm: Norm | None,
    ids: Int32[Array, "T J"],
    *,
    softcap: float | None,
    scale: float,
    compute: Compute = "exact",
) -> tuple[Float32[Array, "T J"], Float32[Array, " T"]]:
    """Online log-sum-exp over tiles of the vocabulary."""
    x = x if norm is None else norm_reference(x, norm)
    vocab = int(head.shape[0])
    tile = min(_TILE, vocab)
    top = jnp.full(x.shape[:1], -jnp.inf, jnp.float32)
    total = jnp.zeros(x.shape[:1], jnp.float32)
    chosen = jnp.zeros(ids.shape, jnp.float32)

    def one_tile(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, chosen = carry
        # The last tile is moved back to stay inside; what it shares with the one before is masked.
        start = jnp.minimum(i * tile, vocab - tile)
        logits = _cap(matmul_reference(x, _row_tile(head, start, tile)), softcap, scale)
        fresh = (start + jnp.arange(tile, dtype=jnp.int32)) >= i * tile
        logits = jnp.where(fresh, logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
        total = total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(logits - new_top[:, None]), axis=-1)
        local = ids - start
        inside = (local >= 0) & (local < tile) & (ids >= i * tile)
        found = jnp.take_along_axis(logits, jnp.clip(local, 0, tile - 1), axis=1)
        return new_top, total, jnp.where(inside, found, chosen)

    top, total, chosen = jax.lax.fori_loop(0, -(-vocab // tile), one_tile, (top, total, chosen))
    lse = top + jnp.log(total)
    return chosen - lse[:, None], lse


def _row_tile(head: Weight, start: Array, size: int) -> Weight:
    if isinstance(head, PackedWeight):
        side = 16 if head.layout.form == "x16" else 1  # a tile of the vocabulary is whole tiles of rows
        return PackedWeight(jax.lax.dynamic_slice_in_dim(head.data, start // side, size // side, axis=0), head.layout)
    return jax.lax.dynamic_slice_in_dim(head, start, size, axis=0)


_logprobs = Op("logprobs", logprobs_reference, logprobs_tiled, rows=(0, 3))


def logprobs(
    x: Float[Array, "T D"],
    head: Weight,
    ids: Int32[Array, "T J"],
    *,
    norm: Norm | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    compute: Compute = "exact",
) -> tuple[Float32[Array, "T J"], Float32[Array, " T"]]:
    """Log-probabilities of `ids` under `softmax(softcap(scale * (norm(x) @ head.T)))`, and the log-sum-exp."""
    return _logprobs(x, head, norm, ids, softcap=softcap, scale=scale, compute=compute)
