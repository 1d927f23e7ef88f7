"""`Op`: one function, one meaning, many implementations.

An op is a JAX primitive made from a reference written in plain `jax.numpy`. This is the one file that touches
`jax.interpreters`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Implementation = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """A named operation: `op(*operands, **static)`.

    Operands are pytrees of arrays (None is allowed), keywords are hashable and static; the result is a pytree too.

    name: shown in jaxprs as `inferax.<name>`.
    reference: the meaning of the op. Abstract evaluation, tangents and the op's tests use it.
    default: the lowering on a platform that has no implementation of its own (`reference` unless given).
    rows: positions of the operands whose every leaf has a leading axis of T independent rows. A `vmap` over only
        those folds the mapped axis into T, provided every result has that leading axis too.
    hints: positions of operands that only tell what may be left out; they are dropped where an axis is folded.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        default: Callable[P, R] | None = None,
        rows: Sequence[int] = (),
        hints: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.reference = reference
        self.default: Callable[P, R] = default or reference
        self.rows, self.hints = tuple(rows), tuple(hints)
        self._implementations: dict[str, Implementation] = {}
        self.primitive = primitive = Primitive(f"inferax.{name}")
        primitive.multiple_results = True
        primitive.def_impl(self._evaluate)
        primitive.def_abstract_eval(self._abstract)
        ad.primitive_jvps[primitive] = self._jvp
        batching.primitive_batchers[primitive] = self._batch
        mlir.register_lowering(primitive, self._lowering(self.default))

    def __call__(self, *operands: P.args, **static: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten(operands)
        leaves = [x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x) for x in leaves]
        call = (tree, tuple(sorted(static.items())))
        results = self.primitive.bind(*leaves, call=call)
        return cast(R, jax.tree.unflatten(self._result_tree(call, _shapes(leaves)), results))

    def implement(self, platform: str, function: Implementation) -> None:
        """Registers a platform's own lowering: called like the reference; returns NotImplemented to decline."""
        self._implementations[platform] = function

        def choose(*operands: Any, **static: Any) -> Any:
            result = function(*operands, **static)
            return self.default(*operands, **static) if result is NotImplemented else result

        mlir.register_lowering(self.primitive, self._lowering(choose), platform=platform)

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms with a lowering of their own."""
        return tuple(sorted(self._implementations))

    # What follows is called by JAX.

    def _flat(self, function: Implementation, call: Any) -> Callable[..., list[Any]]:
        tree, static = call

        def flat(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves), **dict(static)))

        return flat

    def _lowering(self, function: Implementation) -> Any:
        def flat(*leaves: Any, call: Any) -> list[Any]:
            return self._flat(function, call)(*leaves)

        return mlir.lower_fun(flat, multiple_results=True)

    def _result_tree(self, call: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
        return _abstract_results(self.reference, call, shapes)[1]

    def _abstract(self, *avals: Any, call: Any) -> list[Any]:
        results, _ = _abstract_results(self.reference, call, _shapes(avals))
        return [jax.core.ShapedArray(r.shape, r.dtype) for r in results]

    def _evaluate(self, *leaves: Any, call: Any) -> list[Any]:
        return list(_compiled(self.primitive, call)(*leaves))

    def _jvp(self, primals: Sequence[Any], tangents: Sequence[Any], *, call: Any) -> tuple[list[Any], list[Any]]:
        out = self.primitive.bind(*primals, call=call)
        moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0]
        if not moving:
            return out, [ad.Zero(jax.typeof(o).to_tangent_aval()) for o in out]
        flat = self._flat(self.reference, call)

        def of_moving(*values: Any) -> list[Any]:
            leaves = list(primals)
            for i, value in zip(moving, values, strict=True):
                leaves[i] = value
            return flat(*leaves)

        _, out_tangents = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
        return out, out_tangents

    def _batch(self, leaves: Sequence[Any], axes: Sequence[Any], *, call: Any) -> tuple[list[Any], list[int]]:
        size = next(x.shape[a] for x, a in zip(leaves, axes, strict=True) if a is not None)
        moved = [x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(leaves, axes, strict=True)]
        mapped = [a is not None for a in axes]
        is_row, is_hint = (self._leaves_of(which, call, len(leaves)) for which in (self.rows, self.hints))
        if self.rows and not any(m and not r and not h for m, r, h in zip(mapped, is_row, is_hint, strict=True)):
            folded = []
            for x, m, r in zip(moved, mapped, is_row, strict=True):
                if r and not m:
                    x, m = jnp.broadcast_to(x, (size, *x.shape)), True
                folded.append(x.reshape(size * x.shape[1], *x.shape[2:]) if r else x)
            if any(is_hint):
                operands = list(jax.tree.unflatten(call[0], folded))
                for position in self.hints:
                    operands[position] = None
                folded, tree = jax.tree.flatten(tuple(operands))
                call = (tree, call[1])
            results = self.primitive.bind(*folded, call=call)
            return [r.reshape(size, r.shape[0] // size, *r.shape[1:]) for r in results], [0] * len(results)

        def one(values: Sequence[Any]) -> list[Any]:
            given = iter(values)
            every = [next(given) if m else x for x, m in zip(moved, mapped, strict=True)]
            return list(self.primitive.bind(*every, call=call))

        results = jax.lax.map(one, [x for x, m in zip(moved, mapped, strict=True) if m])
        return results, [0] * len(results)

    def _leaves_of(self, positions: Sequence[int], call: Any, count: int) -> list[bool]:
        operands = jax.tree.unflatten(call[0], range(count))
        found = [False] * count
        for position in positions:
            for leaf in jax.tree.leaves(operands[position]) if position < len(operands) else ():
                found[leaf] = True
        return found


def _shapes(values: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(np.shape(v), jax.dtypes.canonicalize_dtype(v.dtype)) for v in values)


@functools.lru_cache(maxsize=4096)
def _abstract_results(reference: Implementation, call: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    tree, static = call
    result = jax.eval_shape(functools.partial(reference, **dict(static)), *jax.tree.unflatten(tree, shapes))
    return jax.tree.flatten(result)


@functools.lru_cache(maxsize=4096)
def _compiled(primitive: Primitive, call: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, call=call))
