"""Random initial values of parameters.

Values are always sampled in float32, so that a float64 network that checks another one starts from exactly the same
values. `normal` and `uniform` return functions of (key, shape, dtype), as flax's layers take them.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

Initializer = Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]

# Compiling a sampler takes a third of a second for every shape; in whole chunks a few shapes serve all layers.
_CHUNK = 2**18


def select_param_dtype(precision: str) -> type:
    """Return the dtype of parameters: float64 where the computation is in float64, else float32."""
    return jnp.float64 if precision == "float64" else jnp.float32


def init_normal(shape: tuple[int, ...], std: float, precision: str, rngs: nnx.Rngs) -> nnx.Param:
    """Return a parameter of normally distributed values."""
    return nnx.Param(normal(std)(rngs.params(), shape, select_param_dtype(precision)))


def normal(std: float) -> Initializer:
    """Return the initializer to normally distributed values of this standard deviation."""
    return functools.partial(_initialize, jax.random.normal, std)


def uniform(limit: float) -> Initializer:
    """Return the initializer to values between -limit and limit."""
    return functools.partial(_initialize, _sample_uniform, limit)


def xavier_uniform(inputs: int, outputs: int) -> Initializer:
    """Return Glorot and Bengio's initializer of a dense layer (2010, AISTATS)."""
    return uniform(math.sqrt(6 / (inputs + outputs)))


def he_fan_out(size: int, outputs: int) -> Initializer:
    """Return He et al.'s initializer of a size x size convolution by its fan-out (arXiv 1502.01852)."""
    return normal(math.sqrt(2 / (size * size * outputs)))


def _sample_uniform(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -1, 1)


def _initialize(
    sampler: Initializer, scale: float, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
) -> jax.Array:
    """Return scaled samples. Outside of a trace the host scales them, which needs no program for every shape."""
    count = math.prod(shape)
    samples = _sample(sampler, key, -(-count // _CHUNK))
    if isinstance(samples, jax.core.Tracer):
        return (samples[:count].reshape(shape) * scale).astype(dtype)
    return jnp.asarray((np.asarray(samples)[:count].reshape(shape) * np.float32(scale)).astype(dtype))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _sample(sampler: Initializer, key: jax.Array, chunks: int) -> jax.Array:
    return lax.map(lambda key: sampler(key, (_CHUNK,), jnp.float32), jax.random.split(key, chunks)).ravel()
