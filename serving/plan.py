"""Where an engine's memory would go, and what would fit: from headers, and from the step's own programs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from inferax.engine.backend import Backend, XlaBackend
from inferax.engine.build import weight_bytes, weight_form
from inferax.engine.compiled import Programs
from inferax.engine.memory import Demand, MemoryPlan, kv_dtype, memory_limit, plan_memory
from inferax.errors import RequestError
from inferax.loaders.cache import cache_folder
from inferax.loaders.model import read_headers
from inferax.loaders.sources import resolve
from inferax.serving.session import keep_compilations, shows_progress
from inferax.serving.text import printable, with_unit


def plan(args: Namespace) -> int:
    """The command: prints the plan and returns the exit code. Raises MemoryPlanError where nothing fits as asked."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(args, name) < 1:
            raise RequestError(name, f"{getattr(args, name)} is less than 1")
    path = resolve(args.model, progress=shows_progress(args), revision=args.revision)
    keep_compilations()
    backend = XlaBackend(programs=cache_folder() / "programs")

    def note(text: str) -> None:
        if not args.quiet:
            print(f"[{text}]", file=sys.stderr, flush=True)

    found = plan_for(path, args, backend, note)
    print(
        json.dumps(_fields(path, found), indent=2, ensure_ascii=False) if args.json else printable(_table(path, found))
    )
    return 0


def plan_for(path: Path, args: Namespace, backend: Backend, note: Callable[[str], object]) -> MemoryPlan:
    """The plan of an engine with these arguments. Raises MemoryPlanError, or LoadError for a broken model."""
    name, dtype = kv_dtype(args.kv_cache_dtype, args.compute)
    config, params = read_headers(path, pack_for=weight_form(args.compute, backend))
    demand = Demand(
        replace(config, compute=args.compute),
        weight_bytes(params),
        memory_limit(getattr(backend, "device", None)),
        args.max_model_len,
        args.max_num_seqs,
        args.max_num_batched_tokens,
        args.kv_cache_memory_bytes,
        name,
    )
    found = plan_memory(demand)
    if args.no_compile:
        return found
    note("compiling the largest step, or restoring it, for what it needs; --no-compile estimates that")
    programs = Programs(demand.config, found.shape, backend, params, dtype)
    measured = programs.temporaries()
    corrected = found.with_temporaries(measured)
    if corrected.total <= corrected.limit.bytes:
        return corrected
    return plan_memory(replace(demand, temporaries=measured))


def _fields(path: Path, p: MemoryPlan) -> dict[str, object]:
    return {
        "source": str(path),
        **asdict(p),
        "total": p.total,
        "page_size": p.shape.page_size,
    }


def _table(path: Path, p: MemoryPlan) -> str:
    shape = p.shape
    lines = [("model", path.name, "")]
    lines += [(row.name, with_unit(row.bytes), row.how) for row in p.rows]
    share = 100 * p.total / p.limit.bytes
    lines.append(("total", with_unit(p.total), f"{share:.0f} % of {with_unit(p.limit.bytes)}, {p.limit.source}"))
    width = max(len(name) for name, _, _ in lines) + 2
    table = [f"{name:<{width}}{size:>11}  {how}".rstrip() for name, size, how in lines[1:]]
    at_once = f"{p.full_sequences} of {shape.max_seqs} sequences" if p.full_sequences < shape.max_seqs else "all"
    return "\n".join(
        [
            f"{'model':<{width}}{path.name}",
            *table,
            f"{'context':<{width}}{p.max_model_len:,} tokens",
            f"{'sequences':<{width}}{shape.max_seqs} at once, in steps of at most {shape.max_batched_tokens} tokens",
            f"{'KV tokens':<{width}}{p.kv_tokens:,}, which is {at_once} of full context",
        ]
    )
