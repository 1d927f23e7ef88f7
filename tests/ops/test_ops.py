"""The shared suite (suite.py) over every op's cases, for every way that this platform can compute it."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import jax
import numpy as np
import pytest

import inferax.ops
from inferax.ops.op import Op
from tests.ops import cases, suite
from tests.ops.suite import Case, OpSuite, with_lowering

CASES = cases.all_cases()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is not None:
        metafunc.cls.parametrize(metafunc)


def served_by(op: Op[..., Any]) -> str:
    """Which lowering the public op has on this platform."""
    if jax.default_backend() in op.platforms:
        return "platform"
    return "reference" if op.default is op.reference else "default"


class TestPlatform(OpSuite):
    """What `op(...)` runs on this platform."""

    cases = CASES

    @staticmethod
    def native(op: Op[..., Any]) -> bool:
        return served_by(op) == "platform"

    def implementation(self, op: Op[..., Any]) -> Op[..., Any]:
        return op


class TestDefault(OpSuite):
    """The lowering for platforms without one of their own, where TestPlatform has not covered it."""

    cases = CASES
    eager = False

    @staticmethod
    def native(op: Op[..., Any]) -> bool:
        return False

    def implementation(self, op: Op[..., Any]) -> Op[..., Any] | None:
        return None if served_by(op) == "default" or op.default is op.reference else with_lowering(op, op.default)


class TestReference(OpSuite):
    """The op's meaning, where TestPlatform has not covered it."""

    cases = CASES
    eager = False

    @staticmethod
    def native(op: Op[..., Any]) -> bool:
        return False

    def implementation(self, op: Op[..., Any]) -> Op[..., Any] | None:
        return None if served_by(op) == "reference" else with_lowering(op, op.reference)


# Protects: the public functions hand every argument on to the right place.
@pytest.mark.parametrize("case", [c for c in CASES if c.transforms], ids=lambda case: case.id)
def test_public_function(case: Case) -> None:
    got = case.public(*case.operands, **case.static)
    jax.tree.map(np.testing.assert_array_equal, got, case.op(*case.operands, **case.static))


# Protects: no op is left out of the suite.
def test_every_op_has_cases() -> None:
    modules = [import_module(m.name) for m in pkgutil.iter_modules(inferax.ops.__path__, "inferax.ops.")]
    found = {id(v): v for m in modules for v in vars(m).values() if isinstance(v, Op)}
    assert {op.name for op in found.values()} == set(cases.GROUPS)
    assert {id(case.op) for case in CASES} == set(found)


# Protects: the suite itself. A lowering that is slightly off, in its value or not its own in the JVP, does not pass.
def test_suite_notices_a_wrong_lowering() -> None:
    case = next(c for c in CASES if c.id == "linear-odd-sizes")

    def slightly_off(*operands: Any, **static: Any) -> Any:
        return case.op.reference(*operands, **static) * np.float32(1.0001)

    class Wrong(OpSuite):
        def implementation(self, op: Op[..., Any]) -> Op[..., Any]:
            return with_lowering(op, slightly_off)

    with pytest.raises(AssertionError, match="more than allowed"):
        Wrong().test_value(case)


def test_suite_notices_a_wrong_gradient() -> None:
    def function(x: Any) -> Any:
        return (jax.lax.stop_gradient(x) * x).sum()

    with pytest.raises(AssertionError, match="gradient gives"):
        suite.GradientCheck(function, lambda x: float((x * x).sum()), (np.ones(3, np.float32),)).run()
