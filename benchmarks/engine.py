"""The engine itself: what a step costs the host, and what continuous batching and the prefix cache give.

    python benchmarks/engine.py [host] [throughput] [--requests 200] [--model SOURCE] [--no-peer]

host: time of `EngineCore.step` with a device that answers at once, so that only scheduling, packing, reading and
    accepting tokens are left; for 1 to 256 decoding sequences, and with 10,000 requests waiting besides.
throughput: requests with a shared system prompt and log-normal lengths, all given at once. Continuous batching against
    static batching (the next batch begins when the last of a batch has ended), with and without the prefix cache, and
    against transformers on torch: the same weights in float32, in left-padded static batches of the same size and by
    its own continuous batching. Every row generates the same number of tokens for each request; a static batch of
    transformers' goes on to its longest answer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import inferax
from inferax.engine.backend import Memory
from inferax.engine.core import EngineCore
from inferax.engine.loop import scheduler_for
from inferax.engine.params import SamplingParams
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from inferax.engine.sequence import Sequence as Seq
from inferax.loaders.sources import resolve
from inferax.models.config import ModelConfig
from kernels import machine


class Ready:
    """A host array that is there already."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)

    def result(self) -> np.ndarray:
        return self._array


class Stub:
    """A backend whose programs return zeros at once: what is left of a step is the host's own work."""

    def put(self, tree: Any) -> Any:
        return tree

    def compile(self, fn: Callable[..., Any], *avals: Any, donate: Sequence[int] = (), name: str) -> Any:
        out = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(fn, *avals))
        return lambda *args: out

    def get_async(self, handle: Any) -> Ready:
        return Ready(handle)

    def memory(self, executable: Any) -> Memory:
        return Memory(0, 0, 0, 0)


def host(config: ModelConfig, params: Any, steps: int) -> None:
    print("\nhost time per step (a stub for the device)")
    print(f"{'decoding':>9} {'waiting':>8} {'policy':>9} {'median µs':>10} {'p99 µs':>8}")
    for seqs, waiting, policy in (
        (1, 0, "fcfs"), (16, 0, "fcfs"), (64, 0, "fcfs"), (256, 0, "fcfs"),
        (16, 10_000, "fcfs"), (256, 10_000, "fcfs"), (256, 10_000, "priority"), (256, 10_000, "lpm"),
    ):  # fmt: skip
        groups = len(config.windows)
        shape = EngineShape(seqs, max(seqs, 16), 16, (32,) * groups, (32 * seqs + 1,) * groups)
        runner = Runner(config, shape, Stub(), params, np.float32)
        core = EngineCore(runner, scheduler_for(shape, config.windows, policy=policy))  # type: ignore[arg-type]
        rng = np.random.default_rng(0)
        endless = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=480)
        for i in range(seqs + waiting):
            prompt = [int(t) for t in rng.integers(1, 1000, 16)]
            core.add([Seq(str(i), prompt, endless, i, 0, 480, frozenset(), priority=int(i >= seqs))])
        while len(core.scheduler.running) < seqs or any(s.computed < s.prompt_len for s in core.scheduler.running):
            core.step()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            core.step()
            times.append((time.perf_counter() - started) * 1e6)
        print(f"{seqs:>9} {waiting:>8,} {policy:>9} {statistics.median(times):>10.0f} {np.quantile(times, 0.99):>8.0f}")


def workload(count: int, vocab: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate): a system prompt of 200 tokens, then log-normal lengths."""
    rng = np.random.default_rng(1)
    system = [int(t) for t in rng.integers(1000, vocab, 200)]
    prompts = np.clip(rng.lognormal(3.5, 0.8, count), 4, 250).astype(int)
    answers = np.clip(rng.lognormal(3.2, 0.8, count), 2, 200).astype(int)
    return [
        (system + [int(t) for t in rng.integers(1000, vocab, n)], int(m)) for n, m in zip(prompts, answers, strict=True)
    ]


def run_ours(
    model: inferax.Model, work: list[tuple[list[int], int]], batch: int, *, static: bool, cache: bool, compute: Any
) -> tuple[float, str]:
    llm = inferax.LLM(
        model, compute=compute, max_num_seqs=batch, max_num_batched_tokens=256, max_model_len=512,
        enable_prefix_caching=cache, kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True, detokenize=False) for _, m in work]
    for tokens in (1, 4, 16, 64, 250):  # every bucket is compiled before the clock starts
        llm.generate([[3] * tokens] * 2, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    llm.generate([[5 + i] for i in range(batch)], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    started = time.perf_counter()
    if static:
        for at in range(0, len(work), batch):
            llm.generate([p for p, _ in work[at : at + batch]], params[at : at + batch])
    else:
        llm.generate([p for p, _ in work], params)
    seconds = time.perf_counter() - started
    hits = {m.name: m.value for m in llm.metrics()}
    share = hits["prefix_cache_hits"] / max(hits["prefix_cache_queries"], 1)
    return seconds, f"{share:.0%} of prompt tokens from the cache" if cache else ""


def peer_model(path: Path) -> Any:
    """The weights in float32 in transformers' own model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    given = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    return AutoModelForCausalLM.from_pretrained(path.parent if given else path, dtype=torch.float32, **given).eval()


