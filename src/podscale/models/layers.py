"""Layers that several networks share. Their parameters are named as in flax: kernel, bias, scale."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from podscale.models.initializers import Initializer, select_param_dtype
from podscale.models.resnet import space_to_depth
from podscale.parallel.placement import fill


class Types(NamedTuple):
    """The dtype of the computation, and that of parameters, statistics and logits."""

    compute: np.dtype
    param: np.dtype


def select_types(precision: str) -> Types:
    """Return the dtypes for a recipe's `model.precision`."""
    return Types(jnp.dtype(precision), jnp.dtype(select_param_dtype(precision)))


class PatchConv(nnx.Module):
    """A convolution whose stride is its size, with bias: one matrix product over patches that do not overlap.

    Maps [images, height, width, inputs] to [images, height / size, width / size, outputs].
    """

    def __init__(self, inputs: int, outputs: int, size: int, init: Initializer, types: Types, rngs: nnx.Rngs) -> None:
        self.size, self.dtype = size, types.compute
        self.kernel = nnx.Param(init(rngs.params(), (size, size, inputs, outputs), types.param))
        self.bias = nnx.Param(fill(outputs, 0, types.param))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...].reshape(-1, self.kernel.shape[-1])
        patches = space_to_depth(x.astype(self.dtype), self.size)
        return patches @ kernel.astype(self.dtype) + self.bias[...].astype(self.dtype)


class DenseHead(nnx.Module):
    """Features to logits, in the dtype of the parameters, not of the computation."""

    def __init__(self, inputs: int, classes: int, init: Initializer, types: Types, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(init(rngs.params(), (inputs, classes), types.param))
        self.bias = nnx.Param(fill(classes, 0, types.param))

    def __call__(self, features: jax.Array) -> jax.Array:
        return features.astype(self.kernel.dtype) @ self.kernel[...] + self.bias[...]


def make_linear(inputs: int, outputs: int, init: Initializer, types: Types, rngs: nnx.Rngs) -> nnx.Linear:
    """Return a dense layer that computes in the compute type."""
    return nnx.Linear(inputs, outputs, dtype=types.compute, param_dtype=types.param, kernel_init=init, rngs=rngs)


def make_layer_norm(features: int, types: Types, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Return a layer norm with the epsilon of Vision Transformers, 1e-6, and statistics in at least float32."""
    return nnx.LayerNorm(
        features, epsilon=1e-6, dtype=types.compute, param_dtype=types.param, use_fast_variance=False, rngs=rngs
    )


def gelu(x: jax.Array) -> jax.Array:
    """Return GELU in its exact form (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return jax.nn.gelu(x, approximate=False)
