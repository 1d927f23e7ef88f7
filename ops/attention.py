"""`attention`: ragged paged attention that also writes KV.

A chunk's own keys and values are read back from the cache as it holds them (ops/cache.py), so prefill sees what decode
will see, and KV blocks start at absolute position 0, never at the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from inferax.ops.batch import Batch
from inferax.ops.cache import CacheLeaf, read_kv, write_kv
from inferax.ops.norm import Norm, norm_reference
from inferax.ops.op import Op
from inferax.ops.rotary import rotate

_MASKED = -1e30


@dataclass(frozen=True)
class AttentionSpec:
    """The static side of one layer's attention.

    scale: multiplies the scores. window: how many positions a row sees, itself included (None: all before it).
    softcap: scores become softcap * tanh(score / softcap). group: which cache group's pages the layer uses.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    group: int = 0
    rotary_interleaved: bool = False


QKNorm = tuple[Norm, Norm]
Rotary = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]


def _prepare(
    qkv: Array, qk_norm: QKNorm | None, rotary: Rotary | None, spec: AttentionSpec
) -> tuple[Float32[Array, "T H E"], Float32[Array, "T 2 K E"]]:
    """Splits, normalizes and rotates: queries, and the keys and values to be written."""
    tokens = qkv.shape[0]
    h, k, e = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = qkv.astype(jnp.float32)
    q, key, value = qkv[:, : h * e], qkv[:, h * e : (h + k) * e], qkv[:, (h + k) * e :]
    if qk_norm is not None:
        # A weight of the head's width normalizes each head, one of the full width all heads together.
        def normalize(x: Array, norm: Norm) -> Array:
            return norm_reference(x.reshape(tokens, -1, norm.weight.shape[-1]), norm).reshape(x.shape)

        q, key = normalize(q, qk_norm[0]), normalize(key, qk_norm[1])
    q, key = q.reshape(tokens, h, e), key.reshape(tokens, k, e)
    if rotary is not None:
        q = rotate(q, *rotary, interleaved=spec.rotary_interleaved)
        key = rotate(key, *rotary, interleaved=spec.rotary_interleaved)
    return q, jnp.stack([key, value.reshape(tokens, k, e)], axis=1)


def _scores(q: Array, keys: Array, pattern: str, spec: AttentionSpec) -> Array:
    scores = jnp.einsum(pattern, q, keys, precision="highest") * jnp.float32(spec.scale)
    return scores if spec.softcap is None else spec.softcap * jnp.tanh(scores / spec.softcap)


def _visible(row_position: Array, kv_position: Array, context: Array, window: int | None) -> Array:
    seen = (kv_position <= row_position) & (kv_position < context)
    return seen if window is None else seen & (kv_position > row_position - window)