def run_static_peer(model: Any, work: list[tuple[list[int], int]], batch: int) -> float:
    """transformers' generate on left-padded batches in the order given; each runs until its longest answer is done."""
    import torch

    started = time.perf_counter()
    for at in range(0, len(work), batch):
        some = work[at : at + batch]
        longest = max(len(p) for p, _ in some)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in some])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in some])
        wanted = max(m for _, m in some)
        with torch.no_grad():
            model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=wanted, max_new_tokens=wanted, pad_token_id=0
            )
    return time.perf_counter() - started


def run_continuous_peer(model: Any, work: list[tuple[list[int], int]], batch: int) -> float:
    """transformers' continuous batching, with the same tokens per step, sequences at once, and shared prefixes."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(
            page_size=16, num_blocks=4096, max_batch_tokens=256, max_requests_per_batch=batch, use_cuda_graph=False
        ),
    )
    manager.start()
    started = time.perf_counter()
    for i, (prompt, wanted) in enumerate(work):
        manager.add_request(prompt, request_id=str(i), max_new_tokens=wanted)
    results: dict[str, Any] = {}
    while len(results) < len(work):
        if (result := manager.get_result(timeout=1)) is not None:
            results[result.request_id] = result
        elif not manager.is_running():
            raise RuntimeError("transformers' continuous batching ended early")
    seconds = time.perf_counter() - started
    manager.stop()
    for i, (_, wanted) in enumerate(work):
        assert len(results[str(i)].generated_tokens) == wanted, results[str(i)]
    return seconds


def throughput(source: str | None, count: int, batch: int, peer: bool) -> None:
    path = resolve(source)
    exact, fast = inferax.load(path), inferax.load(path, pack_for="cpu")
    work = workload(count, exact.config.vocab_size)
    tokens, prompts = sum(m for _, m in work), sum(len(p) for p, _ in work)
    print(f"\n{count} requests, {prompts:,} prompt tokens and {tokens:,} tokens to generate, {batch} sequences at once")
    rows: list[tuple[str, float, str]] = []
    for compute, model in (("exact", exact), ("fast", fast)):
        for static, cache in ((True, False), (False, False), (False, True)):
            name = f"inferax {compute}, {'static' if static else 'continuous'}, prefix cache {'on' if cache else 'off'}"
            rows.append((name, *run_ours(model, work, batch, static=static, cache=cache, compute=compute)))
            print_row(*rows[-1], rows[0][1], tokens)
    if peer:
        import torch
        import transformers

        model = peer_model(path)
        name = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, "
        seconds = run_static_peer(model, work, batch)
        print_row(name + "static", seconds, "up to the longest answer of each batch", rows[0][1], tokens)
        print_row(name + "continuous", run_continuous_peer(model, work, batch), "", rows[0][1], tokens)


def print_row(name: str, seconds: float, note: str, base: float, tokens: int) -> None:
    print(f"{name:<58} {seconds:>7.1f} s {tokens / seconds:>8.1f} tokens/s {base / seconds:>6.2f}×  {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], metavar="host|throughput")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", help="a source as for inferax.load (default: the built-in model)")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    args = parser.parse_args()
    parts = args.parts or ["host", "throughput"]
    print(f"inferax on {machine()}; jax {jax.__version__}, jaxlib {jaxlib.__version__}, numpy {np.__version__}")
    if "host" in parts:
        model = inferax.load(args.model)
        host(model.config, model.params, args.steps)
    if "throughput" in parts:
        throughput(args.model, args.requests, args.batch, not args.no_peer)


if __name__ == "__main__":
    main()
