"""A bias and GELU in one pass over memory each way, as Pallas kernels for GPUs (through Triton).

The backward pass keeps nothing but the input, which the matrix product before has written, and sums the gradient for
the bias as it writes it. XLA itself keeps three arrays of the forward pass and reads the gradient once more.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from podscale.kernels import reduction
from podscale.kernels.layer_spec import Kernels, LayerSpec

Array = jax.Array
Arrays = tuple[Any, ...]
Maps = Float[Array, "*rows channels"]
Bias = Float[Array, " channels"]
# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: erf to 1.5e-7, from the exponential that GELU's
# gradient needs as well.
ERF_SLOPE = 0.3275911
ERF_COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def add_bias_and_gelu(kernels: Kernels, z: Maps, bias: Bias) -> Maps:
    """Return GELU in its exact form of z + bias, in the dtype of z.

    The kernels compute it, or the reference, where they cannot.
    """
    wide = bias.astype(jnp.promote_types(z.dtype, jnp.float32))
    if not reduction.can_use_kernel(LayerSpec(kernels=kernels), z):
        return reference(z, wide)
    return _add_bias_and_gelu(kernels, z, wide)


def reference(z: Maps, bias: Bias) -> Maps:
    """Return what `add_bias_and_gelu` does, computed in the dtype of the bias; XLA differentiates it."""
    return jax.nn.gelu(z.astype(bias.dtype) + bias, approximate=False).astype(z.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_bias_and_gelu(kernels: Kernels, z: Maps, bias: Bias) -> Maps:
    def compute(vectors: Arrays, z: Array) -> tuple[Arrays, Arrays]:
        x = z + vectors[0]
        return (jnp.maximum(x, 0.0) - jnp.abs(x) * _compute_tail(x)[0],), ()

    (result,), _ = reduction.map_and_sum(LayerSpec(kernels=kernels), compute, (z,), (bias[None],), terms=0, outputs=1)
    return result


def _backward(kernels: Kernels, residuals: Arrays, gradient: Array) -> Arrays:
    z, bias = residuals

    def compute(vectors: Arrays, gradient: Array, z: Array) -> tuple[Arrays, Arrays]:
        x = z + vectors[0]
        tail, exponential = _compute_tail(x)
        below = jnp.where(x < 0, tail, 1.0 - tail)
        dz = gradient * (below + x * exponential * (2 * math.pi) ** -0.5)
        return (dz,), (dz,)

    arrays = gradient, z
    (dz,), sums = reduction.map_and_sum(LayerSpec(kernels=kernels), compute, arrays, (bias[None],), terms=1, outputs=1)
    return dz, sums[0, 0]


_add_bias_and_gelu.defvjp(
    lambda kernels, z, bias: (_add_bias_and_gelu(kernels, z, bias), (z, bias)),
    _backward,
)


def _compute_tail(x: Array) -> tuple[Array, Array]:
    """Return the share of the standard normal distribution above |x|, and exp(-x²/2), both in float32.

    In few instructions: a power of two, an inverse square root, which is faster than a division, and five products.
    """
    exponential = jnp.exp2(x * x * (-0.5 * math.log2(math.e)))
    root = lax.rsqrt(1.0 + ERF_SLOPE * 0.5**0.5 * jnp.abs(x))
    t = root * root
    polynomial = jnp.full_like(x, 0.5 * ERF_COEFFICIENTS[-1])
    for coefficient in reversed(ERF_COEFFICIENTS[:-1]):
        polynomial = polynomial * t + 0.5 * coefficient
    return polynomial * t * exponential, exponential
