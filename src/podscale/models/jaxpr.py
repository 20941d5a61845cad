"""Walk the equations of a traced program."""

from collections.abc import Iterator
from typing import Any

import jax


def iterate_equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, those of the functions it calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from iterate_equations(getattr(value, "jaxpr", value))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
