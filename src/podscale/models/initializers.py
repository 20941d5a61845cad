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

# Compiling a sampler takes a third of a second for every shape, so samples come in chunks, at most 2^30 of an array.
_CHUNK, _MAX_CHUNKS = 2**18, 2**12


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
    """Return scaled samples. Outside of a trace the host puts them together, which needs one program for all shapes."""
    count = math.prod(shape)
    if count > _CHUNK * _MAX_CHUNKS:  # an index beyond the keys would give the last one again, and the same samples
        raise ValueError(
            f"an array of shape {shape} has {count:,} values; at most {_CHUNK * _MAX_CHUNKS:,} are sampled"
        )
    chunks = [_sample_chunk(sampler, key, np.int32(i)) for i in range(-(-count // _CHUNK))]
    if any(isinstance(chunk, jax.core.Tracer) for chunk in chunks):
        samples = _sample_chunks(sampler, key, len(chunks))
        return (samples[:count].reshape(shape) * scale).astype(dtype)
    joined = np.concatenate([np.asarray(chunk) for chunk in chunks])[:count].reshape(shape)
    return jax.device_put((joined * np.float32(scale)).astype(dtype))  # jnp.asarray compiles a program for each shape


@functools.partial(jax.jit, static_argnums=0)
def _sample_chunk(sampler: Initializer, key: jax.Array, number: int) -> jax.Array:
    return sampler(jax.random.split(key, _MAX_CHUNKS)[number], (_CHUNK,), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _sample_chunks(sampler: Initializer, key: jax.Array, chunks: int) -> jax.Array:
    """Return the first chunks, as one array; the first keys of a split do not depend on their number."""
    return lax.map(lambda key: sampler(key, (_CHUNK,), jnp.float32), jax.random.split(key, chunks)).ravel()
