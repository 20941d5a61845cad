"""The sums of batch norm by kernels, in place of XLA's reductions.

Kernels are a layer below (`kernels/group_sums.py`) and reach batch norm as an object; here is what batch norm asks of
them. The functions are jitted so that layers of the same shape are traced and lowered once.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[Array], Array]  # elementwise and differentiable
Values: TypeAlias = Float[Array, "images *places channels"]  # of one device's images
Vector: TypeAlias = Float[Array, "groups channels"]
Sums: TypeAlias = Float[Array, "2 groups 1 1 channels"]


@runtime_checkable
class SumKernels(Protocol):
    """Kernels that sum over the batch-norm groups of a device's images."""

    def can_sum(self, groups: int, x: Values, activation: Activation | None) -> bool:
        """Return whether they can sum values like x, and the gradient through the activation."""
        ...

    def sum(
        self,
        groups: int,
        compute: Callable[..., tuple[Array, Array]],
        arrays: tuple[Values, ...],
        vectors: tuple[Vector, ...],
    ) -> Float[Array, "2 groups channels"]:
        """Return the sums over each group of both results of compute(vectors, *arrays), in float32."""
        ...


@partial(jax.jit, static_argnums=(0, 1))
def sum_squares(kernels: SumKernels, groups: int, x: Values) -> Sums:
    """Return the sums over each group of the values and of their squares."""
    return kernels.sum(groups, lambda vectors, x: (x, x * x), (x,), ())[:, :, None, None]


@partial(jax.jit, static_argnums=(0, 1, 2))
def sum_gradient(
    kernels: SumKernels,
    groups: int,
    activation: Activation | None,
    x: Values,
    dy: Values,
    parameters: tuple[Array, Array, Array, Array],
) -> Sums:
    """Return the sums over each group of the gradient by the activation's input, and of it times the normalized values.

    Args:
        kernels: that sum.
        groups: of this device's images.
        activation: after the batch norm, or None.
        x: the input of the batch norm.
        dy: the gradient by the output.
        parameters: mean and inverse standard deviation of each group, scale and bias.
    """

    def compute(vectors: tuple[Array, ...], dy: Array, x: Array) -> tuple[Array, Array]:
        mean, inverse_std, *affine = vectors
        normalized, gradient = (x - mean) * inverse_std, dy
        if activation is not None:
            scale, bias = affine
            gradient = jax.vjp(activation, normalized * scale + bias)[1](dy)[0]
        return gradient, gradient * normalized

    shape = groups, x.shape[-1]
    vectors = parameters[:2] if activation is None else parameters
    by_group = tuple(jnp.broadcast_to(vector.reshape(-1, shape[1]), shape) for vector in vectors)
    return kernels.sum(groups, compute, (dy, x), by_group)[:, :, None, None]
