"""The max-pool's gathered gradient equals XLA's own, also where maxima are equal, at the border and at odd sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale.models.max_pool import gather_gradient, max_pool, scatter_gradient


@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 9), (1, 2)])
@pytest.mark.parametrize("values", [3, 1000])  # with 3, most windows have several maxima
def test_gathering_gives_xlas_gradient(height, width, values):
    random = np.random.default_rng(height)
    x = random.integers(-values, values, (2, height, width, 5)).astype(np.float32)
    dy = random.integers(-50, 50, max_pool(jnp.asarray(x)).shape).astype(np.float32)
    np.testing.assert_array_equal(gather_gradient(x, dy), scatter_gradient(x, dy))


def test_sums_of_bfloat16_are_rounded_once():
    x = jnp.zeros((1, 5, 5, 1), jnp.bfloat16).at[0, 1, 1].set(1)  # the maximum of four windows
    dy = jnp.asarray([[[[1.0], [2.0**-8], [0]], [[2.0**-8], [2.0**-8], [0]], [[0], [0], [0]]]], jnp.bfloat16)
    assert gather_gradient(x, dy)[0, 1, 1, 0] == jnp.bfloat16(1 + 3 * 2.0**-8)


def test_the_network_uses_the_gradient_of_its_platform():
    text = {
        platform: str(
            jax.jit(jax.grad(lambda x: max_pool(x).sum()))
            .trace(jnp.zeros((1, 8, 8, 1)))
            .lower(lowering_platforms=(platform,))
            .as_text()
        )
        for platform in ("cpu", "cuda")
    }
    assert "select_and_scatter" in text["cpu"]
    assert "select_and_scatter" not in text["cuda"]
