"""The one suite that every implementation of every op passes.

A backend gets it in three lines:

    class TestMine(OpSuite):
        def implementation(self, op: Op) -> Op | None:
            return with_lowering(op, my_function_for(op))

`implementation` returns an op to be tested in place of `op`, or None where the backend has none. The truth is each
case's oracle: plain numpy in float64, never the op's own reference. Gradients are checked against central differences
of the oracle. tests/ops/sharded.py runs `ShardedOpSuite` in the same way on four devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from inferax.ops.op import Op

FLOAT32_EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Case:
    """One call of an op and what it should give.

    oracle: takes the operands with every float leaf in float64, and the static keywords.
    public: the same call through the op's public function, as an eager call of (operands, static).
    tolerance: largest error allowed, as a multiple of the largest magnitude in the oracle's result.
    bound: where an error bound is known element by element: (operands, static) -> a pytree like the result.
    wrt: operands to differentiate; empty where the op's results are integers.
    vmaps: sets of operands to map over together; those within the op's row operands must fold into one native call.
    transforms: run it under jit, vmap and grad too. native: of use only where a platform has a kernel of its own.
    """

    op: Op[..., Any]
    name: str
    operands: tuple[Any, ...]
    static: Mapping[str, Any]
    oracle: Callable[..., Any]
    public: Callable[..., Any]
    tolerance: float = 1e-5
    bound: Callable[..., Any] | None = None
    wrt: tuple[int, ...] = ()
    vmaps: tuple[tuple[int, ...], ...] = ()
    transforms: bool = False
    native: bool = False

    @property
    def id(self) -> str:
        return f"{self.op.name}-{self.name}"


def with_lowering(op: Op[..., Any], function: Callable[..., Any]) -> Op[..., Any]:
    """The op with `function` as its lowering on every platform."""
    return Op(op.name, op.reference, function, op.rows)


def quick_jit(function: Callable[..., Any]) -> Any:
    """`jax.jit` with half the compile time, for programs that run once."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=options)


