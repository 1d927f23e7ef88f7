"""Ops under `shard_map` on four devices: values, gradients and collectives. test_sharded.py runs it in a process of
its own, because the number of devices is fixed when jax starts.

Programs are sharded with `check_vma` off: with it on, a custom primitive fails or hides a missing psum. So what is
checked here is that values and gradients are those of the unsharded op, and that exactly the collectives that a layer
needs are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.shapes import MIXED, ModelShape
from inferax.ops import attention, linear, logprobs, norm, sample
from inferax.ops.collectives import all_reduce
from inferax.ops.op import Op
from inferax.ops.packed import PackedWeight
from tests.ops.cases import Draw, attention_case, sampler_rows
from tests.ops.suite import is_float, quick_jit, with_lowering
from tests.ops.weights import packed_weight

DEVICES = 4
MESH = jax.make_mesh((DEVICES,), ("model",), devices=jax.devices()[:DEVICES])

MLP = {"activation": "silu", "scale": 1.0, "compute": "exact"}
PLAIN = {"activation": None, "scale": 1.0, "compute": "exact"}


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A program of one op in two forms: whole, and as a shard of `MESH`."""

    name: str
    op: Op[..., Any]
    whole: Callable[..., Any]
    shard: Callable[..., Any]
    operands: tuple[Any, ...]
    in_specs: tuple[Any, ...]
    out_specs: Any
    all_reduces: int
    differentiable: tuple[int, ...]


