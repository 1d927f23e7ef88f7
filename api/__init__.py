"""inferax: a pure-JAX inference engine for large language models with a functional core.

`inferax.load` gives a model as pure functions over a pytree of weights; `inferax.LLM` runs batches of requests, and
`inferax.AsyncEngine` serves many at once.
Names resolve on first use, so importing `inferax` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferax.engine.async_engine import AsyncEngine as AsyncEngine
    from inferax.engine.llm import LLM as LLM
    from inferax.engine.outputs import CompletionOutput as CompletionOutput
    from inferax.engine.outputs import RequestOutput as RequestOutput
    from inferax.engine.params import SamplingParams as SamplingParams
    from inferax.engine.sampler import LogitsProcessor as LogitsProcessor
    from inferax.engine.structured import StructuredOutputs as StructuredOutputs
    from inferax.errors import InferaxError as InferaxError
    from inferax.loaders.model import Model as Model
    from inferax.loaders.model import load as load

_HOMES = {
    "AsyncEngine": "inferax.engine.async_engine",
    "LLM": "inferax.engine.llm",
    "SamplingParams": "inferax.engine.params",
    "LogitsProcessor": "inferax.engine.sampler",
    "StructuredOutputs": "inferax.engine.structured",
    "RequestOutput": "inferax.engine.outputs",
    "CompletionOutput": "inferax.engine.outputs",
    "InferaxError": "inferax.errors",
    "Model": "inferax.loaders.model",
    "load": "inferax.loaders.model",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'inferax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
