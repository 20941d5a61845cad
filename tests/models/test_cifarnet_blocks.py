"""CifarNet on 2x2 blocks of places computes what it computes on maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podscale import recipe as recipes
from podscale.models import cifarnet, registry

CLASSES = 4


@pytest.mark.parametrize("side", [2, 3])
def test_block_kernel_does_to_blocks_what_the_kernel_does_to_the_map(side):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, 8, 10, 3)), jnp.float32)
    kernel = jnp.asarray(random.normal(size=(side, side, 3, 5)), jnp.float32)
    expected = cifarnet.to_blocks(cifarnet._convolve(x, kernel)[:, :6, :8])
    result = cifarnet._convolve(cifarnet.to_blocks(x), cifarnet.make_block_kernel(kernel))
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_max_pool_of_blocks_and_its_gradient_match_those_of_the_map():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 3, size=(2, 8, 6, 3)), jnp.float32)  # with ties
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 3, 3)), jnp.float32)

    def differentiate(pool):
        return jax.value_and_grad(lambda x: (pool(x) * weights).sum())(x)

    ours = differentiate(lambda x: cifarnet.max_pool_blocks(cifarnet.to_blocks(x)))
    for a, b in zip(ours, differentiate(cifarnet.max_pool_2x2), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("size", "activation"), [pytest.param(10, "cubic_gelu", marks=pytest.mark.slow), (12, "default")]
)
def test_stem_on_blocks_is_the_same_network_with_the_same_gradient(size, activation):
    on_maps, on_blocks = (build(size, stem, activation) for stem in ("small", "space_to_depth"))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, size, size, 3)), jnp.float32)
    np.testing.assert_allclose(
        nnx.jit(type(on_blocks).__call__)(on_blocks, x), nnx.jit(type(on_maps).__call__)(on_maps, x), atol=1e-6
    )

    def differentiate(model):
        graph, params, others = nnx.split(model, nnx.Param, ...)

        def compute_loss(params):
            return (nnx.merge(graph, params, others)(x) * jnp.arange(CLASSES)).sum()

        return jax.tree.leaves(jax.jit(jax.grad(compute_loss))(params))

    for a, b in zip(differentiate(on_blocks), differentiate(on_maps), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def build(size, stem, activation):
    """Return a small network in evaluation mode whose first layer has a bias."""
    config = recipes.Model(name="cifarnet", width=8, stem=stem, activation=activation)
    model = registry.build_model(config, CLASSES, size)
    model.layers[0].bias[...] = jnp.linspace(-1, 1, 24)
    model.eval()
    return model
