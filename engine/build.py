"""`build_engine`: a model, a runner, and a scheduler sized for the memory there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from inferax.engine.backend import Backend, Executable, XlaBackend
from inferax.engine.compiled import Programs
from inferax.engine.loop import scheduler_for
from inferax.engine.memory import Demand, MemoryPlan, kv_dtype, memory_limit, plan_memory
from inferax.engine.runner import Runner
from inferax.engine.sampler import LogitsProcessor
from inferax.engine.scheduler import Policy, Scheduler
from inferax.errors import RequestError
from inferax.kernels import cpu
from inferax.loaders.cache import cache_folder
from inferax.loaders.model import Model, load
from inferax.loaders.progress import progress_class
from inferax.models.config import ModelConfig
from inferax.models.decoder import Params
from inferax.ops.linear import Compute


@dataclass
class Engine:
    """A model with what runs it. `config` is the model's, with the way to compute that was chosen."""

    model: Model
    config: ModelConfig
    runner: Runner
    scheduler: Scheduler
    plan: MemoryPlan

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len


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
    kv_cache_dtype: str = "auto",
    scheduling_policy: Policy = "fcfs",
    enable_prefix_caching: bool = True,
    progress: bool = False,
    logits_processors: Sequence[LogitsProcessor] = (),
    warm_up: bool = False,
    backend: Backend | None = None,
    on_compile: Callable[[str], object] | None = None,
) -> Engine:
    """Loads a model and builds its engine. The arguments are those of `LLM`.

    Memory is planned from the file's headers, so that what can't fit is refused before a weight is read. With `warm_up`
    the programs of all steps are built while the weights are read.
    Raises LoadError or SourceError for a model that cannot be loaded, RequestError for an impossible size,
    MemoryPlanError for one that does not fit.
    """
    if compute not in ("exact", "fast"):
        raise RequestError("compute", f"{compute!r} is neither 'exact' nor 'fast'")
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if value < 1:
            raise RequestError(name, f"{value} is less than 1")
    kv_name, cache_dtype = kv_dtype(kv_cache_dtype, compute)
    backend = backend or XlaBackend(programs=cache_folder() / "programs", on_compile=on_compile)
    loaded = model if isinstance(model, Model) else None
    start = _Start(
        backend,
        lambda config, weight_bytes: Demand(
            replace(config, compute=compute),
            weight_bytes,
            memory_limit(getattr(backend, "device", None), in_use=0 if loaded is None else weight_bytes),
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            kv_cache_memory_bytes,
            kv_name,
            tuple(logits_processors),
        ),
        cache_dtype,
        warm_up,
    )
    try:
        if isinstance(model, Model):
            start(model.config, model.params)
            loaded = model
        else:
            loaded = load(
                model,
                dtype=dtype,
                revision=revision,
                progress=progress,
                pack_for=weight_form(compute, backend),
                on_headers=start,
            )
        start.finish(progress)
    except BaseException:
        start.cancel()
        raise
    plan, programs = start.plan, start.programs
    config = programs.config
    scheduler = scheduler_for(plan.shape, config.windows, policy=scheduling_policy, caching=enable_prefix_caching)
    runner = Runner(config, plan.shape, backend, loaded.params, cache_dtype, tuple(logits_processors), programs)
    return Engine(loaded, config, runner, scheduler, plan)


@dataclass
class _Start:
    """Plans and begins to build programs as soon as headers are read; called with them."""

    backend: Backend
    demand_for: Callable[[ModelConfig, int], Demand]
    cache_dtype: Any
    warm_up: bool
    demand: Demand = field(init=False)
    plan: MemoryPlan = field(init=False)
    programs: Programs = field(init=False)
    _building: list[Future[Executable]] = field(init=False, default_factory=list)

    def __call__(self, config: ModelConfig, params: Params) -> None:
        self.demand = self.demand_for(config, weight_bytes(params))
        self._begin(params)

    def _begin(self, params: Params) -> None:
        d = self.demand
        self.plan = plan_memory(d)
        self.programs = Programs(d.config, self.plan.shape, self.backend, params, self.cache_dtype, d.processors)
        if self.warm_up:
            self._building = self.programs.start(self.programs.steps)

    def finish(self, progress: bool) -> None:
        """Waits for the programs, and corrects the plan by what they say that they need."""
        if not self.warm_up:
            return
        measured = self.programs.temporaries()
        plan = self.plan.with_temporaries(measured)
        if plan.total > plan.limit.bytes:  # the estimate was too low
            self.cancel()
            self.demand = replace(self.demand, temporaries=measured)
            self._begin(self.programs.params)
        else:
            self.plan = plan
        with progress_class(progress)(total=len(self._building), desc="Programs", leave=False) as bar:
            for future in as_completed(self._building):
                future.result()
                bar.update(1)

    def cancel(self) -> None:
        for future in self._building:
            future.cancel()


def weight_form(compute: Compute, backend: Backend) -> str | None:
    """The platform in whose form weights are kept: that of the backend, where its kernels are there to read it."""
    platform = getattr(getattr(backend, "device", None), "platform", None)
    return "cpu" if compute == "fast" and platform == "cpu" and cpu.available() else None


def weight_bytes(params: Params) -> int:
    """Bytes of weights, from the leaves' shapes."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
