"""`build_engine`: a model, a runner, and a scheduler sized for the memory there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from inferax.engine.backend import Backend, XlaBackend
from inferax.engine.loop import scheduler_for
from inferax.engine.memory import available_memory
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from inferax.engine.sampler import LogitsProcessor
from inferax.engine.scheduler import Policy, Scheduler
from inferax.errors import RequestError
from inferax.loaders.cache import cache_folder
from inferax.loaders.model import Model, load
from inferax.models.config import ModelConfig
from inferax.ops.linear import Compute

_PAGE_SIZE = 16
_DEFAULT_KV_BYTES = 1 << 30


@dataclass
class Engine:
    """A model with what runs it. `config` is the model's, with the way to compute that was chosen."""

    model: Model
    config: ModelConfig
    runner: Runner
    scheduler: Scheduler
    max_model_len: int


def build_engine(
    model: str | os.PathLike[str] | Model | None = None,
    *,
    compute: Compute = "fast",
    dtype: Any = None,
    revision: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    kv_cache_memory_bytes: int | None = None,
    scheduling_policy: Policy = "fcfs",
    enable_prefix_caching: bool = True,
    progress: bool = False,
    logits_processors: Sequence[LogitsProcessor] = (),
    backend: Backend | None = None,
    on_compile: Callable[[str], object] | None = None,
) -> Engine:
    """Loads a model and builds its engine. The arguments are those of `LLM`.

    Raises LoadError or SourceError for a model that cannot be loaded, RequestError for an impossible size.
    """
    if compute not in ("exact", "fast"):
        raise RequestError("compute", f"{compute!r} is neither 'exact' nor 'fast'")
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if value < 1:
            raise RequestError(name, f"{value} is less than 1")
    backend = backend or XlaBackend(programs=cache_folder() / "programs", on_compile=on_compile)
    if isinstance(model, Model):
        loaded = model
    else:
        pack_for = "cpu" if compute == "fast" else None
        loaded = load(model, dtype=dtype, revision=revision, progress=progress, pack_for=pack_for)
    config = replace(loaded.config, compute=compute)
    cache_dtype = jnp.bfloat16 if compute == "fast" else jnp.float32
    shape = _shape(config, cache_dtype, max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory_bytes)
    longest = min(
        config.context_length,
        max_model_len or shape.pages_per_seq[0] * _PAGE_SIZE,
        shape.num_pages[0] * _PAGE_SIZE,
    )
    scheduler = scheduler_for(shape, config.windows, policy=scheduling_policy, caching=enable_prefix_caching)
    return Engine(
        loaded,
        config,
        Runner(config, shape, backend, loaded.params, cache_dtype, tuple(logits_processors)),
        scheduler,
        longest,
    )


def _shape(
    config: ModelConfig,
    cache_dtype: Any,
    max_model_len: int | None,
    max_seqs: int,
    max_tokens: int,
    kv_bytes: int | None,
) -> EngineShape:
    if max_model_len is not None and not 2 <= max_model_len <= config.context_length:
        raise RequestError("max_model_len", f"{max_model_len} is not in [2, {config.context_length}]")
    per_page = config.kv_bytes_per_token(cache_dtype) * _PAGE_SIZE
    wanted = -(-(max_model_len or config.context_length) // _PAGE_SIZE)
    budget = kv_bytes or min(_DEFAULT_KV_BYTES, available_memory() // 4)
    pages = min(budget // per_page, wanted * max_seqs)
    if pages < 1 or (max_model_len is not None and pages < wanted):
        need = wanted * per_page
        raise RequestError(
            "kv_cache_memory_bytes",
            f"{budget} bytes hold {pages * _PAGE_SIZE} tokens; one sequence of {wanted * _PAGE_SIZE} needs {need}",
        )
    groups = len(config.windows)
    return EngineShape(max_seqs, max_tokens, _PAGE_SIZE, (min(wanted, pages),) * groups, (pages,) * groups)
