"""inferax against llama.cpp: the same files, threads and machine, in turn in one run.

    python benchmarks/peers.py [--types Q4_1,Q4_0,Q4_K_M,Q8_0,Q6_K,BF16] [--model FILE ...] [--rounds 5] [--threads N]

Rows: a prompt of 512 tokens; 64 tokens of one sequence after a prompt of 32; the same of 16 sequences at once. Both
sides pick each token greedily; ours is the whole engine (scheduler, sampler, reading the tokens), theirs `llama_decode`
and its greedy sampler. Each side runs in a process of its own that sleeps while the other works. llama.cpp runs with
the best of its settings for each row (threads up to ours, flash attention, repacked weights), found before the rounds.
Build llama-cpp-python on this machine from source, with GGML_NATIVE=ON, or the comparison means nothing.
The first rows say what the machine's memory and arithmetic can give at most (limits.cc).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from llama import decode, library

PROMPT, SHORT, NEW, SEQUENCES = 512, 32, 64, 16
ROWS = {"prefill 512": (1, PROMPT, 0), "decode 1": (1, SHORT, NEW), "decode 16": (SEQUENCES, SHORT, NEW)}
TYPES = ("Q4_1", "Q4_0", "Q4_K_M", "Q8_0", "Q6_K", "BF16")
Setting = dict[str, int]


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(1000, 40_000, length)] for _ in range(count)]


class Ours:
    """The engine, with the prefix cache off."""

    def __init__(self, path: str, compute: Any) -> None:
        import inferax

        self._params = inferax.SamplingParams
        self._llm = inferax.LLM(
            path, compute=compute, max_num_seqs=SEQUENCES, max_num_batched_tokens=PROMPT, max_model_len=1024,
            enable_prefix_caching=False,
        )  # fmt: skip

    def run(self, count: int, length: int, new: int, seed: int, setting: Setting) -> float:
        """Tokens per second: of the prompt where `new` is 0, else of those generated after the first of each."""
        params = self._params(temperature=0, max_tokens=new + 1, ignore_eos=True, detokenize=False)
        given = prompts(count, length, seed)
        started = time.perf_counter()
        outputs = self._llm.generate(given, params)
        if new == 0:
            return count * length / (time.perf_counter() - started)
        metrics = [output.metrics for output in outputs]
        return count * new / (max(m.total_s for m in metrics) - max(m.time_to_first_token_s for m in metrics))


class Theirs:
    """llama.cpp through its C interface."""

    def __init__(self, path: str, compute: Any) -> None:
        self._lib, self._path = library(), path
        self._models: dict[int, Any] = {}
        self._contexts: dict[tuple[int, ...], Any] = {}
        self._sampler = self._lib.llama_sampler_init_greedy()
        self._batch = self._lib.llama_batch_init(PROMPT, 0, 1)

    def _context(self, setting: Setting) -> Any:
        lib, key = self._lib, (setting["threads"], setting["flash"], setting["repack"])
        if key not in self._contexts:
            if setting["repack"] not in self._models:
                options = lib.llama_model_default_params()
                options.use_extra_bufts = bool(setting["repack"])
                self._models[setting["repack"]] = lib.llama_model_load_from_file(os.fsencode(self._path), options)
            options = lib.llama_context_default_params()
            options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = 16 * 128, PROMPT, PROMPT, SEQUENCES
            options.n_threads = options.n_threads_batch = setting["threads"]
            options.flash_attn_type, options.kv_unified = setting["flash"], True
            options.no_perf = True
            self._contexts[key] = lib.llama_init_from_model(self._models[setting["repack"]], options)
        return self._contexts[key]

    def run(self, count: int, length: int, new: int, seed: int, setting: Setting) -> float:
        lib, context = self._lib, self._context(setting)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        given = prompts(count, length, seed)
        started = time.perf_counter()
        flat = [(t, i, s, i == length - 1) for s, prompt in enumerate(given) for i, t in enumerate(prompt)]
        decode(context, self._batch, flat)
        ends = [i for i, row in enumerate(flat) if row[3]]
        tokens = [lib.llama_sampler_sample(self._sampler, context, i) for i in ends]
        if new == 0:
            return count * length / (time.perf_counter() - started)
        started = time.perf_counter()
        for step in range(new):
            decode(context, self._batch, [(token, length + step, s, True) for s, token in enumerate(tokens)])
            tokens = [lib.llama_sampler_sample(self._sampler, context, i) for i in range(count)]
        return count * new / (time.perf_counter() - started)


def work(side: str, path: str, compute: str) -> None:
    """The loop of a worker: a call as a line of JSON, its answer as another."""
    engine = (Ours if side == "inferax" else Theirs)(path, compute)
    print("ready", flush=True)
    for line in sys.stdin:
        print(engine.run(**json.loads(line)), flush=True)


class WorkerError(RuntimeError):
    """A worker ended; an illegal instruction ends llama.cpp where its build and the machine do not agree."""


class Worker:
    def __init__(self, side: str, path: Path, compute: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", side, "--model", str(path), "--compute", compute],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"a worker ended with code {self._process.wait()}")
        return line

    def run(self, row: str, seed: int, setting: Setting) -> float:
        count, length, new = ROWS[row]
        assert self._process.stdin is not None
        call = {"count": count, "length": length, "new": new, "seed": seed, "setting": setting}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def measure_limits(threads: int) -> dict[str, float]:
    """What the machine gives with that many threads: bytes and multiply-adds per second. limits.cc measures it."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        source = Path(__file__).with_name("limits.cc")
        compiler = os.environ.get("CXX", "c++")
        subprocess.run(
            [compiler, "-std=c++20", "-O3", "-march=native", "-pthread", str(source), "-o", str(program)], check=True
        )
        done = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
        found: dict[str, float] = json.loads(done.stdout)
        return found


