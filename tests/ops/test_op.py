"""`Op`: how a primitive is made from a reference, and how platforms add to it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferax.ops.op import Op


def scaled_product(x: Any, w: Any, bias: Any, *, scale: float) -> Any:
    y = x @ w.T * scale
    return y if bias is None else y + bias


X = jnp.arange(12.0).reshape(3, 4)
W = jnp.arange(20.0).reshape(5, 4) / 10


def make(**more: Any) -> Op[..., Any]:
    return Op("scaled_product", scaled_product, rows=(0,), **more)


def lowered(function: Any, *args: Any, platform: str) -> str:
    return str(jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text())


# Protects: a platform's lowering is used there and nowhere else, chosen when a program is lowered.
def test_lowering_is_chosen_per_platform() -> None:
    op = make()
    op.implement("cpu", lambda x, w, bias, *, scale: jnp.full((x.shape[0], w.shape[0]), 42.0))
    np.testing.assert_array_equal(op(X, W, None, scale=2.0), np.full((3, 5), 42.0))

    def call(x: Any) -> Any:
        return op(x, W, None, scale=2.0)

    assert "dot_general" not in lowered(call, X, platform="cpu")
    assert "dot_general" in lowered(call, X, platform="cuda")
    assert op.platforms == ("cpu",)


def test_default_differs_from_reference_only_in_the_lowering() -> None:
    op = make(default=lambda x, w, bias, *, scale: jnp.zeros((x.shape[0], w.shape[0])))
    np.testing.assert_array_equal(op(X, W, None, scale=2.0), np.zeros((3, 5)))
    gradient = jax.grad(lambda w: op(X, w, None, scale=2.0).sum())(W)
    np.testing.assert_allclose(gradient, np.broadcast_to(2 * np.asarray(X).sum(0), (5, 4)))


def test_a_lowering_may_decline() -> None:
    op = make()
    declined = []

    def only_wide(x: Any, w: Any, bias: Any, *, scale: float) -> Any:
        if w.shape[0] < 100:
            declined.append(w.shape)
            return NotImplemented
        raise AssertionError("not reached")

    op.implement("cpu", only_wide)
    np.testing.assert_allclose(op(X, W, None, scale=2.0), np.asarray(X) @ np.asarray(W).T * 2)
    assert declined == [(5, 4)]


# Protects: training log-probabilities are the served ones. Only the tangent is the reference's.
def test_jvp_runs_the_platforms_primal() -> None:
    op = make()
    op.implement("cpu", lambda x, w, bias, *, scale: scaled_product(x, w, bias, scale=scale) + 100)
    primal, tangent = jax.jvp(lambda x: op(x, W, None, scale=2.0), (X,), (jnp.ones_like(X),))
    np.testing.assert_allclose(primal, np.asarray(X) @ np.asarray(W).T * 2 + 100)
    np.testing.assert_allclose(tangent, np.ones((3, 4)) @ np.asarray(W).T * 2)
    value, _ = jax.jit(jax.value_and_grad(lambda x: op(x, W, None, scale=2.0).sum()))(X)
    np.testing.assert_allclose(value, np.asarray(primal).sum(), rtol=1e-6)


# Protects: a vmap over rows reaches the platform's kernel once, with all rows in one call.
def test_vmap_folds_rows_into_one_call() -> None:
    op = make()
    shapes = []

    def seen(x: Any, w: Any, bias: Any, *, scale: float) -> Any:
        shapes.append(x.shape)
        return scaled_product(x, w, bias, scale=scale)

    op.implement("cpu", seen)
    stacked = jnp.stack([X, 2 * X])
    out = jax.vmap(lambda x: op(x, W, None, scale=1.0))(stacked)
    assert shapes == [(6, 4)]
    np.testing.assert_allclose(out, np.asarray(stacked) @ np.asarray(W).T)


def test_vmap_of_an_inner_axis() -> None:
    op = make()
    stacked = jnp.stack([X, 2 * X], axis=1)  # [3, 2, 4]
    out = jax.vmap(lambda x: op(x, W, None, scale=1.0), in_axes=1, out_axes=1)(stacked)
    np.testing.assert_allclose(out, np.asarray(stacked) @ np.asarray(W).T)


def test_nested_vmap() -> None:
    op = make()
    xs, ws = jnp.stack([X, 2 * X]), jnp.stack([W, -W, 3 * W])
    out = jax.vmap(lambda w: jax.vmap(lambda x: op(x, w, None, scale=1.0))(xs))(ws)
    np.testing.assert_allclose(out, np.einsum("btk,wnk->wbtn", xs, ws), rtol=1e-6)


def test_second_derivatives() -> None:
    op = Op("square", lambda x: x * x)
    np.testing.assert_allclose(jax.hessian(lambda x: op(x).sum())(jnp.arange(3.0)), 2 * np.eye(3))


def test_integer_operands_have_no_gradient() -> None:
    op = Op("take", lambda x, i: x[i])
    index = jnp.array([2, 0, 2])
    gradient = jax.grad(lambda x: op(x, index).sum())(jnp.arange(4.0))
    np.testing.assert_array_equal(gradient, [1, 0, 2, 0])
    _, (_, of_index) = jax.value_and_grad(lambda x, i: op(x, i).sum(), argnums=(0, 1), allow_int=True)(
        jnp.arange(4.0), index
    )
    assert of_index.dtype == jax.dtypes.float0


# Protects: the operands a caller has at hand: numpy arrays, Python numbers, None, nested tuples.
def test_operands() -> None:
    op = make()
    want = np.asarray(X) @ np.asarray(W).T
    np.testing.assert_allclose(op(np.asarray(X), np.asarray(W), 1.0, scale=1.0), want + 1)
    np.testing.assert_allclose(op(X, W, None, scale=1.0), want)
    nested = Op("nested", lambda pair, empty: {"sum": pair[0] + pair[1][0], "empty": empty})
    out = nested((X, [X]), ())
    np.testing.assert_array_equal(out["sum"], 2 * X)
    assert out["empty"] == ()


def test_shapes_that_do_not_fit_fail_at_the_call() -> None:
    with pytest.raises(TypeError, match="contracting|dot_general"):
        make()(X, jnp.ones((5, 3)), None, scale=1.0)
    with pytest.raises(TypeError, match="scale"):
        make()(X, W, None)


def test_static_arguments_are_part_of_the_program() -> None:
    op = make()
    np.testing.assert_allclose(op(X, W, None, scale=2.0), 2 * op(X, W, None, scale=1.0))


def test_eager_calls_are_compiled_once() -> None:
    traces = []

    def counted(x: Any) -> Any:
        traces.append(x.shape)
        return x + 1

    op = Op("counted", counted)
    for _ in range(3):
        op(X)
    # Once for the result's shape, once for the program.
    assert len(traces) <= 2
