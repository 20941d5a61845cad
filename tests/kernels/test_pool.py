"""The fused normalization and max-pooling against its reference implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.closeness import assert_close

from podscale.kernels import pool
from podscale.kernels.fused import RawOutput
from podscale.kernels.layer_spec import LayerSpec


@pytest.mark.parametrize("levels", [3, 1000])  # with three, most windows have several largest places
def test_pool_and_its_gradient_match_the_reference(levels):
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x = jnp.asarray(random.integers(-levels, levels, (4, 4, 3, 12)), jnp.float64)
        dy = jnp.asarray(random.normal(size=(4, 4, 3, 3)))
        affine = tuple(jnp.asarray(random.normal(size=(2, 3))) for _ in range(2))
        ones = jnp.ones((2, 12))
        y, pull = jax.vjp(
            lambda x, factor, affine: pool.normalize_and_pool(LayerSpec(2), RawOutput(x, None, factor), affine),
            x,
            ones,
            affine,
        )
        expected, expected_pull = jax.vjp(pool.pool_reference, x, affine)
        assert_close(y, expected, 1e-15)
        g, factor, daffine = pull(dy)
        dx = g * jnp.repeat(factor, 2, axis=0)[:, None, None]
        assert_close((dx, daffine), expected_pull(dy), 1e-12)
