"""How much memory there is, and what an engine will do with it: planned from headers, before any weight is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from inferax.engine.programs import EngineShape
from inferax.engine.sampler import LogitsProcessor, state_shapes
from inferax.errors import MemoryPlanError, RequestError
from inferax.models.config import ModelConfig
from inferax.ops.cache import cache_shape

PAGE_SIZE = 16
KV_DTYPES = ("f32", "bf16", "int8", "fp8")
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
# An automatic KV cache has room for this many tokens of each sequence at once; most never need more.
_TOKENS_PER_SEQ = 4096
_LEAST_CONTEXT = 256  # an automatic context is never shorter
_MOST_RESERVE = 1 << 30
_NO_LIMIT = 1 << 60  # version 1 of control groups writes almost 2**63 for "none"


@dataclass(frozen=True)
class Limit:
    """`bytes` that an engine may use, and what sets that bound."""

    bytes: int
    source: str


@dataclass(frozen=True)
class MemoryRow:
    """What one thing takes, and how that is known."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class MemoryPlan:
    """Where an engine's memory goes. Sizes are in bytes, lengths in tokens.

    max_model_len: the longest sequence. kv_tokens: what fits the KV cache's largest group. full_sequences: how many
    sequences of max_model_len fit at once.
    """

    rows: tuple[MemoryRow, ...]
    limit: Limit
    shape: EngineShape
    kv_cache_dtype: str
    max_model_len: int
    kv_tokens: int
    full_sequences: int

    @property
    def total(self) -> int:
        return sum(row.bytes for row in self.rows)

    def with_temporaries(self, measured: int) -> MemoryPlan:
        """The same plan with what the compiled programs say of themselves in place of the estimate."""
        row = MemoryRow("temporaries", measured, "by the compiled programs' own analysis")
        return replace(self, rows=tuple(row if r.name == row.name else r for r in self.rows))


