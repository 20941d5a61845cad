"""Walk the equations of a traced program."""

from collections.abc import Iterator
from typing import Any

import jax

REMAT_PRIMITIVES = ("checkpoint", "remat", "remat2")


def iterate_equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations of a program, including those of the functions it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from iterate_equations(getattr(value, "jaxpr", value))


def iterate_programs(jaxpr: Any) -> Iterator[Any]:
    """Yield a program and the programs of all functions that it calls."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from iterate_programs(getattr(value, "jaxpr", value))


def list_remat_layers(jaxpr: Any) -> list[Any]:
    """Return the equations of a program whose insides the backward pass computes again."""
    return [e for e in iterate_equations(jaxpr) if e.primitive.name in REMAT_PRIMITIVES]


def _is_program(value: object) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
