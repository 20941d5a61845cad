"""Bias and GELU: the Pallas kernels, interpreted, against exact GELU in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale.kernels import gelu
from podscale.kernels.layer_spec import INTERPRET, REFERENCE


@partial(jax.jit, static_argnames="kernels")
def pull_back(kernels, z, bias, gradient):
    value, pull = jax.vjp(lambda z, bias: gelu.add_bias_and_gelu(kernels, z, bias), z, bias)
    return value, *pull(gradient)


@pytest.mark.heavy
@pytest.mark.parametrize("shape", [(2, 50, 192), (1, 301, 64)])
def test_kernels_agree_with_float64(shape):
    generator = np.random.default_rng(0)
    z, gradient = (jnp.asarray(generator.normal(size=shape) * scale, jnp.bfloat16) for scale in (2, 1))
    bias = jnp.asarray(generator.normal(size=shape[-1]), jnp.float32)
    results = pull_back(INTERPRET, z, bias, gradient)
    with jax.enable_x64(True):
        wide = (jnp.asarray(v, jnp.float64) for v in (z, bias, gradient))
        expected = [np.asarray(result) for result in pull_back(REFERENCE, *wide)]
    value, dz, dbias = (np.asarray(result, np.float64) for result in results)
    np.testing.assert_allclose(value, expected[0], rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(dz, expected[1], rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(dbias, expected[2], rtol=1e-5, atol=1e-4)


def test_the_normal_distribution_is_exact_to_a_few_roundings_of_float32():
    x = np.linspace(-9, 9, 20_001)
    tail, exponential = gelu._compute_tail(jnp.asarray(x, jnp.float32))
    with jax.enable_x64(True):
        np.testing.assert_allclose(tail, jax.scipy.stats.norm.cdf(-np.abs(x)), rtol=0, atol=5e-7)
        np.testing.assert_allclose(exponential, np.exp(-0.5 * x * x), rtol=1e-5, atol=3e-7)


def test_what_kernels_cannot_do_is_left_to_the_reference():
    z = jnp.linspace(-3, 3, 60, dtype=jnp.float32).reshape(6, 10)
    got = gelu.add_bias_and_gelu(INTERPRET, z, jnp.ones(10))
    np.testing.assert_array_equal(got, gelu.reference(z, jnp.ones(10)))
