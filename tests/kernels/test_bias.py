"""A bias whose gradient a Pallas kernel sums, interpreted, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale.kernels.bias import add_bias
from podscale.kernels.layer_spec import INTERPRET


@pytest.mark.parametrize("rows", [128, 7])  # 7: too few for the kernel
def test_the_gradient_of_a_bias_is_the_sum_over_rows(rows):
    generator = np.random.default_rng(0)
    x, gradient = (jnp.asarray(generator.normal(size=(rows, 64)), jnp.bfloat16) for _ in range(2))
    value, pull = jax.vjp(lambda x, bias: add_bias(INTERPRET, x, bias), x, jnp.full(64, 0.5))
    dx, dbias = pull(gradient)
    np.testing.assert_array_equal(value, x + jnp.bfloat16(0.5))
    np.testing.assert_array_equal(dx, gradient)
    np.testing.assert_allclose(dbias, np.asarray(gradient, np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)