def programs(use: Callable[[Op[..., Any]], Op[..., Any]]) -> Iterator[Sharded]:
    d = Draw(20)
    rows, spread = P("model"), P(None, "model")
    everywhere = P()

    op = use(norm._norm)
    yield Sharded(
        "norm-rows", norm._norm, op, op, (d.normal(8, 24), d.norm(24)), (rows, everywhere), rows, 0, (0, 1)
    )  # fmt: skip

    lin = use(linear._linear)

    def whole_linear(x: Any, w: Any, n: Any = None, bias: Any = None) -> Any:
        return lin(x, w, n, bias, None, None, **PLAIN)

    def row_parallel(x: Any, w: Any) -> Any:
        return all_reduce(whole_linear(x, w), "model")

    yield Sharded(
        "linear-rows", linear._linear, whole_linear, whole_linear,
        (d.normal(8, 24), d.weight(20, 24)), (rows, everywhere), rows, 0, (0, 1),
    )  # fmt: skip
    yield Sharded(
        "linear-columns", linear._linear, whole_linear, whole_linear,
        (d.normal(5, 24), d.weight(20, 24), d.norm(24), d.normal(20)), (everywhere, rows, everywhere, rows), spread,
        0, (0, 1, 2, 3),
    )  # fmt: skip
    yield Sharded(
        "linear-inner", linear._linear, whole_linear, row_parallel,
        (d.normal(5, 24), d.weight(20, 24)), (spread, spread), everywhere, 1, (0, 1),
    )  # fmt: skip
    for kind in ("Q4_1", "Q4_K"):
        w = packed_weight(kind, 32, 1024)
        yield Sharded(
            f"linear-columns-{kind}", linear._linear, whole_linear, whole_linear,
            (d.normal(5, 1024), w), (everywhere, PackedWeight(rows, w.layout)), spread, 0, (0,),
        )  # fmt: skip
        yield Sharded(
            f"linear-inner-{kind}", linear._linear, whole_linear, row_parallel,
            (d.normal(5, 1024), w), (spread, PackedWeight(spread, w.layout)), everywhere, 1, (0,),
        )  # fmt: skip

    mlp = use(linear._gated_mlp)

    def whole_mlp(x: Any, pair: Any, down: Any, n: Any) -> Any:
        return mlp(x, pair.reshape(-1, pair.shape[-1]), down, n, None, None, None, None, **MLP)

    def shard_mlp(x: Any, pair: Any, down: Any, n: Any) -> Any:
        return all_reduce(whole_mlp(x, pair, down, n), "model")

    yield Sharded(
        "gated-mlp", linear._gated_mlp, whole_mlp, shard_mlp,
        (d.normal(5, 24), d.normal(2, 32, 24, scale=0.2), d.weight(24, 32), d.norm(24)),
        (everywhere, spread, spread, everywhere), everywhere, 1, (0, 1, 2, 3),
    )  # fmt: skip

    emb = use(linear._embed)
    yield Sharded(
        "embed-rows", linear._embed, partial(emb, scale=2.0), partial(emb, scale=2.0),
        (d.ids(8, below=40), d.normal(40, 12)), (rows, everywhere), rows, 0, (1,),
    )  # fmt: skip

    lp = use(logprobs._logprobs)
    whole_logprobs = partial(lp, softcap=None, scale=1.0)
    yield Sharded(
        "logprobs-rows", logprobs._logprobs, whole_logprobs, whole_logprobs,
        (d.normal(8, 12), d.weight(40, 12), d.norm(12), d.ids(8, 2, below=40)), (rows, everywhere, everywhere, rows),
        (rows, rows), 0, (0, 1, 2),
    )  # fmt: skip

    smp = use(sample._sample)
    yield Sharded(
        "sample-rows", sample._sample, smp, smp,
        (d.normal(8, 777), sampler_rows(8, temperature=[0, 1] * 4, top_p=0.9), None), (rows, rows, rows), (rows, rows),
        0, (),
    )  # fmt: skip

    att = use(attention._attention)
    case = attention_case("heads", MIXED, ModelShape("tiny", 32, 8, 4, 8, 64, 100, 1e-6, 1e4), rotary_dim=8, window=20)
    qkv, cache, batch, angles, _, _ = case.operands
    spec = case.static["spec"]
    local = dataclasses.replace(spec, num_heads=spec.num_heads // DEVICES, num_kv_heads=spec.num_kv_heads // DEVICES)
    q, kv = jnp.split(jnp.nan_to_num(qkv), [spec.num_heads * spec.head_dim], axis=1)
    kv = kv.reshape(len(kv), 2, -1)

    def heads(spec: Any, q: Any, kv: Any, cache: Any, batch: Any, angles: Any) -> Any:
        fused = jnp.concatenate([q, kv.reshape(len(kv), -1)], axis=1)
        return att(fused, cache, batch, angles, None, None, spec=spec)

    of_heads = P(None, None, None, "model")
    yield Sharded(
        "attention-heads", attention._attention, partial(heads, spec), partial(heads, local),
        (q, kv, cache, batch, angles), (spread, P(None, None, "model"), of_heads, everywhere, everywhere),
        (spread, of_heads), 0, (0, 1, 2),
    )  # fmt: skip


NAMES = [program.name for program in programs(lambda op: op)]


def weighted(results: Any) -> Any:
    """A scalar that every float result moves, unused pages aside."""
    total = jnp.zeros(())
    for i, x in enumerate(jax.tree.leaves(results)):
        if is_float(x):
            weights = np.random.default_rng(i).standard_normal(x.shape).astype(np.float32)
            total = total + jnp.sum(jnp.where(jnp.isnan(x), 0, x * weights))
    return total


class ShardedOpSuite:
    """Subclass it as Test…, with `use`: the implementation of an op, None where there is none to test."""

    def use(self, op: Op[..., Any]) -> Op[..., Any] | None:
        raise NotImplementedError

    @pytest.fixture(params=NAMES)
    def program(self, request: pytest.FixtureRequest) -> Sharded:
        plain = next(p for p in programs(lambda op: op) if p.name == request.param)
        if self.use(plain.op) is None:
            pytest.skip("covered by another class")
        return next(p for p in programs(lambda op: self.use(op) or op) if p.name == request.param)

    @staticmethod
    def mapped(program: Sharded) -> Callable[..., Any]:
        return jax.shard_map(
            program.shard, mesh=MESH, in_specs=program.in_specs, out_specs=program.out_specs, check_vma=False
        )  # fmt: skip

    # Protects: each shard computes its part with the same op, and nothing is gathered that need not be.
    def test_value_and_collectives(self, program: Sharded) -> None:
        compiled = quick_jit(self.mapped(program)).lower(*self.placed(program)).compile()
        got = compiled(*self.placed(program))
        want = program.whole(*program.operands)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(w), initial=0))
        text = compiled.as_text()
        assert text.count(" all-reduce(") == program.all_reduces
        for other in ("all-gather(", "all-to-all(", "collective-permute(", "reduce-scatter("):
            assert other not in text, f"{program.name} has an {other[:-1]}"

    def test_gradient(self, program: Sharded) -> None:
        if not program.differentiable:
            pytest.skip("integer results")

        def gradient(function: Callable[..., Any]) -> Any:
            return quick_jit(jax.grad(lambda *given: weighted(function(*given)), argnums=program.differentiable))

        got = gradient(self.mapped(program))(*self.placed(program))
        want = gradient(program.whole)(*program.operands)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.any(w)
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5 * np.max(np.abs(w)))

    @staticmethod
    def placed(program: Sharded) -> tuple[Any, ...]:
        def place(operand: Any, spec: Any) -> Any:
            spec = spec.data if isinstance(spec, PackedWeight) else spec
            return jax.device_put(operand, jax.sharding.NamedSharding(MESH, spec))

        return tuple(place(o, s) for o, s in zip(program.operands, program.in_specs, strict=True))


class TestPlatform(ShardedOpSuite):
    def use(self, op: Op[..., Any]) -> Op[..., Any]:
        return op


class TestDefault(ShardedOpSuite):
    def use(self, op: Op[..., Any]) -> Op[..., Any] | None:
        native = jax.default_backend() in op.platforms
        return with_lowering(op, op.default) if native else None
