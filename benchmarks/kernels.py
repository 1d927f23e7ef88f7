"""The native CPU kernels against XLA's own lowering of the same ops, in one run.

    python benchmarks/kernels.py [--seconds 0.3] [--types Q4_1,Q4_K,...] [--model SOURCE]

Each row is the median over as many calls as fit in `--seconds` (three at least). GB/s counts the bytes of the weight or
of the keys and values, GFLOP/s two per multiply-add; the last column is XLA's time over ours. A working set is rotated
among several weights, so that a vector's product reads from memory and not from a cache.
With `--model` it also times decode steps and a prefill of that model ("" for the default one).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from inferax.ops import cpu
from inferax.ops.attention import AttentionSpec, attention, attention_blockwise
from inferax.ops.batch import Batch
from inferax.ops.cache import cache_shape
from inferax.ops.ggml import TYPES
from inferax.ops.linear import linear, linear_reference
from inferax.ops.logprobs import logprobs, logprobs_tiled
from inferax.ops.norm import Norm, norm, norm_reference
from inferax.ops.packed import Layout, PackedWeight
from inferax.ops.sample import sample, sample_reference
from inferax.ops.sampler_rows import sampler_rows

MAIN_TYPES = ("float32", "bfloat16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
COPIES_BYTES = 64 << 20  # more than a core's caches hold


def machine() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
        name = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{name}, {os.cpu_count()} cores{load}"


def median_s(calls: list[Callable[[], Any]], seconds: float) -> float:
    """Of the calls in turn; the first of each is not counted."""
    for call in calls:
        jax.block_until_ready(call())
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report(name: str, ours: float, xla: float, *, num_bytes: float, flops: float) -> None:
    rates = f"{num_bytes / ours / 1e9:8.1f} {flops / ours / 1e9:9.1f}"
    print(f"{name:34s} {ours * 1e6:10.0f} {rates} {xla * 1e6:10.0f} {xla / ours:7.1f}x", flush=True)


def weight(type: str, n: int, k: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    if type not in TYPES:
        return jnp.asarray(rng.standard_normal((n, k), np.float32), type)
    info = TYPES[type]
    # Random codes under small scales: every byte below 0x30 keeps float16 scales finite and usual.
    blocks = rng.integers(0, 0x30, (n, k // info.block, info.block_bytes), dtype=np.uint8)
    return PackedWeight(jnp.asarray(blocks), Layout(type))


def bench_linear(types: list[str], seconds: float) -> None:
    reference = jax.jit(partial(linear_reference, activation=None, scale=1.0, compute="exact"))
    ours = jax.jit(lambda x, w: linear(x, w))
    for n, k in ((3072, 576), (4096, 4096)):
        for type in types:
            if type in TYPES and k % TYPES[type].block:
                continue
            size = weight(type, n, k, 0).nbytes
            copies = [weight(type, n, k, i) for i in range(max(1, min(16, COPIES_BYTES // size)))]
            for m in (1, 8, 512):
                x = jnp.asarray(np.random.default_rng(m).standard_normal((m, k), np.float32))
                report(
                    f"linear {n}x{k} {type} M={m}",
                    median_s([partial(ours, x, w) for w in copies], seconds),
                    median_s([partial(reference, x, w, None, None, None, None) for w in copies], seconds),
                    num_bytes=size,
                    flops=2 * m * n * k,
                )


def decode_batch(seqs: int, context: int, new: int, page_size: int = 16) -> Batch:
    pages = -(-context // page_size)
    table = np.arange(seqs * pages, dtype=np.int32).reshape(seqs, pages)
    positions = np.tile(np.arange(context - new, context, dtype=np.int32), seqs)
    rows = np.repeat(np.arange(seqs), new)
    slots = table[rows, positions // page_size] * page_size + positions % page_size
    full = jnp.full(seqs, context, jnp.int32)
    return Batch(
        tokens=jnp.zeros(seqs * new, jnp.int32),
        positions=jnp.asarray(positions),
        query_start=jnp.arange(seqs + 1, dtype=jnp.int32) * new,
        context_len=full,
        prompt_len=full,
        num_tokens=jnp.int32(seqs * new),
        num_seqs=jnp.int32(seqs),
        page_table=(jnp.asarray(table),),
        slots=(jnp.asarray(slots, jnp.int32),),
        state_slot=jnp.zeros(seqs, jnp.int32),
        sample_rows=jnp.zeros(1, jnp.int32),
    )


def bench_attention(seconds: float) -> None:
    h, k, e = 9, 3, 64  # SmolLM2 135M
    spec = AttentionSpec(h, k, e, scale=0.125)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
        for seqs, context, new in ((1, 512, 1), (1, 8192, 1), (16, 1024, 1), (1, 512, 512), (1, 2048, 512)):
            batch = decode_batch(seqs, context, new)
            qkv = jnp.asarray(np.random.default_rng(0).standard_normal((seqs * new, (h + 2 * k) * e), np.float32))

            def timed(function: Callable[..., Any], batch: Batch = batch, qkv: Any = qkv, dtype: Any = dtype) -> float:
                step = jax.jit(function, donate_argnums=1)
                state = [jnp.zeros(cache_shape(int(batch.page_table[0].size), 16, k, e, dtype), dtype)]

                def call() -> Any:
                    out, state[0] = step(qkv, state[0], batch)
                    return out

                return median_s([call], seconds)

            seen = sum(range(context - new + 1, context + 1)) * seqs
            report(
                f"attention {seqs}x{new} at {context} {jnp.dtype(dtype).name}",
                timed(lambda q, c, b: attention(q, c, b, spec)),
                timed(lambda q, c, b: attention_blockwise(q, c, b, None, None, None, spec=spec)),
                num_bytes=seqs * prod(cache_shape(1, context, k, e, dtype)) * jnp.dtype(dtype).itemsize,
                flops=4 * seen * h * e,
            )


def bench_rows(seconds: float) -> None:
    weights = Norm(jnp.ones(576))
    for m in (1, 512):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((m, 576), np.float32))
        ours, theirs = jax.jit(norm), jax.jit(norm_reference)
        report(
            f"norm {m}x576",
            median_s([partial(ours, x, weights)], seconds),
            median_s([partial(theirs, x, weights)], seconds),
            num_bytes=8 * x.size,
            flops=4 * x.size,
        )
    head = weight("Q4_1", 49_152, 576, 0)
    for m in (1, 128):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((m, 576), np.float32))
        ids = jnp.zeros((m, 1), jnp.int32)
        ours = jax.jit(lambda x, ids: logprobs(x, head, ids))
        theirs = jax.jit(lambda x, ids: logprobs_tiled(x, head, None, ids, softcap=None, scale=1.0))
        report(
            f"logprobs {m} rows, 49152x576 Q4_1",
            median_s([partial(ours, x, ids)], seconds),
            median_s([partial(theirs, x, ids)], seconds),
            num_bytes=head.nbytes,
            flops=2 * m * 49_152 * 576,
        )


def bench_sample(seconds: float) -> None:
    """GB/s counts the logits once; there are no multiply-adds to speak of."""
    settings: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {"temperature": 0.8},
        "top_k top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        "top_k top_p min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
        "top_p": {"temperature": 0.8, "top_p": 0.9},
    }
    ours, theirs = jax.jit(sample), jax.jit(lambda x, rows: sample_reference(x, rows, None))
    for count, vocab in ((1, 49_152), (16, 49_152), (16, 262_144)):
        logits = jnp.asarray(np.random.default_rng(0).standard_normal((count, vocab), np.float32) * 3)
        for name, values in settings.items():
            rows = sampler_rows(count, seed=list(range(count)), **values)
            report(
                f"sample {count}x{vocab} {name}",
                median_s([partial(ours, logits, rows)], seconds),
                median_s([partial(theirs, logits, rows)], seconds),
                num_bytes=logits.nbytes,
                flops=0,
            )


def bench_model(source: str, seconds: float) -> None:
    from inferax.loaders.model import load
    from inferax.models import decoder

    model = load(source or None)
    config = model.config
    groups = len(config.windows)

    def step(params: Any, tokens: Any, cache: Any, batch: Batch) -> tuple[Any, Any]:
        hidden, cache = decoder.forward(config, params, batch, cache)
        return jnp.argmax(decoder.logits(config, params, hidden[-1:]), axis=-1).astype(jnp.int32), cache

    compiled = jax.jit(step, donate_argnums=2)
    for context, new in ((64, 1), (1024, 1), (512, 512)):
        one = decode_batch(1, context, new)
        batch = Batch(**{**vars(one), "page_table": one.page_table * groups, "slots": one.slots * groups})
        shape = (int(one.page_table[0].size), 16, 2, config.num_kv_heads, config.head_dim)
        state = [tuple(jnp.zeros(shape, jnp.float32) for _ in config.layers)]

        def call(batch: Batch = batch, state: list[Any] = state) -> Any:
            out, state[0] = compiled(model.params, None, state[0], batch)
            return out

        took = median_s([call], seconds * 5)
        print(f"{model.source.name}: {new} tokens at {context}: {took * 1e3:.1f} ms, {new / took:.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="per row and implementation")
    parser.add_argument("--types", default=",".join(MAIN_TYPES), help="weight types, or 'all'")
    parser.add_argument("--model", help="time this model's steps too; an empty string is the default model")
    options = parser.parse_args()
    types = [*TYPES, "float32", "bfloat16", "float16"] if options.types == "all" else options.types.split(",")
    print(f"{machine()}; {platform.platform()}; Python {platform.python_version()}")
    print(f"jax {jax.__version__}, jaxlib {jaxlib.__version__}; kernels: {cpu.tiers()[-1]}")
    print(f"{'':34s} {'us':>10s} {'GB/s':>8s} {'GFLOP/s':>9s} {'XLA us':>10s} {'ratio':>8s}")
    bench_linear(types, options.seconds)
    bench_attention(options.seconds)
    bench_rows(options.seconds)
    bench_sample(options.seconds)
    if options.model is not None:
        bench_model(options.model, options.seconds)


if __name__ == "__main__":
    main()
