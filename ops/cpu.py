"""The CPU lowerings: one call into the native kernels per op.

In a native op every sum runs over a row of its own in a fixed order (kernels/cpu/tier.h), so a row's result is bitwise
the same whatever the number of rows, the neighbours, the bucket, the chunks of a prefill or the number of threads. All
instruction sets with a fused multiply-add give the same bits; the baseline of x86-64 has none and gives its own.
With `compute="fast"` weights in the form x16 (ops/packed.py) are multiplied with activations in int8, one scale for
each 32 of a row; all other weights, and all with "exact", with activations in float32.

Each function takes what its op takes, and returns NotImplemented where the kernels do not know a dtype or layout.
`tier` picks an instruction set by its index in `tiers()` (-1: the best the machine has) and `threads` how many threads
work (0: XLA's pool); tests use them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inferax.kernels.cpu import available, register
from inferax.ops.attention import AttentionSpec, QKNorm, Rotary
from inferax.ops.attention import _attention as attention_op
from inferax.ops.batch import Batch
from inferax.ops.ggml import TYPES
from inferax.ops.ggml.iquant import grid
from inferax.ops.linear import Activation, Compute, FusedWeight, Weight, in_width, out_width, parts
from inferax.ops.linear import _embed as embed_op
from inferax.ops.linear import _gated_mlp as gated_mlp_op
from inferax.ops.linear import _linear as linear_op
from inferax.ops.logprobs import _logprobs as logprobs_op
from inferax.ops.norm import Norm
from inferax.ops.norm import _norm as norm_op
from inferax.ops.packed import PackedWeight
from inferax.ops.rotary import RotarySpec, plain_frequencies, static_frequencies
from inferax.ops.rotary import _rotary as rotary_op
from inferax.ops.sample import _sample as sample_op
from inferax.ops.sampler_rows import FLOATS, INTS, STAGES, SamplerMemory, SamplerRows

# ggml's numbers of the types that are not blocks.
_DENSE = {"float32": 0, "float16": 1, "bfloat16": 30}
_CACHES = (*_DENSE, "int8", "float8_e4m3fn")
_ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
_TILED, _INT8 = 256, 512  # kTiled and kInt8 in kernels/cpu/handler.h
_GRIDS = {"IQ1_M": "IQ1_S"} | {t: t for t in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")}
# Positions per partition of the online softmax; see kKvPartition in kernels/cpu/tier.h.
_PARTITION = 512
# Rows of the vocabulary per tile of log-sum-exp. Part of the result's meaning: it fixes the order of the sum.
_VOCAB_TILE = 256
# Bounds the states of partitions that are worked on at the same time, in float32 numbers.
_MAX_PARTIAL = 1 << 20


def tiers() -> list[str]:
    """The instruction sets that this machine has kernels for, best last."""
    names: list[str] = import_module("inferax.kernels.cpu._native").tiers()
    return names


def _padded(width: int) -> int:
    return -(-width // 16) * 16


def _f32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _floats(*operands: Array | None) -> list[Array]:
    return [x.astype(jnp.float32) for x in operands if x is not None]


def _has(*operands: object) -> np.int32:
    """One bit for each operand that is given."""
    return np.int32(sum(1 << i for i, x in enumerate(operands) if x is not None))


def _pair(norm: Norm | None) -> tuple[Array | None, Array | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


def _layer(*norms: Norm | None) -> np.int32:
    """One bit for each layer norm."""
    return np.int32(sum(1 << i for i, n in enumerate(norms) if n is not None and n.kind == "layer"))


def _eps(norm: Norm | None) -> np.float32:
    return np.float32(0.0 if norm is None else norm.eps)


def _weight(w: FusedWeight, compute: Compute = "exact") -> tuple[list[Any], np.ndarray] | None:
    """The operands and ggml types of a weight's parts; None if the kernels can not read one."""
    arrays, types, grids = [], [], []
    for part in parts(w):
        if isinstance(part, PackedWeight):
            if part.data.ndim != 3:
                return None
            arrays.append(part.data)
            tiled = part.layout.form == "x16"
            types.append(TYPES[part.layout.type].id | (_TILED * tiled) | (_INT8 * _quantizes(part, compute)))
            if part.layout.type in _GRIDS:
                grids.append(grid(_GRIDS[part.layout.type]))
        else:
            if part.dtype.name not in _DENSE or part.ndim != 2:
                return None
            arrays.append(part)
            types.append(_DENSE[part.dtype.name])
    return [*arrays, *grids], np.asarray(types, np.int32)


def _quantizes(part: Weight, compute: Compute) -> bool:
    """Whether a weight is multiplied with activations in int8."""
    return compute == "fast" and isinstance(part, PackedWeight) and part.layout.form == "x16"


def _inputs(rows: int, width: int, w: FusedWeight, norm: Norm | None, compute: Compute) -> list[jax.ShapeDtypeStruct]:
    """Scratch for the rows that a product reads: as floats for some parts of a weight, quantized for others."""
    copies = not all(_quantizes(part, compute) for part in parts(w)) and (norm is not None or width % 16 > 0)
    return [_f32((rows, _padded(width)))] * copies + _quantized(rows, width, w, compute)