def attention_reference(
    qkv: Float[Array, "T W"],
    cache: CacheLeaf,
    batch: Batch,
    rotary: Rotary | None,
    qk_norm: QKNorm | None,
    sinks: Float[Array, " H"] | None,
    *,
    spec: AttentionSpec,
) -> tuple[Float32[Array, "T HE"], CacheLeaf]:
    """Gathers each sequence's pages and attends to them at once."""
    q, kv = _prepare(qkv, qk_norm, rotary, spec)
    cache = write_kv(cache, kv, batch.slots[spec.group])
    tokens, (h, k, e) = q.shape[0], (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    q = q.reshape(tokens, k, h // k, e)

    def one_sequence(of: tuple[Array, Array]) -> Array:
        pages, context = of
        mine = read_kv(cache, pages).reshape(-1, 2, k, e)
        position = jnp.arange(mine.shape[0], dtype=jnp.int32)
        # Pages past the context may hold anything, NaN included.
        mine = jnp.where((position < context)[:, None, None, None], mine, 0.0)
        scores = _scores(q, mine[:, 0], "tkge,lke->tkgl", spec)
        seen = _visible(batch.positions[:, None], position[None], context, spec.window)[:, None, None]
        scores = jnp.where(seen, scores, _MASKED)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(k, h // k, 1), (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : position.shape[0]]
        out = jnp.einsum("tkgl,lke->tkge", weights, mine[:, 1], precision="highest")
        return jnp.where(jnp.any(seen, axis=-1)[..., None], out, 0.0).reshape(tokens, h * e)

    per_sequence = jax.lax.map(one_sequence, (batch.page_table[spec.group], batch.context_len))
    rows = jnp.arange(tokens, dtype=jnp.int32)
    out = per_sequence[batch.sequence_of_row(), rows]
    return jnp.where((rows < batch.num_tokens)[:, None], out, 0.0), cache


def attention_blockwise(
    qkv: Float[Array, "T W"],
    cache: CacheLeaf,
    batch: Batch,
    rotary: Rotary | None,
    qk_norm: QKNorm | None,
    sinks: Float[Array, " H"] | None,
    *,
    spec: AttentionSpec,
) -> tuple[Float32[Array, "T HE"], CacheLeaf]:
    """Online softmax over one page at a time, up to the longest context of the batch (Milakov and Gimelshein 2018).

    Its temporaries are T rows of one page each, whatever the number of pages and the length of the contexts.
    """
    q, kv = _prepare(qkv, qk_norm, rotary, spec)
    cache = write_kv(cache, kv, batch.slots[spec.group])
    tokens, (h, k, e) = q.shape[0], (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    page_size = cache.shape[1]
    q = q.reshape(tokens, k, h // k, e)
    rows = jnp.arange(tokens, dtype=jnp.int32)
    sequence = batch.sequence_of_row()
    context = jnp.where(rows < batch.num_tokens, batch.context_len[sequence], 0)
    page_table = batch.page_table[spec.group]

    first = jnp.int32(0)
    if spec.window is not None:
        # Pages that lie before every row's window are not read.
        oldest = jnp.min(jnp.where(rows < batch.num_tokens, batch.positions, jnp.int32(2**31 - 1)))
        first = jnp.maximum(oldest - spec.window + 1, 0) // page_size
    last = (jnp.max(context) + page_size - 1) // page_size

    def one_page(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        page = read_kv(cache, page_table[sequence, block])  # [T, page_size, 2, K, E]
        position = block * page_size + jnp.arange(page_size, dtype=jnp.int32)
        seen = _visible(batch.positions[:, None], position[None], context[:, None], spec.window)
        page = jnp.where((position[None] < context[:, None])[:, :, None, None, None], page, 0.0)
        scores = jnp.where(seen[:, None, None], _scores(q, page[:, :, 0], "tkge,tlke->tkgl", spec), _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen[:, None, None], jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        out = out * shrink[..., None] + jnp.einsum("tkgl,tlke->tkge", weights, page[:, :, 1], precision="highest")
        return new_top, total * shrink + jnp.sum(weights, axis=-1), out

    shape = (tokens, k, h // k)
    if sinks is None:
        top, total = jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        top = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(k, h // k), shape)
        total = jnp.ones(shape, jnp.float32)
    _, total, out = jax.lax.fori_loop(first, last, one_page, (top, total, jnp.zeros((*shape, e), jnp.float32)))
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    return out.reshape(tokens, h * e), cache


_attention = Op("attention", attention_reference, attention_blockwise)


def attention(
    qkv: Float[Array, "T W"],
    cache: CacheLeaf,
    batch: Batch,
    spec: AttentionSpec,
    *,
    rotary: Rotary | None = None,
    qk_norm: QKNorm | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Float32[Array, "T HE"], CacheLeaf]:
    """Writes each row's key and value to its slot, and attends from each row to its own sequence up to itself.

    qkv: [T, (H + 2K) * E], queries first. rotary: (cos, sin) from `ops.rotary`, applied after `qk_norm`.
    sinks: one extra logit per head that takes part in the softmax and has no value.
    Returns the heads' outputs, zero for padding rows, and the cache.
    """
    return _attention(qkv, cache, batch, rotary, qk_norm, sinks, spec=spec)
