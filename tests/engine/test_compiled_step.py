"""The compiled step of the real models: nothing is copied, temporaries are bounded, weights stay packed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import inferax
from inferax.engine.backend import XlaBackend, XlaExecutable, avals
from inferax.engine.programs import EngineShape, forward
from inferax.loaders.gguf import open_gguf
from inferax.loaders.model import weight_bytes
from inferax.ops.cache import cache_shape

LAYERS = 3


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> tuple[Path, inferax.Model]:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    return path, inferax.load(path)


def compiled_step(
    model: inferax.Model, tokens: int, seqs: int, context: int, pages: int, dtype: Any
) -> tuple[XlaBackend, XlaExecutable, int]:
    """The forward program of the model's first layers, from shapes alone; and the bytes of its cache."""
    config = replace(model.config, layers=model.config.layers[:LAYERS])
    groups = len(config.windows)
    shape = EngineShape(seqs, tokens, 16, (context // 16,) * groups, (pages,) * groups).batch_shape(tokens)
    leaf = jax.ShapeDtypeStruct(cache_shape(pages, 16, config.num_kv_heads, config.head_dim, dtype), dtype)
    cache = (leaf,) * LAYERS
    backend = XlaBackend()
    params = avals(model.params | {"layers": model.params["layers"][:LAYERS]})
    packed = jax.ShapeDtypeStruct((shape.packed_size,), jnp.int32)
    state = {"last_tokens": jax.ShapeDtypeStruct((seqs + 1,), jnp.int32)}
    executable = backend.compile(
        partial(forward, config, shape), params, packed, cache, state, donate=(2,), name="forward"
    )
    return backend, executable, LAYERS * leaf.size * leaf.dtype.itemsize


HLO_TYPES = {jnp.float32: "f32", jnp.bfloat16: "bf16", jnp.int8: "s8", jnp.float8_e4m3fn: "f8e4m3fn"}


@pytest.mark.parametrize("dtype", HLO_TYPES, ids=HLO_TYPES.values())
def test_cache_is_aliased_and_pages_cost_no_temporaries(case: tuple[Path, inferax.Model], dtype: Any) -> None:
    temporaries = []
    for pages in (256, 4096):
        backend, executable, cache_bytes = compiled_step(case[1], 64, 16, 2048, pages, dtype)
        memory = backend.memory(executable)
        assert memory.aliased >= cache_bytes, "the cache is not updated in place"
        temporaries.append(memory.temporaries)
        text = executable.compiled.as_text()
        assert f"{HLO_TYPES[dtype]}[{pages},16,2," in text
        copied = [
            line
            for line in text.splitlines()
            if f"[{pages},16,2," in line and any(f" {op}(" in line for op in ("copy", "convert", "bitcast-convert"))
        ]
        assert not copied, f"the pool is copied: {copied[0]}"
    assert temporaries[0] == temporaries[1], "temporaries grow with the number of pages"


def test_temporaries_are_bounded_at_64_sequences_of_8k(case: tuple[Path, inferax.Model]) -> None:
    """64 decode rows over 8k of context each, and 1,024 prefill rows: under 64 MB, however long the context."""
    for tokens in (64, 1024):
        sizes = []
        for context in (1024, 8192):
            backend, executable, _ = compiled_step(case[1], tokens, 64, context, 8192, jnp.bfloat16)
            sizes.append(backend.memory(executable).temporaries)
        print(f"{case[0].name}, {tokens} tokens: {sizes[1] / 1e6:.1f} MB of temporaries")
        assert sizes[1] <= 64e6
        assert sizes[1] - sizes[0] < 1e6, "temporaries grow with the context"


def test_leaves_per_layer(case: tuple[Path, inferax.Model]) -> None:
    """At most 7, the layer's cache and its share of the model's own leaves included; 9 where the file mixes types."""
    params = case[1].params
    layers = params["layers"]
    mixed = any(isinstance(weight, tuple) for layer in layers for weight in layer.values())
    per_layer = max(len(jax.tree.leaves(layer)) for layer in layers) + 1
    assert per_layer <= (9 if mixed else 7)
    assert len(jax.tree.leaves(params)) - len(jax.tree.leaves(layers)) <= 7


def test_weights_are_as_large_as_the_file(case: tuple[Path, inferax.Model]) -> None:
    path, model = case
    with open_gguf(path) as file:
        stored = sum(info.nbytes for info in file.tensors.values())
    print(f"{path.name}: {weight_bytes(model.params)} bytes of leaves, {stored} of tensors")
    assert weight_bytes(model.params) <= 1.03 * stored


@pytest.mark.parametrize("seqs", [1, 16, 64, 256, 300, 1000])
@pytest.mark.parametrize("tokens", [1, 16, 256, 1024, 2000, 8192])
def test_there_are_at_most_twelve_programs(seqs: int, tokens: int) -> None:
    shape = EngineShape(seqs, tokens, 16, (8,), (64,))
    assert len(shape.token_ladder) + len(shape.row_ladder) <= 12
    assert (shape.token_ladder[-1], shape.row_ladder[-1]) == (tokens, seqs)
    for ladder, most in ((shape.token_ladder, tokens), (shape.row_ladder, seqs)):
        assert list(ladder) == sorted(set(ladder)) and ladder[-1] == most
    for count in range(1, tokens + 1, 97):
        batch = shape.batch_shape(count)
        assert batch.tokens >= count and batch.rows >= min(count, seqs)