def _quantized(rows: int, width: int, w: FusedWeight, compute: Compute) -> list[jax.ShapeDtypeStruct]:
    size = (-(-rows // 16), width // 32, 256)  # QuantizedBytes in kernels/cpu/tier.h
    return [_f32(size)] * any(_quantizes(part, compute) for part in parts(w))


def norm(x: Array, weights: Norm, *, threads: int = 0, tier: int = -1) -> Any:
    return jax.ffi.ffi_call("inferax_norm_v1", _f32(x.shape))(
        *_floats(x, *_pair(weights)),
        has_bias=np.int32(weights.bias is not None),
        eps=_eps(weights),
        layer=_layer(weights),
        threads=np.int32(threads),
        tier=np.int32(tier),
    )


def linear(
    x: Array,
    w: FusedWeight,
    norm: Norm | None,
    bias: Array | None,
    residual: Array | None,
    post_norm: Norm | None,
    count: Array | None = None,
    *,
    activation: Activation | None,
    scale: float,
    compute: Compute,
    threads: int = 0,
    tier: int = -1,
) -> Any:
    weight = _weight(w, compute)
    if weight is None:
        return NotImplemented
    rows, k = x.shape
    results = [_f32((rows, out_width(w))), *_inputs(rows, k, w, norm, compute)]
    # `has` counts a bit for gated_mlp's second bias too.
    vectors = (*_pair(norm), bias, None, residual, *_pair(post_norm), count)
    return jax.ffi.ffi_call("inferax_linear_v2", results)(
        *_floats(x),
        *weight[0],
        *_floats(*vectors[:-1]),
        *([] if count is None else [count.astype(jnp.int32)]),
        types=weight[1],
        has=_has(*vectors),
        norm_eps=_eps(norm),
        post_eps=_eps(post_norm),
        layer=_layer(norm, post_norm),
        activation=np.int32(_ACTIVATIONS[activation]),
        scale=np.float32(scale),
        threads=np.int32(threads),
        tier=np.int32(tier),
    )[0]


def gated_mlp(
    x: Array,
    gate_up: FusedWeight,
    down: FusedWeight,
    norm: Norm | None,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    residual: Array | None,
    post_norm: Norm | None,
    count: Array | None = None,
    *,
    activation: Activation,
    scale: float,
    compute: Compute,
    threads: int = 0,
    tier: int = -1,
) -> Any:
    first, second = _weight(gate_up, compute), _weight(down, compute)
    if first is None or second is None:
        return NotImplemented
    rows, width = x.shape
    results = [
        _f32((rows, out_width(down))),
        _f32((rows, _padded(in_width(down)))),
        *_inputs(rows, width, gate_up, norm, compute),
        *_quantized(rows, in_width(down), down, compute),
    ]
    vectors = (*_pair(norm), gate_up_bias, down_bias, residual, *_pair(post_norm), count)
    return jax.ffi.ffi_call("inferax_gated_mlp_v2", results)(
        *_floats(x),
        *first[0],
        *second[0],
        *_floats(*vectors[:-1]),
        *([] if count is None else [count.astype(jnp.int32)]),
        types=first[1],
        down_types=second[1],
        has=_has(*vectors),
        norm_eps=_eps(norm),
        post_eps=_eps(post_norm),
        layer=_layer(norm, post_norm),
        activation=np.int32(_ACTIVATIONS[activation]),
        scale=np.float32(scale),
        threads=np.int32(threads),
        tier=np.int32(tier),
    )[0]


def embed(ids: Array, w: Weight, *, scale: float, threads: int = 0, tier: int = -1) -> Any:
    weight = _weight(w)
    if weight is None:
        return NotImplemented
    return jax.ffi.ffi_call("inferax_embed_v1", _f32((ids.shape[0], int(w.shape[1]))))(
        ids.astype(jnp.int32),
        *weight[0],
        types=weight[1],
        scale=np.float32(scale),
        threads=np.int32(threads),
        tier=np.int32(tier),
    )


def logprobs(
    x: Array,
    head: Weight,
    norm: Norm | None,
    ids: Array,
    *,
    softcap: float | None,
    scale: float,
    compute: Compute = "exact",
    threads: int = 0,
    tier: int = -1,
) -> Any:
    weight = _weight(head, compute)
    if weight is None:
        return NotImplemented
    rows, width = x.shape
    num_tiles = -(-int(head.shape[0]) // _VOCAB_TILE)
    results = [_f32(ids.shape), _f32((rows,)), _f32((rows, num_tiles, 2)), *_inputs(rows, width, head, norm, compute)]
    chosen, lse, *_ = jax.ffi.ffi_call("inferax_logprobs_v1", results)(
        *_floats(x),
        ids.astype(jnp.int32),
        *weight[0],
        *_floats(*_pair(norm)),
        types=weight[1],
        has=_has(*_pair(norm)),
        norm_eps=_eps(norm),
        layer=_layer(norm),
        softcap=np.float32(softcap or 0.0),
        scale=np.float32(scale),
        tile=np.int64(_VOCAB_TILE),
        threads=np.int32(threads),
        tier=np.int32(tier),
    )
    return chosen, lse


def rotary(positions: Array, lengths: Array, *, spec: RotarySpec, threads: int = 0) -> Any:
    plain = plain_frequencies(spec.theta, spec.dim)
    if spec.kind == "dynamic":
        table = (np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim))[None]
    elif spec.kind == "longrope":
        table = np.stack([plain / np.asarray(f, np.float32) for f in (spec.short_factors, spec.long_factors)])
    else:
        table = static_frequencies(spec)[None]
    angles = _f32((positions.shape[0], table.shape[1]))
    cos, sin = jax.ffi.ffi_call("inferax_rotary_v1", [angles, angles])(
        positions.astype(jnp.int32),
        lengths.astype(jnp.int32),
        table.astype(np.float32),
        original_length=np.int64(spec.original_length),
        attention_factor=np.float32(spec.attention_factor),
        dynamic_dim=np.int64(spec.dim if spec.kind == "dynamic" else 0),
        theta=np.float32(spec.theta),
        factor=np.float32(spec.factor),
        threads=np.int32(threads),
    )
    return cos, sin


def attention(
    qkv: Array,
    cache: Array,
    batch: Batch,
    rotary: Rotary | None,
    qk_norm: QKNorm | None,
    sinks: Array | None,
    *,
    spec: AttentionSpec,
    threads: int = 0,
    tier: int = -1,
) -> Any:
    if cache.dtype.name not in _CACHES:
        return NotImplemented
    tokens, heads = qkv.shape[0], spec.num_heads
    table = batch.page_table[spec.group]
    partitions = -(-int(table.shape[1]) * int(cache.shape[1]) // _PARTITION)
    width = _padded(spec.head_dim)
    # A few rows of long contexts are spread over partitions; many rows have work enough for every thread.
    partial = min(tokens * heads * partitions * (width + 2), _MAX_PARTIAL) if partitions > 1 and tokens <= 16 else 1
    cos, sin = rotary if rotary is not None else (None, None)
    q_norm, k_norm = qk_norm if qk_norm is not None else (None, None)
    vectors = (*_pair(q_norm), *_pair(k_norm), sinks)
    out, new_cache, *_ = jax.ffi.ffi_call(
        "inferax_attention_v1",
        [
            _f32((tokens, heads * spec.head_dim)),
            jax.ShapeDtypeStruct(cache.shape, cache.dtype),
            _f32((tokens * heads, width)),
            _f32((partial,)),
        ],
        input_output_aliases={1: 1},
    )(
        *_floats(qkv),
        cache,
        batch.positions,
        table,
        batch.slots[spec.group],
        batch.query_start,
        batch.context_len,
        batch.num_tokens,
        batch.num_seqs,
        *_floats(cos, sin),
        *_floats(*vectors),
        heads=np.int64(heads),
        kv_heads=np.int64(spec.num_kv_heads),
        width=np.int64(spec.head_dim),
        has=_has(cos, *vectors),
        q_eps=_eps(q_norm),
        k_eps=_eps(k_norm),
        layer=_layer(q_norm, k_norm),
        interleaved=np.int32(spec.rotary_interleaved),
        scale=np.float32(spec.scale),
        softcap=np.float32(spec.softcap or 0.0),
        window=np.int64(spec.window or 0),
        threads=np.int32(threads),
        tier=np.int32(tier),
    )
    return out, new_cache


def sample(
    logits: Array,
    rows: SamplerRows,
    memory: SamplerMemory | None,
    *,
    scores: bool = False,
    threads: int = 0,
    tier: int = -1,
) -> Any:
    """With `scores` the third result is what the stages make of the logits, as `filtered_scores` gives it."""
    results = [jax.ShapeDtypeStruct((logits.shape[0],), jnp.int32), _f32((logits.shape[0],))]
    if scores:
        results.append(_f32(logits.shape))
    seen = () if memory is None else (memory.history, memory.counts, memory.in_prompt, memory.breaks, memory.mu)
    return tuple(
        jax.ffi.ffi_call("inferax_sample_v1", results)(
            *_floats(logits),
            rows.packed,
            *seen,
            fields=",".join((*INTS, *FLOATS)),
            stages=",".join(STAGES),
            threads=np.int32(threads),
            tier=np.int32(tier),
        )
    )


if available() and register():
    norm_op.implement("cpu", norm)
    linear_op.implement("cpu", linear)
    gated_mlp_op.implement("cpu", gated_mlp)
    embed_op.implement("cpu", embed)
    logprobs_op.implement("cpu", logprobs)
    rotary_op.implement("cpu", rotary)
    attention_op.implement("cpu", attention)
    sample_op.implement("cpu", sample)
