"""Functions that kernels apply to their blocks, such as the gradient of an activation.

They are written for XLA: they may contain barriers, which mean nothing in a kernel, and values that nobody uses.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array

Operand: TypeAlias = core.Var | core.Literal
BARRIER = "optimization_barrier"
# Operations that Triton has in both versions of JAX that are tested, and calls of functions.
ELEMENTWISE = frozenset(
    "abs add add_any and broadcast_in_dim clamp convert_element_type custom_jvp_call div eq exp exp2 ge gt integer_pow "
    "jit le log log1p logistic lt max min mul ne neg not one_minus_square or pow rsqrt select_n sign sqrt square "
    "stop_gradient sub tanh".split()
)


def is_differentiable(activation: Callable[[Array], Array], channels: int = 8) -> bool:
    """Return whether a kernel can compute the gradient of an activation of so many channels.

    >>> is_differentiable(jax.nn.silu), is_differentiable(jnp.sort)
    (True, False)
    """
    block = jax.ShapeDtypeStruct((8, channels), jnp.float32)
    traced = trace(lambda x, dy: jax.vjp(activation, x)[1](dy), block, block)
    return not traced.consts and ELEMENTWISE.issuperset(_list_operations(traced.jaxpr))


def trace(function: Callable[..., object], *arguments: object) -> core.ClosedJaxpr:
    """Return the program of a function of arrays, without barriers and without what nobody uses."""
    closed = jax.make_jaxpr(function)(*arguments)
    sources: dict[Operand, Operand] = {}
    equations = []
    for equation in closed.jaxpr.eqns:
        operands = [_replace(sources, operand) for operand in equation.invars]
        if equation.primitive.name == BARRIER:
            sources.update(zip(equation.outvars, operands, strict=True))
        else:
            equations.append(equation.replace(invars=operands))
    results = [_replace(sources, result) for result in closed.jaxpr.outvars]
    used, kept = {result for result in results if isinstance(result, core.Var)}, []
    for equation in reversed(equations):
        if not used.isdisjoint(equation.outvars):
            used.update(operand for operand in equation.invars if isinstance(operand, core.Var))
            kept.append(equation)
    return core.ClosedJaxpr(closed.jaxpr.replace(eqns=kept[::-1], outvars=results), closed.consts)


def _replace(sources: dict[Operand, Operand], operand: Operand) -> Operand:
    return sources.get(operand, operand) if isinstance(operand, core.Var) else operand


def _list_operations(jaxpr: core.Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from _list_operations(value.jaxpr)