def is_float(x: Any) -> bool:
    """Whether a leaf holds numbers. The 8-bit types hold codes and the bytes of their scales, compared bit by bit."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating)) and x.dtype.itemsize > 1


def to_float64(tree: Any) -> Any:
    """Numpy leaves, the floats in float64."""

    def convert(x: Any) -> Any:
        array = np.asarray(x)
        return array.astype(np.float64) if is_float(x) else array

    return jax.tree.map(convert, tree)


def assert_close(got: Any, want: Any, tolerance: float, bound: Any = None) -> None:
    """Every leaf within `tolerance` of its largest magnitude, or within `bound`; NaN where the oracle has NaN."""
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got_leaves) == len(want_leaves)
    bounds = [None] * len(got_leaves) if bound is None else jax.tree.leaves(bound)
    for i, (g, w, b) in enumerate(zip(got_leaves, want_leaves, bounds, strict=True)):
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape, f"result {i} is {g.shape}, expected {w.shape}"
        if not is_float(w):
            if w.dtype.itemsize == 1:
                g, w = g.view(np.uint8), w.view(np.uint8)
            np.testing.assert_array_equal(g, w)
            continue
        g = g.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(g), np.isnan(w), err_msg=f"NaN in result {i}")
        known = ~np.isnan(w)
        allowed = tolerance * np.max(np.abs(w[known]), initial=0.0) if b is None else b[known]
        excess = np.abs(g - w)[known] - allowed
        worst = np.max(excess, initial=-np.inf)
        assert worst <= 0, f"result {i} is off by {worst:.3g} more than allowed"


def count_primitive(jaxpr: Any, name: str) -> tuple[int, int]:
    """How often a primitive stands at the top of a jaxpr, and how often inside loops and calls."""
    top = inside = 0
    for equation in jaxpr.eqns:
        top += equation.primitive.name == name
        # An op's call is opaque: nothing of it is inside the jaxpr.
        for sub in jaxprs_in_params(equation.params):
            inside += sum(count_primitive(sub, name))
    return top, inside


def replaced(operands: tuple[Any, ...], positions: tuple[int, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    out = list(operands)
    for position, value in zip(positions, values, strict=True):
        out[position] = value
    return tuple(out)


def variants(operand: Any, count: int) -> list[Any]:
    """`count` different operands of the same shape."""

    def vary(x: Any, i: int) -> Any:
        # Rows of blocks, ids and tokens change places; the values stay legal.
        return x * (1 - 0.25 * i) if is_float(x) else jnp.roll(x, i, axis=0)

    return [jax.tree.map(lambda x, i=i: vary(x, i), operand) for i in range(count)]


def cotangents(results: Any, seed: int) -> list[np.ndarray]:
    """Random weights of a scalar loss over the float results, float32 values in float64."""
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal(np.shape(x), np.float32).astype(np.float64) if is_float(x) else np.zeros(np.shape(x))
        for x in jax.tree.leaves(results)
    ]


def not_nan(results: Any) -> list[np.ndarray]:
    return [~np.isnan(x) for x in jax.tree.leaves(results)]


def loss_of(results: Any, weights: list[np.ndarray], known: list[np.ndarray], xp: Any) -> Any:
    """Weighted sum of the float results, without the places where the oracle has NaN."""
    total = xp.zeros(())
    for x, w, k in zip(jax.tree.leaves(results), weights, known, strict=True):
        if is_float(x):
            total = total + xp.sum(xp.where(k, x * xp.asarray(w, dtype=x.dtype), 0))
    return total


def directional(loss: Callable[[Any], float], at: Any, direction: Any, step: float = 1e-6) -> float:
    """Central difference of a float64 function of a pytree along a direction; integer leaves stay."""

    def moved(sign: float) -> Any:
        return jax.tree.map(lambda x, d: x + sign * step * d if is_float(x) else x, at, direction)

    return (loss(moved(1)) - loss(moved(-1))) / (2 * step)


def random_direction(tree: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def draw(x: np.ndarray) -> Any:
        # Where an operand is NaN (unused pages) it must not matter; there is no direction to go.
        return np.where(np.isnan(x), 0.0, rng.standard_normal(x.shape)) if is_float(x) else np.zeros(x.shape)

    return jax.tree.map(draw, tree)


def float_leaves(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if is_float(x)]


def with_floats(tree: Any, floats: list[Any]) -> Any:
    """The tree with its float leaves replaced, in order."""
    given = iter(floats)
    return jax.tree.map(lambda x: next(given) if is_float(x) else x, tree)


@dataclass(frozen=True)
class GradientCheck:
    """A scalar function of pytrees, in jax and as a float64 oracle, to be compared along random directions."""

    function: Callable[..., Any]
    oracle: Callable[..., float]
    operands: tuple[Any, ...]
    directions: int = field(default=3)

    def run(self) -> None:
        exact = to_float64(self.operands)
        floats = float_leaves(self.operands)

        def of_floats(values: list[Any]) -> Any:
            return self.function(*with_floats(self.operands, values))

        gradients = quick_jit(jax.grad(of_floats))(floats)
        for gradient in gradients:
            assert np.all(np.isfinite(gradient))
        for seed in range(self.directions):
            direction = random_direction(exact, seed)
            want = directional(lambda moved: self.oracle(*moved), exact, direction)
            products = [
                np.sum(np.asarray(g, np.float64) * d) for g, d in zip(gradients, float_leaves(direction), strict=True)
            ]
            size = sum(
                float(np.linalg.norm(g) * np.linalg.norm(d))
                for g, d in zip(gradients, float_leaves(direction), strict=True)
            )
            assert size > 0, "the gradient is zero everywhere: nothing was checked"
            error = abs(float(sum(products)) - want)
            assert error <= 2e-5 * size, f"direction {seed}: gradient gives {sum(products):.8g}, differences {want:.8g}"


class OpSuite:
    """Subclass it as Test…, with `cases` and `implementation`.

    compile: jit unless the backend runs jaxprs itself. eager: whether values are checked eagerly, not compiled.
    """

    cases: ClassVar[tuple[Case, ...]] = ()
    compile: ClassVar[Callable[[Callable[..., Any]], Callable[..., Any]]] = staticmethod(quick_jit)
    eager: ClassVar[bool] = True

    def implementation(self, op: Op[..., Any]) -> Op[..., Any] | None:
        """The op to test in place of `op`; None skips its cases."""
        raise NotImplementedError

    @staticmethod
    def native(op: Op[..., Any]) -> bool:
        """Whether the implementation computes `op` by kernels of its own, not by plain JAX."""
        return True

    @classmethod
    def parametrize(cls, metafunc: pytest.Metafunc) -> None:
        """Called by pytest_generate_tests: the cases that the implementation has and that the test is for."""
        if "case" not in metafunc.fixturenames:
            return
        suite = cls()
        chosen = [c for c in cls.cases if suite.implementation(c.op) is not None and (cls.native(c.op) or not c.native)]
        needs = {
            "test_compiled": lambda c: c.transforms and cls.eager,
            "test_gradient": lambda c: c.transforms and c.wrt,
            "test_jvp_keeps_the_primal": lambda c: c.transforms,
            "test_vmap": lambda c: c.transforms and c.vmaps,
            "test_gradient_of_vmap": lambda c: c.transforms and c.vmaps and c.wrt,
        }.get(metafunc.function.__name__, lambda _: True)
        chosen = [case for case in chosen if needs(case)]
        metafunc.parametrize("case", chosen, ids=[case.id for case in chosen])

    def call(self, case: Case) -> Callable[..., Any]:
        op = self.implementation(case.op)
        assert op is not None
        return lambda *operands: op(*operands, **case.static)

    def oracle(self, case: Case, *operands: Any) -> Any:
        return case.oracle(*to_float64(operands or case.operands), **case.static)

    # Protects: the op's values.
    def test_value(self, case: Case) -> None:
        call = self.call(case) if self.eager else self.compile(self.call(case))
        self.check(case, call(*case.operands), case.operands)

    def check(self, case: Case, got: Any, operands: tuple[Any, ...]) -> None:
        exact = to_float64(operands)
        bound = None if case.bound is None else case.bound(*exact, **case.static)
        assert_close(got, case.oracle(*exact, **case.static), case.tolerance, bound)

    # Protects: compiled, an op gives bit by bit what it gives eagerly.
    def test_compiled(self, case: Case) -> None:
        call = self.call(case)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(call)(*case.operands), call(*case.operands))

    # Protects: values under vmap, and that a vmap over rows stays one call of the native kernel.
    def test_vmap(self, case: Case) -> None:
        call = self.call(case)
        for positions in case.vmaps:
            mapped, axes = self._mapped(case, positions)
            jaxpr = jax.make_jaxpr(jax.vmap(call, in_axes=axes))(*mapped).jaxpr
            counts = count_primitive(jaxpr, f"inferax.{case.op.name}")
            folds = case.op.rows and set(positions) <= set(case.op.rows)
            assert counts == ((1, 0) if folds else (0, 1)), f"vmap over {positions}: {counts} calls outside and inside"
            got = self.compile(jax.vmap(call, in_axes=axes))(*mapped)
            for i in range(3):
                each = replaced(case.operands, positions, tuple(variants(case.operands[p], 3)[i] for p in positions))
                self.check(case, jax.tree.map(lambda x, i=i: x[i], got), each)

    # Protects: gradients of what is served, against differences of the oracle.
    def test_gradient(self, case: Case) -> None:
        call = self.call(case)
        want = self.oracle(case)
        weights, known = cotangents(want, 7), not_nan(want)

        def function(*given: Any) -> Any:
            return loss_of(call(*replaced(case.operands, case.wrt, given)), weights, known, jnp)

        def oracle(*given: Any) -> float:
            every = replaced(to_float64(case.operands), case.wrt, given)
            return float(loss_of(case.oracle(*every, **case.static), weights, known, np))

        GradientCheck(function, oracle, tuple(case.operands[i] for i in case.wrt)).run()

    # Protects: grad through vmap, summed over the mapped axis where an operand is shared.
    def test_gradient_of_vmap(self, case: Case) -> None:
        call = self.call(case)
        positions = case.vmaps[0]
        mapped, axes = self._mapped(case, positions)
        want = [self.oracle(case, *self._one(mapped, positions, i)) for i in range(3)]
        weights = [cotangents(w, i) for i, w in enumerate(want)]
        known = [
            [~np.isnan(x) if is_float(x) else np.ones(np.shape(x), bool) for x in jax.tree.leaves(w)] for w in want
        ]
        stacked_weights = [np.stack(w) for w in zip(*weights, strict=True)]
        stacked_known = [np.stack(k) for k in zip(*known, strict=True)]

        def function(*given: Any) -> Any:
            results = jax.vmap(call, in_axes=axes)(*replaced(mapped, case.wrt, given))
            return loss_of(results, stacked_weights, stacked_known, jnp)

        def oracle(*given: Any) -> float:
            every = replaced(to_float64(mapped), case.wrt, given)
            return float(
                sum(
                    loss_of(case.oracle(*self._one(every, positions, i), **case.static), weights[i], known[i], np)
                    for i in range(3)
                )
            )

        GradientCheck(function, oracle, tuple(mapped[i] for i in case.wrt), directions=1).run()

    # Protects: training sees what is served, bit by bit: in the JVP the primal is the op's own call.
    def test_jvp_keeps_the_primal(self, case: Case) -> None:
        call = self.call(case)
        floats = float_leaves(case.operands)

        def of_floats(values: list[Any]) -> Any:
            return call(*with_floats(case.operands, values))

        def jvp(values: list[Any]) -> tuple[Any, Any]:
            primals, tangents = jax.jvp(of_floats, (values,), (jax.tree.map(jnp.ones_like, values),))
            for p, t in zip(jax.tree.leaves(primals), jax.tree.leaves(tangents), strict=True):
                assert np.shape(p) == np.shape(t)
                assert t.dtype == (p.dtype if is_float(p) else jax.dtypes.float0)
            return jax.tree.leaves(primals), float_leaves(tangents)

        jaxpr = jax.make_jaxpr(jvp)(floats).jaxpr
        own = [e for e in jaxpr.eqns if e.primitive.name == f"inferax.{case.op.name}"]
        assert len(own) == 1
        assert jaxpr.outvars[: len(own[0].outvars)] == own[0].outvars

    @staticmethod
    def _mapped(case: Case, positions: tuple[int, ...]) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
        stacked = tuple(
            jax.tree.map(lambda *xs: jnp.stack(xs), *variants(case.operands[position], 3)) for position in positions
        )
        axes = tuple(0 if i in positions else None for i in range(len(case.operands)))
        return replaced(case.operands, positions, stacked), axes

    @staticmethod
    def _one(mapped: tuple[Any, ...], positions: tuple[int, ...], i: int) -> tuple[Any, ...]:
        return replaced(mapped, positions, tuple(jax.tree.map(lambda x: x[i], mapped[p]) for p in positions))


def collect(cases: Iterator[Case]) -> tuple[Case, ...]:
    """Cases with unique names."""
    found = tuple(cases)
    names = [case.id for case in found]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    return found
