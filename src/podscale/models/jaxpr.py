"""Walk the equations of a traced program."""

from collections.abc import Iterator

import jax
from jax.extend import core

REMAT_PRIMITIVES = ("checkpoint", "remat", "remat2")


def iterate_equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yield all equations of a program, including those of the functions it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for program in _list_programs(equation):
            yield from iterate_equations(program)


def iterate_programs(jaxpr: core.Jaxpr) -> Iterator[core.Jaxpr]:
    """Yield a program and the programs of all functions that it calls."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for program in _list_programs(equation):
            yield from iterate_programs(program)


def list_remat_layers(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Return the equations of a program whose insides the backward pass computes again."""
    return [e for e in iterate_equations(jaxpr) if e.primitive.name in REMAT_PRIMITIVES]


def _list_programs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Return the programs of the functions that an equation calls."""
    values = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
    programs: list[core.Jaxpr] = [getattr(value, "jaxpr", value) for value in values if _is_program(value)]  # type: ignore[misc]
    return programs


def _is_program(value: object) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
