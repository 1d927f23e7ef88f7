"""What int8 activations cost: perplexity of one text under files of many types, against float32 and llama.cpp.

    python benchmarks/perplexity.py [--types Q4_1,Q8_0,...] [--tokens 50000] [--context 512] [--model FILE]

The text is the language reference that comes with Python (pydoc's topics). Each file is quantized by llama.cpp from the
default model's own weights; "exact" multiplies the same weights with float32 activations, which is the reference. Every
engine cuts the text into the same windows and scores the second half of each. Ends with code 1 where fast is further
than 0.3 % from exact, or than 0.5 % from llama.cpp. Needs llama-cpp-python.
"""

from __future__ import annotations

import argparse
import math
import os
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from llama import decode, library
from quantized import quantized

import inferax
from inferax.loaders.sources import resolve
from inferax.serving.perplexity import measure
from kernels import machine

TYPES = ("Q4_1", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "Q5_K_M", "Q3_K_M", "Q2_K", "IQ4_XS", "BF16")
FROM_EXACT, FROM_PEER = 0.003, 0.005


def ours(path: Path, compute: Any, text: str, context: int) -> float:
    llm = inferax.LLM(
        path, compute=compute, max_num_seqs=4, max_num_batched_tokens=max(context, 256), max_model_len=context + 1,
        enable_prefix_caching=False,
    )  # fmt: skip
    return measure(llm, text, context).perplexity


def theirs(path: Path, ids: list[int], context: int, threads: int) -> float:
    """llama.cpp's perplexity of the same windows, from its logits."""
    lib = library()
    options = lib.llama_model_default_params()
    options.use_extra_bufts = False  # the file's own blocks
    model = lib.llama_model_load_from_file(os.fsencode(path), options)
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = context
    settings.n_threads = settings.n_threads_batch = threads
    running = lib.llama_init_from_model(model, settings)
    batch, vocab = lib.llama_batch_init(context, 0, 1), lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    first, total, count = context // 2, 0.0, 0
    for at in range(0, len(ids) - context + 1, context):
        window = ids[at : at + context]
        lib.llama_memory_clear(lib.llama_get_memory(running), True)
        decode(running, batch, [(token, i, 0, i >= first) for i, token in enumerate(window)])
        rows = context - first - 1
        logits = np.ctypeslib.as_array(lib.llama_get_logits(running), shape=(rows + 1, vocab))[:-1]
        top = logits.max(-1, keepdims=True)
        sums = np.log(np.exp(logits - top, dtype=np.float32).sum(-1, dtype=np.float64)) + top[:, 0]
        total += float((sums - logits[np.arange(rows), window[first + 1 :]]).sum())
        count += rows
    lib.llama_batch_free(batch)
    lib.llama_free(running)
    lib.llama_model_free(model)
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--model", help="a GGUF file to quantize (default: the built-in model)")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    source = resolve(args.model)
    tokenizer = inferax.load(source).tokenizer
    whole = "\n".join(pydoc_data.topics.topics.values())
    windows = -(-args.tokens // args.context)
    ids = tokenizer.encode(whole)[: windows * args.context]
    text = tokenizer.decode(ids)
    ids = tokenizer.encode(text)
    print(f"inferax on {machine()}; Python {sys.version.split()[0]}'s topics, {len(ids):,} tokens")
    print(f"{'type':<8} {'exact':>9} {'fast':>9} {'to exact':>9} {'llama.cpp':>9} {'to llama.cpp':>12}")
    failed = False
    for name in args.types.split(","):
        path = source if name == "Q4_1" and args.model is None else quantized(source, name)
        started = time.perf_counter()
        exact, fast = (ours(path, compute, text, args.context) for compute in ("exact", "fast"))
        peer = theirs(path, ids, args.context, os.cpu_count() or 1)
        bad = abs(fast / exact - 1) > FROM_EXACT or abs(fast / peer - 1) > FROM_PEER
        failed |= bad
        print(
            f"{name:<8} {exact:>9.4f} {fast:>9.4f} {fast / exact - 1:>+9.3%} {peer:>9.4f} {fast / peer - 1:>+12.3%}"
            f"{'  too far' if bad else ''}  [{time.perf_counter() - started:.0f} s]",
            flush=True,
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
