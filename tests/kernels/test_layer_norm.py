"""Residual sums with layer norm: the reference against flax and NumPy, the Pallas kernels, interpreted, against it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podscale.kernels import layer_norm
from podscale.kernels.layer_spec import INTERPRET, REFERENCE, TRITON

EPSILON = 1e-6
SHAPES = [(2, 13, 128), (3, 21, 96)]  # blocks of 4 and 16 rows that divide neither


def sample(shape, dtype=jnp.bfloat16):
    """Return arrays and parameters; what is added up is in eighths, so that bfloat16 has the sum exactly."""
    width, generator = shape[-1], np.random.default_rng(0)
    x, y, ds, dh = (generator.normal(size=shape) for _ in range(4))
    bias, scale, shift = (generator.normal(size=width) for _ in range(3))
    x, y, bias = (np.round(8 * values) / 8 for values in (x + 3, y, bias))
    parameters = tuple(jnp.asarray(v, jnp.promote_types(dtype, jnp.float32)) for v in (bias, 1 + 0.1 * scale, shift))
    return tuple(jnp.asarray(v, dtype) for v in (x, y, ds, dh)), parameters


def apply(kernels, has_branch=True, copies=1):
    def function(x, y, bias, scale, shift):
        branch = (y, bias) if has_branch else (None, None)
        return layer_norm.add_and_normalize(kernels, x, *branch, (scale, shift), EPSILON, copies)

    return function


@partial(jax.jit, static_argnames=("kernels", "has_branch", "copies"))
def pull_back(kernels, arrays, parameters, has_branch=True, copies=1):
    x, y, ds, dh = arrays
    values, pull = jax.vjp(apply(kernels, has_branch, copies), x, y, *parameters)
    return values, pull((ds, *(dh * weight for weight in (1, -0.5, 2)[:copies])))


def test_the_reference_is_a_sum_and_flax_layer_norm():
    with jax.enable_x64(True):
        (x, y, _, _), (bias, scale, shift) = sample((2, 5, 16), jnp.float64)
        s, h = apply(REFERENCE)(x, y, bias, scale, shift)
        norm = nnx.LayerNorm(16, epsilon=EPSILON, param_dtype=jnp.float64, use_fast_variance=False, rngs=nnx.Rngs(0))
        norm.scale[...], norm.bias[...] = scale, shift
        np.testing.assert_allclose(s, np.asarray(x) + y + bias, rtol=1e-14)
        np.testing.assert_allclose(h, norm(s), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(apply(REFERENCE, has_branch=False)(x, y, bias, scale, shift)[0], x)


@pytest.mark.heavy
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("has_branch", "copies"), [(True, 3), (False, 1)])
def test_the_kernels_agree_with_float64(shape, has_branch, copies):
    arrays, parameters = sample(shape)
    assert layer_norm.can_use_kernel(INTERPRET, arrays[0])
    values, gradients = pull_back(INTERPRET, arrays, parameters, has_branch, copies)
    with jax.enable_x64(True):
        wide = [tuple(jnp.asarray(v, jnp.float64) for v in group) for group in (arrays, parameters)]
        wide_values, wide_gradients = jax.tree.map(np.asarray, pull_back(REFERENCE, *wide, has_branch, copies))
    for got, want in zip((*values, *gradients), (*wide_values, *wide_gradients), strict=True):
        assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 4e-3 * np.linalg.norm(want)
    for got, want in zip(gradients[2:], wide_gradients[2:], strict=True):  # sums are in float32
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_what_kernels_cannot_do_is_left_to_the_reference():
    (x, *_), _ = sample((2, 16, 128))
    assert layer_norm.can_use_kernel(TRITON, x)
    assert not layer_norm.can_use_kernel(REFERENCE, x)
    assert not layer_norm.can_use_kernel(TRITON, x.astype(jnp.float32))
    assert not layer_norm.can_use_kernel(TRITON, x[:1, :3])  # fewer rows than a block
    assert not layer_norm.can_use_kernel(TRITON, sample((2, 64, 80))[0][0])
