"""The fused normalization and max-pooling against its reference implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.closeness import assert_close

from podscale.kernels import pool, unpool
from podscale.kernels.layer_spec import INTERPRET, REFERENCE, LayerSpec


def pool_blocks(spec, x, affine):
    raw, windows = pool.make_raw_blocks(spec, x)
    return pool.normalize_and_pool(spec, raw, windows, affine), raw.sums


@pytest.mark.parametrize("levels", [3, 1000])  # with three, most windows have several largest places
def test_pool_and_its_gradient_match_the_reference(levels):
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x = jnp.asarray(random.integers(-levels, levels, (4, 4, 3, 12)), jnp.float64)
        dy = jnp.asarray(random.normal(size=(4, 4, 3, 3)))
        affine = tuple(jnp.asarray(random.normal(size=(2, 3))) for _ in range(2))

        @jax.jit
        def compute(x, affine, dy):
            (y, sums), pull = jax.vjp(lambda *inputs: pool_blocks(LayerSpec(2), *inputs), x, affine)
            return y, pull((dy, jax.tree.map(jnp.zeros_like, sums)))

        @jax.jit
        def compute_by_reference(x, affine, dy):
            y, pull = jax.vjp(pool.pool_reference, x, affine)
            return y, pull(dy)

        y, gradients = compute(x, affine, dy)
        expected, expected_gradients = compute_by_reference(x, affine, dy)
        assert_close(y, expected, 1e-15)
        assert_close(gradients, expected_gradients, 1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("images", "rows", "columns", "groups"), [(4, 5, 3, 2), (6, 8, 7, 3), (2, 1, 9, 1)])
def test_kernels_match_the_reference(images, rows, columns, groups):
    random = np.random.default_rng(1)

    def sample(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(random.integers(-8, 8, shape) / 8, dtype)  # exact in bfloat16, and so are their sums

    x, dy = sample(images, rows, columns, 4 * 16), sample(images, rows, columns, 16)
    affine = sample(groups, 16, dtype=jnp.float32) + 1 / 16, sample(groups, 16, dtype=jnp.float32)
    dsums = sample(2, groups, 4 * 16, dtype=jnp.float32) / 4

    def compute_gradients(kernels):
        spec = LayerSpec(groups, kernels=kernels)
        assert unpool.can_use_kernel(spec, x) == (kernels == INTERPRET)

        @jax.jit
        def pull_back(x, affine, dy, dsums):
            (y, _), pull = jax.vjp(lambda *inputs: pool_blocks(spec, *inputs), x, affine)
            return y, *pull((dy, tuple(dsums)))

        return pull_back(x, affine, dy, dsums)

    y, dx, daffine = compute_gradients(INTERPRET)
    expected_y, expected_dx, expected_daffine = compute_gradients(REFERENCE)
    np.testing.assert_array_equal(y.astype(jnp.float32), expected_y.astype(jnp.float32))
    np.testing.assert_array_equal(dx.astype(jnp.float32), expected_dx.astype(jnp.float32))
    assert_close(daffine, expected_daffine, 1e-5)
