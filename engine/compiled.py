"""`Programs`: the compiled programs of an engine, from shapes alone: when first needed, or beforehand in threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from inferax.engine.backend import Backend, Executable, avals
from inferax.engine.programs import EngineShape, forward, forward_all, sampler_params, score
from inferax.engine.sampler import ROW_SIZE, LogitsProcessor, load_slot, processors_key, sample_step, state_shapes
from inferax.models.config import ModelConfig
from inferax.models.decoder import Params
from inferax.ops.batch import BatchShape
from inferax.ops.cache import cache_shape
from inferax.ops.sampler_rows import words_for

Key = tuple[str, int]  # what a program does, and its bucket
_log = logging.getLogger(__name__)


@dataclass
class Programs:
    """Threads may share it; a program is built once. `params` may be arrays or their shapes."""

    config: ModelConfig
    shape: EngineShape
    backend: Backend
    params: Params
    cache_dtype: Any
    processors: tuple[LogitsProcessor, ...] = ()
    _built: dict[Key, Future[Executable]] = field(init=False, default_factory=dict)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.params = avals(self.params)

    @property
    def steps(self) -> list[Key]:
        """The programs of every step that samples, those of the widest buckets first."""
        tokens, rows = self.shape.token_ladder[::-1], self.shape.row_ladder[::-1]
        return [("empty", 0), *(("forward", n) for n in tokens), *(("sample", n) for n in rows), ("load slot", 0)]

    @property
    def scoring(self) -> list[Key]:
        """The programs that score prompts besides."""
        return [(kind, n) for n in self.shape.token_ladder[::-1] for kind in ("forward_all", "score")]

    def get(self, key: Key) -> Executable:
        """A program, built now where it is not there; waits where another thread is building it."""
        with self._lock:
            future = self._built.get(key)
            mine = future is None
            if future is None:
                future = self._built[key] = Future()
        if mine:
            try:
                future.set_result(self._build(*key))
            except BaseException as error:
                with self._lock:
                    del self._built[key]  # another try may do better
                future.set_exception(error)
        return future.result()

    def there(self, keys: Iterable[Key]) -> bool:
        """Whether all of them are built."""
        with self._lock:
            return all((found := self._built.get(key)) is not None and found.done() for key in keys)

    def start(self, keys: Iterable[Key], threads: int = 2) -> list[Future[Executable]]:
        """Builds programs in threads of their own, in order; returns at once."""
        pool = ThreadPoolExecutor(threads, thread_name_prefix="inferax-build")
        started = [pool.submit(self.get, key) for key in keys]
        pool.shutdown(wait=False)
        return started

    def temporaries(self) -> int:
        """Bytes that the largest step needs between its inputs and outputs."""
        tokens, rows = self.shape.token_ladder[-1], self.shape.row_ladder[-1]
        return max(self.backend.memory(self.get(key)).temporaries for key in (("forward", tokens), ("sample", rows)))

    def _build(self, kind: str, size: int) -> Executable:
        _log.info("building %s %s", kind, size or "")
        build: dict[str, Callable[[], Executable]] = {
            "empty": self._empty,
            "forward": lambda: self._forward(forward, size),
            "forward_all": lambda: self._forward(forward_all, size),
            "score": lambda: self._score(size),
            "sample": lambda: self._sample(size),
            "load slot": self._load_slot,
        }
        return build[kind]()

    @cached_property
    def memory(self) -> tuple[Any, Any]:
        """Shapes of the KV cache and of the sampler's state."""
        c, s = self.config, self.shape
        cache = tuple(
            jax.ShapeDtypeStruct(
                cache_shape(s.num_pages[c.group(i)], s.page_size, c.num_kv_heads, c.head_dim, self.cache_dtype),
                self.cache_dtype,
            )
            for i in range(c.num_layers)
        )
        return cache, state_shapes(s.max_seqs, c.vocab_size, s.context, self.processors)

    @cached_property
    def _sampler_params(self) -> Params:
        return sampler_params(self.config, self.params)

    @cached_property
    def _key(self) -> str:
        """What the shapes of a program's arguments do not say."""
        c, s = self.config, self.shape
        key = processors_key(self.processors, c.vocab_size, s.context)
        return f"{s.num_pages}, {s.page_size}, {jnp.dtype(self.cache_dtype).name}, {s.max_seqs}, {s.context}, {key}"

    def _empty(self) -> Executable:
        def zeros() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.memory)

        return self.backend.compile(zeros, name=f"empty cache({self.config}, {self._key})")

    def _forward(self, function: Callable[..., Any], tokens: int) -> Executable:
        shape: BatchShape = self.shape.batch_shape(tokens)
        cache, state = self.memory
        packed = jax.ShapeDtypeStruct((shape.packed_size,), jnp.int32)
        return self.backend.compile(
            partial(function, self.config, shape),
            *(self.params, packed, cache, {"last_tokens": state["last_tokens"]}),
            donate=(2,),
            name=f"{function.__name__}({self.config}, {shape})",
        )

    def _score(self, tokens: int) -> Executable:
        hidden = jax.ShapeDtypeStruct((tokens, self.config.width), jnp.float32)
        ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        name = f"score({self.config}, {tokens})"
        return self.backend.compile(partial(score, self.config), self._sampler_params, hidden, ids, name=name)

    def _sample(self, rows: int) -> Executable:
        hidden = jax.ShapeDtypeStruct((rows, self.config.width), jnp.float32)
        packed = jax.ShapeDtypeStruct((rows, ROW_SIZE), jnp.int32)
        masks = jax.ShapeDtypeStruct((rows, words_for(self.config.vocab_size)), jnp.uint32)
        return self.backend.compile(
            partial(sample_step, self.config, self.processors),
            *(self._sampler_params, hidden, packed, masks, self.memory[1]),
            donate=(4,),
            name=f"sample({self.config}, {rows}, {self._key})",
        )

    def _load_slot(self) -> Executable:
        state = self.memory[1]
        row = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), {k: v for k, v in state.items() if k != "last_tokens"}
        )
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        return self.backend.compile(load_slot, state, slot, row, donate=(0,), name=f"load slot({self._key})")
