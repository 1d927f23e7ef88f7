"""A tiny random model and an engine around it, for tests that need no real weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from inferax.engine.backend import Backend, XlaBackend
from inferax.engine.params import SamplingParams
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from inferax.engine.sequence import Sequence
from inferax.models.config import LayerSpec, ModelConfig
from inferax.models.weights import weight_entries
from inferax.ops.rotary import RotarySpec

CONFIG = ModelConfig(
    family="tiny", vocab_size=131, width=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=96,
    context_length=256, layers=(LayerSpec(20), LayerSpec(None)), rotaries=(RotarySpec(16),), norm_eps=1e-5,
)  # fmt: skip


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    params: dict[str, Any] = {"layers": [{} for _ in config.layers]}
    for entry in weight_entries(config):
        values = rng.standard_normal(entry.shape, np.float32) * (0.3 if entry.vectors else 2 / entry.shape[1] ** 0.5)
        array = jnp.asarray(values + (1 if entry.vectors else 0), jnp.float32)
        node: Any = params
        for key in entry.path[:-1]:
            node = node[key]
        node[entry.path[-1]] = array
    params["layers"] = tuple(params["layers"])
    return params


def engine(
    *, seqs: int = 4, budget: int = 32, pages: int = 64, backend: Backend | None = None, config: ModelConfig = CONFIG
) -> Runner:
    groups = len(config.windows)
    shape = EngineShape(seqs, budget, 16, (16,) * groups, (pages,) * groups)
    return Runner(config, shape, backend or XlaBackend(), random_params(config), jnp.float32)


def request(prompt: list[int], params: SamplingParams, **more: Any) -> Sequence:
    given = {"seed": 11, "index": 0, "max_tokens": params.max_tokens or 1, "eos_ids": frozenset[int]()} | more
    return Sequence(request_id="r", prompt=prompt, params=params, **given)