def best_setting(path: Path, row: str, threads: int) -> tuple[Setting, list[str]]:
    """llama.cpp's best setting for a row, and those under which it ended by a signal."""
    trials, fatal = [], []
    for repack, flash in itertools.product((1, 0), (1, 0)):
        worker = Worker("llama.cpp", path, "fast")
        try:
            for t in (threads // 2, threads) if threads > 2 else (threads,):
                setting = {"threads": t, "flash": flash, "repack": repack}
                trials.append((max(worker.run(row, i, setting) for i in range(2)), setting))
        except WorkerError:
            fatal.append(described(setting))
        worker.close()
    if not trials:
        raise WorkerError(f"llama.cpp runs {path} under none of its settings")
    return max(trials, key=lambda trial: trial[0])[1], fatal


def described(setting: Setting) -> str:
    flash, repack = "on" if setting["flash"] else "off", "repacked" if setting["repack"] else "as in the file"
    return f"{setting['threads']} threads, flash {flash}, {repack}"


def compare(path: Path, name: str, compute: str, rounds: int, threads: int) -> None:
    for row in ROWS:
        best, fatal = best_setting(path, row, threads)
        ours, theirs = Worker("inferax", path, compute), Worker("llama.cpp", path, compute)
        ours.run(row, 0, {})
        theirs.run(row, 0, best)
        mine, other = [], []
        for i in range(rounds):
            mine.append(ours.run(row, i, {}))
            other.append(theirs.run(row, i, best))
        ours.close()
        theirs.close()
        ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        note = described(best) + ("" if not fatal else f"; it dies with {', '.join(fatal)}")
        print(f"{name:<22} {row:<12} {spread(mine):>20} {spread(other):>20} {ratio:>7.2f}×  {note}", flush=True)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default=",".join(TYPES), help="of the default model, made by llama.cpp's quantizer")
    parser.add_argument("--model", action="append", default=[], help="a GGUF file besides, or instead with --types ''")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="at most, for llama.cpp")
    parser.add_argument("--compute", default="fast", choices=("fast", "exact"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.model[0], args.compute)
        return
    from quantized import quantized

    from inferax.loaders.sources import resolve
    from kernels import machine

    features = library().llama_print_system_info().decode()
    print(f"inferax {version('inferax')} ({args.compute}), jax {version('jax')}, on {machine()}")
    print(f"llama.cpp of llama-cpp-python {version('llama-cpp-python')}: {features}")
    default = resolve(None)
    files: list[tuple[str, Callable[[], Path]]] = [
        (f"SmolLM2 {t}", lambda t=t: default if t == "Q4_1" else quantized(default, t))
        for t in args.types.split(",") if t
    ]  # fmt: skip
    files += [(Path(model).stem[:22], lambda m=model: Path(m)) for model in args.model]
    for count in sorted({1, args.threads}):
        limits = ", ".join(f"{k} {v / 1e9:.0f}" for k, v in measure_limits(count).items() if k != "threads")
        print(f"limits, {count} threads (GB/s, 1e9 multiply-adds/s): {limits}")
    print(f"\n{'file':<22} {'row':<12} {'inferax tokens/s':>20} {'llama.cpp tokens/s':>20} {'ratio':>8}  its settings")
    for name, make in files:
        compare(make(), name, args.compute, args.rounds, args.threads)


if __name__ == "__main__":
    main()
