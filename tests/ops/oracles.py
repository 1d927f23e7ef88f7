"""What each op means, in plain numpy and float64, one sequence and one row at a time where that is clearer.

Nothing of inferax computes here; only its containers (Norm, Batch, the specs) are read.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from inferax.ops.attention import AttentionSpec
from inferax.ops.batch import Batch
from inferax.ops.norm import Norm
from inferax.ops.packed import PackedWeight
from inferax.ops.rotary import RotarySpec
from inferax.ops.sampler_rows import SamplerRows
from tests.ops.weights import values_of


def norm(x: np.ndarray, n: Norm) -> np.ndarray:
    if n.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + n.eps) * n.weight
    return y if n.bias is None else y + n.bias


def activate(name: str | None, x: np.ndarray) -> np.ndarray:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "relu":
        return np.maximum(x, 0)
    assert name is None
    return x


def dense(w: Any) -> np.ndarray:
    if isinstance(w, tuple):
        return np.concatenate([dense(part) for part in w])
    return values_of(w) if isinstance(w, PackedWeight) else w


def finish(y: np.ndarray, residual: np.ndarray | None, post_norm: Norm | None, scale: float) -> np.ndarray:
    y = y if post_norm is None else norm(y, post_norm)
    return y * scale if residual is None else residual + y * scale


def linear(x, w, n, bias, residual, post_norm, *, activation, scale, compute):  # type: ignore[no-untyped-def]
    del compute
    y = (x if n is None else norm(x, n)) @ dense(w).T
    y = activate(activation, y if bias is None else y + bias)
    return finish(y, residual, post_norm, scale)


def linear_fast_bound(x, w, n, bias, residual, post_norm, *, activation, scale, compute):  # type: ignore[no-untyped-def]
    """How far `compute="fast"` may be off: half a step of int8 per activation, steps set by each block's largest."""
    del bias, residual, compute
    assert activation is None and post_norm is None
    x = x if n is None else norm(x, n)
    out = []
    for part in w if isinstance(w, tuple) else (w,):
        values = np.abs(dense(part))
        slack = 1e-5 * np.abs(x) @ values.T
        if isinstance(part, PackedWeight):
            # The coarsest grouping allowed: one scale for each 256 activations.
            group = math.gcd(x.shape[1], 256)
            largest = np.abs(x).reshape(x.shape[0], x.shape[1] // group, group).max(axis=-1)
            half_step = np.repeat(largest / 254, group, axis=-1)
            slack = slack + half_step @ values.T
        out.append(slack)
    return np.concatenate(out, axis=-1) * abs(scale)


def gated_mlp(x, gate_up, down, n, gate_up_bias, down_bias, residual, post_norm, *, activation, scale, compute):  # type: ignore[no-untyped-def]
    del compute
    h = (x if n is None else norm(x, n)) @ dense(gate_up).T
    h = h if gate_up_bias is None else h + gate_up_bias
    half = h.shape[1] // 2
    y = (activate(activation, h[:, :half]) * h[:, half:]) @ dense(down).T
    return finish(y if down_bias is None else y + down_bias, residual, post_norm, scale)


def embed(ids: np.ndarray, w: Any, *, scale: float) -> np.ndarray:
    return np.stack([dense(w)[i] * scale for i in ids]) if len(ids) else np.zeros((0, dense(w).shape[1]))


def logprobs(x, head, n, ids, *, softcap, scale):  # type: ignore[no-untyped-def]
    logits = (x if n is None else norm(x, n)) @ dense(head).T * scale
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    top = logits.max(axis=1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return np.take_along_axis(logits, ids, axis=1) - lse[:, None], lse


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """x [H, E] of one row; cos and sin [half]."""
    out = x.copy()
    half = len(cos)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        out[:, a] = x[:, a] * cos[i] - x[:, b] * sin[i]
        out[:, b] = x[:, b] * cos[i] + x[:, a] * sin[i]
    return out


def encode_kv(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Heads [..., E] as the docstring of ops/cache.py has them stored, one after the other."""
    x = np.asarray(x, np.float32)
    limit = {"int8": 127, "float8_e4m3fn": 448}.get(dtype.name)
    if limit is None:
        return x.astype(dtype)
    rows = np.empty((*x.shape[:-1], x.shape[-1] + 4), np.uint8)
    for place in np.ndindex(x.shape[:-1]):
        head = x[place]
        largest = np.max(np.abs(head))
        scale = np.float32(largest * np.float32(1 / limit))
        if not np.isfinite(largest):
            head, scale = np.zeros_like(head), np.float32(np.nan)
        elif scale < 2.0**-100:
            head, scale = np.zeros_like(head), np.float32(0)
        else:
            head = head * (np.float32(limit) / largest)
        codes = np.rint(head).astype(np.int8) if limit == 127 else head.astype(dtype)
        rows[place] = np.concatenate([codes.view(np.uint8), scale[None].view(np.uint8)])
    return rows.view(dtype)


def decode_kv(rows: np.ndarray) -> np.ndarray:
    """What the heads of a leaf stand for, in float64."""
    if rows.dtype.itemsize > 1:
        return rows.astype(np.float64)
    scale = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    return rows[..., :-4].astype(np.float64) * scale


def attention(qkv, cache, batch: Batch, rotary, qk_norm, sinks, *, spec: AttentionSpec, dtype: Any = np.float32):  # type: ignore[no-untyped-def]
    """One sequence at a time over its own contiguous keys and values. `dtype` is the cache's: KV rounds on writing."""
    h, k, e = spec.num_heads, spec.num_kv_heads, spec.head_dim
    page_size = cache.shape[1]
    cache = cache.copy()
    out = np.zeros((qkv.shape[0], h, e))
    table = batch.page_table[spec.group]
    for s in range(int(batch.num_seqs)):
        first, last, context = int(batch.query_start[s]), int(batch.query_start[s + 1]), int(batch.context_len[s])
        old = context - (last - first)
        places = [(table[s, p // page_size], p % page_size) for p in range(context)]
        keys = [decode_kv(cache[place][0]) for place in places[:old]]
        values = [decode_kv(cache[place][1]) for place in places[:old]]
        queries = []
        for row in range(first, last):
            q, key = qkv[row, : h * e], qkv[row, h * e : (h + k) * e]
            value = qkv[row, (h + k) * e :].reshape(k, e)
            if qk_norm is not None:
                q, key = (
                    norm(x.reshape(-1, n.weight.shape[-1]), n).reshape(-1)
                    for x, n in zip((q, key), qk_norm, strict=True)
                )
            q, key = q.reshape(h, e), key.reshape(k, e)
            if rotary is not None:
                q, key = (rotate(x, rotary[0][row], rotary[1][row], spec.rotary_interleaved) for x in (q, key))
            held = np.stack([key, value])
            if dtype != np.float32:
                held = encode_kv(held, dtype)
                key, value = decode_kv(held)
            cache[places[old + row - first]] = held
            queries.append(q)
            keys.append(key)
            values.append(value)
        for row, q in enumerate(queries, start=first):
            position = old + row - first
            oldest = 0 if spec.window is None else max(0, position - spec.window + 1)
            for head in range(h):
                group = head // (h // k)
                near_keys = np.stack([x[group] for x in keys[oldest : position + 1]])
                near_values = np.stack([x[group] for x in values[oldest : position + 1]])
                scores = near_keys @ q[head] * spec.scale
                if spec.softcap is not None:
                    scores = spec.softcap * np.tanh(scores / spec.softcap)
                sink = -np.inf if sinks is None else sinks[head]
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                out[row, head] = weights @ near_values / (weights.sum() + np.exp(sink - top))
    return out.reshape(qkv.shape[0], h * e), cache


def rotary(positions: np.ndarray, lengths: np.ndarray, *, spec: RotarySpec, config: Any) -> Any:
    """cos and sin by transformers' own frequencies for each row's length."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def plain(config: Any, device: str, seq_len: int) -> tuple[torch.Tensor, float]:
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)

    cos, sin = [], []
    for position, length in zip(positions, lengths, strict=True):
        frequencies, factor = ROPE_INIT_FUNCTIONS.get(spec.kind, plain)(config, "cpu", seq_len=int(length))
        angles = float(position) * frequencies.double().numpy()
        cos.append(np.cos(angles) * factor)
        sin.append(np.sin(angles) * factor)
    half = spec.dim // 2
    return np.asarray(cos).reshape(-1, half), np.asarray(sin).reshape(-1, half)


def threefry2x32(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Salmon et al. 2011, with Python integers: 20 rounds, a key injected after every fourth."""
    mask = 0xFFFFFFFF
    ks = [key[0], key[1], 0x1BD11BDA ^ key[0] ^ key[1]]
    x = [(counter[0] + ks[0]) & mask, (counter[1] + ks[1]) & mask]
    rotations = [13, 15, 26, 6, 17, 29, 16, 24]
    for r in range(20):
        x[0] = (x[0] + x[1]) & mask
        bits = rotations[r % 8]
        x[1] = ((x[1] << bits) | (x[1] >> (32 - bits))) & mask
        x[1] ^= x[0]
        if r % 4 == 3:
            i = r // 4 + 1
            x = [(x[0] + ks[i % 3]) & mask, (x[1] + ks[(i + 1) % 3] + i) & mask]
    return x[0], x[1]


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens one row may give, by sorting: the k best, then the fewest that hold p of what is left."""
    scores = logits / temperature
    keep = np.isfinite(scores)
    if min_p > 0:
        keep &= scores >= scores.max() + np.log(min_p)
    order = [t for t in np.argsort(-scores, kind="stable") if keep[t]]
    if top_k > 0:
        order = [t for t in order if scores[t] >= scores[order[min(top_k, len(order)) - 1]]]
    weights = np.exp(scores[order] - scores.max())
    if top_p < 1:
        enough = int(np.argmax(np.cumsum(weights) >= top_p * weights.sum()))
        order = [t for t in order if scores[t] >= scores[order[enough]]]
    out = np.zeros(len(logits), bool)
    out[order] = True
    return out


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    weights[~kept(logits, temperature, top_k, top_p, min_p)] = 0
    return weights / weights.sum()


def sample(logits: np.ndarray, rows: SamplerRows, memory: None) -> tuple[np.ndarray, np.ndarray]:
    """One uniform picks a block of 256 tokens, a second a token in it."""
    tokens = []
    names = ("temperature", "top_k", "top_p", "min_p", "seed_low", "seed_high", "sample_index", "position")
    of = {name: np.asarray(rows[name]) for name in names}
    for i, row in enumerate(logits):
        if of["temperature"][i] == 0:
            tokens.append(int(np.argmax(row)))
            continue
        p = distribution(row, of["temperature"][i], int(of["top_k"][i]), of["top_p"][i], of["min_p"][i])
        seed = (int(of["seed_low"][i]) % 2**32, int(of["seed_high"][i]) % 2**32)
        words = threefry2x32(seed, (int(of["sample_index"][i]), int(of["position"][i])))
        first, second = ((w >> 8) / 2**24 for w in words)
        blocks = [p[at : at + 256] for at in range(0, len(p), 256)]
        mass = np.cumsum([b.sum() for b in blocks])
        block = int(np.argmax(mass > first * mass[-1]))
        inside = np.cumsum(blocks[block])
        tokens.append(block * 256 + int(np.argmax(inside > second * inside[-1])))
    return np.asarray(tokens, np.int32), np.zeros(len(tokens), np.float32)


BFLOAT16 = ml_dtypes.bfloat16