@dataclass(frozen=True)
class Demand:
    """What is asked of a plan: `LLM`'s arguments, and what is known of the model and the machine.

    max_model_len, kv_bytes: None where the plan chooses. temporaries: what the compiled programs need besides their
    arguments, where that is known; None estimates it.
    """

    config: ModelConfig
    weight_bytes: int
    limit: Limit
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    kv_bytes: int | None = None
    kv_cache_dtype: str = "bf16"
    processors: tuple[LogitsProcessor, ...] = ()
    temporaries: int | None = None
    spare_windows: int = 2  # pages of windows, as a multiple of what the sequences hold

    @cached_property
    def blocks(self) -> int:
        """Pages that a sequence of full length spans."""
        return -(-(self.max_model_len or self.config.context_length) // PAGE_SIZE)


def plan_memory(demand: Demand) -> MemoryPlan:
    """The plan for a demand. Pure: nothing is allocated, no device is touched.

    The KV cache gets what `kv_bytes` holds, but never more pages than the sequences can fill. Where it is None: room
    for one sequence of full length, or for 4,096 tokens of each sequence if that is more; at most half of the memory
    that everything else leaves free, unless one sequence of an explicit `max_model_len` needs more than that.
    Without an explicit `max_model_len` the context shrinks to what fits.
    Raises MemoryPlanError where it does not fit; it names the numbers that would.
    """
    d = demand
    if d.max_model_len is not None and not 2 <= d.max_model_len <= d.config.context_length:
        raise RequestError("max_model_len", f"{d.max_model_len} is not in [2, {d.config.context_length}]")
    plan = _fit(d)
    if plan is None:
        raise MemoryPlanError(_at_fault(d), f"{_problem(d)}; {_advice(d)}")
    return plan


def kv_dtype(name: str, compute: str) -> tuple[str, Any]:
    """A KV cache's dtype by its name in the API: its own name, with "auto" resolved, and the dtype.

    Raises RequestError for an unknown name.
    """
    if name == "auto":
        name = "bf16" if compute == "fast" else "f32"
    if name not in _DTYPES:
        raise RequestError("kv_cache_dtype", f"{name!r} is none of auto, {', '.join(KV_DTYPES)}")
    return name, jnp.dtype(_DTYPES[name])


def pages_per_group(demand: Demand, pages: int) -> tuple[int, ...]:
    """The pages of each cache group when those of full attention have `pages`.

    A sequence holds a window's pages and those of the chunk under way. Where there is room, windows have twice that, so
    that prefixes that were computed before can still be found.
    """
    d = demand
    chunks = -(-d.max_num_batched_tokens // PAGE_SIZE)
    return tuple(
        pages if w is None else min(pages, d.spare_windows * d.max_num_seqs * (-(-w // PAGE_SIZE) + 1) + chunks + 1)
        for w in d.config.windows
    )


def _kv_bytes(d: Demand, counts: Sequence[int]) -> tuple[int, ...]:
    """Bytes of each group."""
    c, dtype = d.config, jnp.dtype(_DTYPES[d.kv_cache_dtype])
    page = prod(cache_shape(1, PAGE_SIZE, c.num_kv_heads, c.head_dim, dtype)) * dtype.itemsize
    layers = [sum(c.group(i) == g for i in range(c.num_layers)) for g in range(len(counts))]
    return tuple(page * n * count for n, count in zip(layers, counts, strict=True))


def _shape(d: Demand, pages: int) -> EngineShape:
    counts = pages_per_group(d, pages)
    blocks = (min(d.blocks, pages),) * len(counts)
    return EngineShape(d.max_num_seqs, d.max_num_batched_tokens, PAGE_SIZE, blocks, counts)


def estimate_temporaries(config: ModelConfig, shape: EngineShape) -> int:
    """What the widest program needs besides its arguments, before any is compiled: what was seen, rounded up."""
    c, rows, tokens = config, shape.row_ladder[-1], shape.token_ladder[-1]
    sample = max(16 * rows, 10 * min(tokens, 16)) * c.vocab_size
    activations = 6 * c.width + 4 * c.mlp_width + 3 * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return max(sample, 4 * tokens * activations) + (1 << 20)


def _rows(d: Demand, pages: int) -> tuple[MemoryRow, ...]:
    c, shape = d.config, _shape(d, pages)
    state = state_shapes(shape.max_seqs, c.vocab_size, shape.context, d.processors)  # nothing is traced for it
    rows = [MemoryRow("weights", d.weight_bytes, "from the file's headers")]
    for window, count, size in zip(c.windows, shape.num_pages, _kv_bytes(d, shape.num_pages), strict=True):
        kind = "full attention" if window is None else f"a window of {window} tokens"
        rows.append(MemoryRow(f"KV cache, {kind}", size, f"{count} pages of {PAGE_SIZE} tokens in {d.kv_cache_dtype}"))
    leaves = jax.tree.leaves(state)
    slots = f"{shape.max_seqs} sequences of {shape.context} tokens"
    rows.append(MemoryRow("sampler state", sum(x.size * x.dtype.itemsize for x in leaves), slots))
    if d.temporaries is None:
        rows.append(MemoryRow("temporaries", estimate_temporaries(c, shape), "estimated; nothing was compiled"))
    else:
        rows.append(MemoryRow("temporaries", d.temporaries, "by the compiled programs' own analysis"))
    rows.append(MemoryRow("reserve", min(d.limit.bytes // 10, _MOST_RESERVE), "left to everything else"))
    return tuple(rows)


def _fit(d: Demand) -> MemoryPlan | None:
    roomy = _fit_as_it_is(d)
    if roomy is not None and roomy.shape.pages_per_seq[0] == d.blocks:
        return roomy
    return _fit_as_it_is(replace(d, spare_windows=1))


def _fit_as_it_is(d: Demand) -> MemoryPlan | None:
    most = d.blocks * d.max_num_seqs
    if d.kv_bytes is None:
        most = min(most, max(d.blocks, d.max_num_seqs * -(-_TOKENS_PER_SEQ // PAGE_SIZE)))

    def total(pages: int) -> int:
        return sum(row.bytes for row in _rows(d, pages))

    def fits(pages: int) -> bool:
        size = sum(_kv_bytes(d, pages_per_group(d, pages)))
        if d.kv_bytes is not None:
            return size <= d.kv_bytes
        return 2 * size <= d.limit.bytes - (total(pages) - size)

    pages = _largest(fits, most)
    if d.kv_bytes is None and d.max_model_len is not None and pages < d.blocks:
        pages = d.blocks
    least = min(d.blocks, _LEAST_CONTEXT // PAGE_SIZE) if d.kv_bytes is None else 1
    if d.max_model_len is not None:
        least = d.blocks
    if pages < least or total(pages) > d.limit.bytes:
        return None
    shape = _shape(d, pages)
    longest = min(d.config.context_length, d.max_model_len or d.config.context_length, shape.context)
    return MemoryPlan(
        _rows(d, pages), d.limit, shape, d.kv_cache_dtype, longest, pages * PAGE_SIZE, pages // shape.pages_per_seq[0]
    )


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest of 1 … most that fits, 0 if none does; what is smaller than one that fits fits too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _at_fault(d: Demand) -> str:
    if d.kv_bytes is not None:
        return "kv_cache_memory_bytes"
    return "memory" if d.max_model_len is None else "max_model_len"


def _problem(d: Demand) -> str:
    d = replace(d, spare_windows=1)
    least = d.blocks if d.max_model_len is not None else min(d.blocks, _LEAST_CONTEXT // PAGE_SIZE)

    def size(pages: int) -> int:
        return sum(_kv_bytes(d, pages_per_group(d, pages)))

    given = d.kv_bytes
    if given is not None:
        held = _largest(lambda n: size(n) <= given, d.blocks)
        if held < (d.blocks if d.max_model_len is not None else 1):
            need = size(d.blocks)
            return f"{given} bytes hold {held * PAGE_SIZE} tokens; one sequence of {d.blocks * PAGE_SIZE} needs {need}"
    rest = sum(row.bytes for row in _rows(d, least)) - size(least)
    need = size(least) if given is None else given
    what = f"for a KV cache of {least * PAGE_SIZE} tokens" if given is None else "for the KV cache"
    return f"{need} bytes {what} and {rest} for the rest do not fit the {d.limit.bytes} of {d.limit.source}"


def _advice(d: Demand) -> str:
    """What would fit, each found by planning it."""
    ways: list[str] = []
    context = d.config.context_length

    def fits_len(length: int) -> bool:
        return length >= 2 and _fit(replace(d, max_model_len=length)) is not None

    # Any length below a page takes a whole one, so that pages are searched.
    blocks = _largest(lambda n: fits_len(min(n * PAGE_SIZE, context)), d.blocks)
    if blocks:
        ways.append(f"max_model_len {min(blocks * PAGE_SIZE, context)} with {d.max_num_seqs} sequences")
    seqs = _largest(lambda n: _fit(replace(d, max_num_seqs=n)) is not None, d.max_num_seqs - 1)
    if seqs:
        ways.append(f"max_num_seqs {seqs}")
    for name in KV_DTYPES:
        smaller = replace(d, kv_cache_dtype=name)
        if _page_bytes(smaller) < _page_bytes(d) and _fit(smaller) is not None:
            ways.append(f"kv_cache_dtype {name}")
            break
    if d.kv_bytes is not None:
        one = sum(_kv_bytes(d, pages_per_group(replace(d, spare_windows=1), d.blocks)))
        free = _fit(replace(d, kv_bytes=one if d.kv_bytes < one else None))
        if free is not None:
            ways.append(f"kv_cache_memory_bytes {sum(_kv_bytes(d, free.shape.num_pages))}")
    if ways:
        return "what fits: " + ", or ".join(ways)
    least = replace(d, max_model_len=min(context, PAGE_SIZE), max_num_seqs=1, kv_cache_dtype="int8", spare_windows=1)
    need = sum(row.bytes for row in _rows(least, 1))
    return f"even one sequence of {least.max_model_len} tokens needs {need}: it takes a smaller model or more memory"


def _page_bytes(d: Demand) -> int:
    return sum(_kv_bytes(d, (1,) * len(d.config.windows)))


def memory_limit(device: Any = None, *, in_use: int = 0) -> Limit:
    """What an engine on that device may use. in_use: bytes that count as the engine's already, as loaded weights do."""
    stats = None if device is None else device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return Limit(max(0, free) + in_use, f"the free memory of {device.device_kind}")
    tightest = min(host_limits(), key=lambda limit: limit.bytes)
    return Limit(tightest.bytes + in_use, tightest.source)


def available_memory() -> int:
    """Bytes that this process may still use: what the machine has free, within its control groups' limits."""
    return min(limit.bytes for limit in host_limits())


def host_limits(root: Path = Path("/")) -> list[Limit]:
    """What bounds this process: the machine's free memory, and each control group above it that has a limit.

    root: where the system's files are.
    """
    free = _meminfo(root / "proc/meminfo", "MemAvailable")
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Limit(free, "the machine's free memory")]
    for folder, version in _groups(root):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most, used = (_read(folder / name) for name in names)
        if most is not None and most < _NO_LIMIT:
            # The page cache goes when memory is short.
            key = "inactive_file" if version == 2 else "total_inactive_file"
            cached = _stat(folder / "memory.stat", key)
            left = max(0, most - max(0, (used or 0) - cached))
            limits.append(Limit(left, f"the control group's limit of {most} bytes"))
    return limits


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of the control groups that this process is in, from the innermost outwards, with the version of each."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        memberships = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        yield root / "sys/fs/cgroup", 2
        return
    paths = {"" if not names else "memory": path for _, names, path in memberships if not names or _has_memory(names)}
    for line in mounts:
        fields, _, kind = line.partition(" - ")
        where, rest = fields.split(), kind.split()
        if (
            len(where) < 5
            or len(rest) < 3
            or not (rest[0] == "cgroup2" or (rest[0] == "cgroup" and _has_memory(rest[2])))
        ):
            continue
        version = 2 if rest[0] == "cgroup2" else 1
        path = paths.get("" if version == 2 else "memory")
        if path is None:
            continue
        top = root / where[4].lstrip("/")
        # In a container the mount shows the group's own folder, and the path is told from outside.
        inside = path.removeprefix(where[3].rstrip("/")) if where[3] != "/" else path
        folder = top / inside.strip("/")
        for group in (folder, *folder.parents):
            if group.is_dir():
                yield group, version
            if group == top:
                break


def _has_memory(names: str) -> bool:
    return "memory" in names.split(",")


def _meminfo(path: Path, key: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, value = line.split(":")
            if name == key:
                return int(value.split()[0]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, value = line.split()
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
