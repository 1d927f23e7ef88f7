"""The config-driven decoder: pure functions over a params pytree, a batch and a paged cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from inferax.models.config import ModelConfig
from inferax.ops.attention import AttentionSpec, attention
from inferax.ops.batch import Batch
from inferax.ops.cache import Cache
from inferax.ops.collectives import all_reduce
from inferax.ops.linear import embed, gated_mlp, in_width, linear
from inferax.ops.logprobs import logprobs as ops_logprobs
from inferax.ops.norm import Norm, norm
from inferax.ops.rotary import rotary

Params = dict[str, Any]
# Called with an activation's name and value; what it returns is used instead.
Tap = Callable[[str, Array], Array]


def _norm(config: ModelConfig, params: Params, row: int) -> Norm:
    bias = params["norm_biases"][row] if config.norm_kind == "layer" else None
    return Norm(params["norms"][row], bias, eps=config.norm_eps, kind=config.norm_kind)


def _row(params: Params, name: str, layer: int) -> Array | None:
    return params[name][layer] if name in params else None


def forward(
    config: ModelConfig,
    params: Params,
    batch: Batch,
    cache: Cache,
    *,
    mesh_axes: str | None = None,
    tap: Tap | None = None,
) -> tuple[Float32[Array, "T D"], Cache]:
    """Hidden states of every row, before the final norm, and the cache with this step's keys and values.

    mesh_axes: the mesh axis over which heads and MLP columns are sharded; local shapes say how many are here.
    tap: sees, and may replace, "embed", and per layer i "layers.i.attention", "layers.i.mlp" (what each adds to the
        residual stream) and "layers.i" (the stream after the layer). With a tap the residual is added outside the
        fused op, as it is on a mesh; the values are the same.
    """

    def seen(name: str, x: Array) -> Array:
        return x if tap is None else tap(name, x)

    split = tap is not None or mesh_axes is not None
    scale = config.residual_scale

    if batch.input_embeds is None:
        x = embed(batch.tokens, params["embed"], scale=config.embed_scale)
    else:
        x = batch.input_embeds.astype(jnp.float32)
    x = seen("embed", x)
    sequence = batch.sequence_of_row()
    lengths = jnp.maximum(batch.prompt_len[sequence], batch.positions + 1)
    rotaries = [rotary(batch.positions, lengths, spec) for spec in config.rotaries]
    how: Any = {"count": batch.num_tokens, "compute": config.compute}
    attention_scale = config.attention_scale or 1 / math.sqrt(config.head_dim)

    new_cache = []
    for i, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        first = i * config.norms_per_layer
        norms = [_norm(config, params, first + j) for j in range(config.norms_per_layer)]
        post_attn, mlp_norm, post_mlp = (norms[1], norms[2], norms[3]) if config.post_norms else (None, norms[1], None)
        qk_norm = None
        if config.qk_norm:
            pair = params["qk_norms"][i]
            qk_norm = (Norm(pair[0], eps=config.norm_eps), Norm(pair[1], eps=config.norm_eps))

        spec = AttentionSpec(
            num_heads=in_width(weights["o"]) // config.head_dim,
            num_kv_heads=int(cache[i].shape[3]),
            head_dim=config.head_dim,
            scale=attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
            group=config.group(i),
        )
        qkv = linear(x, weights["qkv"], norm=norms[0], bias=_row(params, "qkv_bias", i), **how)
        heads, leaf = attention(
            qkv, cache[i], batch, spec,
            rotary=None if layer.rotary is None else rotaries[layer.rotary], qk_norm=qk_norm,
        )  # fmt: skip
        new_cache.append(leaf)
        o_bias = _row(params, "o_bias", i)
        if split:
            out = all_reduce(linear(heads, weights["o"], **how), mesh_axes)
            x = x + seen(f"layers.{i}.attention", _finish(out, o_bias, post_attn, scale))
        else:
            x = linear(heads, weights["o"], bias=o_bias, residual=x, post_norm=post_attn, scale=scale, **how)

        mlp = partial(
            gated_mlp,
            gate_up=weights["gate_up"],
            down=weights["down"],
            activation=config.activation,
            norm=mlp_norm,
            gate_up_bias=_row(params, "gate_up_bias", i),
            count=batch.num_tokens,
            compute=config.compute,
        )
        down_bias = _row(params, "down_bias", i)
        if split:
            out = all_reduce(mlp(x), mesh_axes)
            x = x + seen(f"layers.{i}.mlp", _finish(out, down_bias, post_mlp, scale))
            x = seen(f"layers.{i}", x)
        else:
            x = mlp(x, down_bias=down_bias, residual=x, post_norm=post_mlp, scale=scale)
    return x, tuple(new_cache)


def _finish(y: Array, bias: Array | None, post_norm: Norm | None, scale: float) -> Array:
    if bias is not None:
        y = y + bias
    if post_norm is not None:
        y = norm(y, post_norm)
    return y if scale == 1.0 else y * jnp.float32(scale)


def head(params: Params) -> Any:
    """The output head [V, D]: the embedding where they are tied."""
    return params["head"] if "head" in params else params["embed"]


def final_norm(config: ModelConfig, params: Params) -> Norm:
    """The norm between the last layer and the head."""
    return _norm(config, params, config.num_layers * config.norms_per_layer)


def logits(
    config: ModelConfig, params: Params, hidden: Float32[Array, "T D"], count: Int32[Array, ""] | None = None
) -> Float32[Array, "T V"]:
    """Logits of rows of hidden states as `forward` returns them; of the first `count` where it is given."""
    out = linear(hidden, head(params), norm=final_norm(config, params), count=count, compute=config.compute)
    if config.logit_scale != 1.0:
        out = out * jnp.float32(config.logit_scale)
    cap = config.logit_softcap
    return out if cap is None else cap * jnp.tanh(out / cap)


def logprobs(
    config: ModelConfig, params: Params, hidden: Float32[Array, "T D"], ids: Int32[Array, "T J"]
) -> tuple[Float32[Array, "T J"], Float32[Array, " T"]]:
    """Log-probabilities of `ids` after rows of hidden states, and the log-sum-exp, without holding [T, V]."""
    return ops_logprobs(
        hidden,
        head(params),
        ids,
        norm=final_norm(config, params),
        softcap=config.logit_softcap,
        scale=config.logit_scale,
        compute=config.compute,
    )


def apply(
    config: ModelConfig,
    params: Params,
    tokens: Int32[Array, "B L"],
    *,
    positions: Int32[Array, "B J"] | None = None,
    page_size: int = 16,
    tap: Tap | None = None,
) -> Float32[Array, "B L V"]:
    """Logits at every position of whole sequences, or [B, J, V] at `positions` only.

    The same forward as the engine's, over a trivially paged batch.
    """
    count, length = tokens.shape
    pages = -(-length // page_size)
    rows = count * length
    position = jnp.tile(jnp.arange(length, dtype=jnp.int32), count)
    table = jnp.arange(count * pages, dtype=jnp.int32).reshape(count, pages)
    slots = (jnp.arange(count, dtype=jnp.int32)[:, None] * pages * page_size + jnp.arange(length)).reshape(rows)
    groups = len(config.windows)
    full = jnp.full((count,), length, jnp.int32)
    batch = Batch(
        tokens=tokens.reshape(rows).astype(jnp.int32),
        positions=position,
        query_start=jnp.arange(count + 1, dtype=jnp.int32) * length,
        context_len=full,
        prompt_len=full,
        num_tokens=jnp.int32(rows),
        num_seqs=jnp.int32(count),
        page_table=(table,) * groups,
        slots=(slots.astype(jnp.int32),) * groups,
        state_slot=jnp.arange(count, dtype=jnp.int32),
        sample_rows=jnp.arange(rows, dtype=jnp.int32),
    )
    shape = (count * pages, page_size, 2, config.num_kv_heads, config.head_dim)
    cache = tuple(jnp.zeros(shape, jnp.float32) for _ in config.layers)
    hidden, _ = forward(config, params, batch, cache, tap=tap)
    if positions is not None:
        hidden = jnp.take_along_axis(hidden.reshape(count, length, -1), positions[..., None], axis=1)
    return logits(config, params, hidden.reshape(-1, config.width)).reshape(count, -1, config.vocab_size)
