"""ConvNeXts: parameters, and the image sizes that fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podscale import recipe
from podscale.errors import UserError
from podscale.models import convnext, registry

PARAMETERS = {"convnext_tiny": 28_589_128, "convnext_small": 50_223_688, "convnext_base": 88_591_464}  # timm's


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    model = nnx.eval_shape(lambda: registry.build_model(recipe.Model(name=name), 1000, 224))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == PARAMETERS[name]


def test_images_must_halve_five_times():
    with pytest.raises(UserError, match="needs a multiple of 32; nearest that do: 192, 224"):
        registry.build_model(recipe.Model(name="convnext_tiny"), 10, 200)


def test_a_new_block_is_nearly_the_identity_and_layer_scale_has_a_gradient():
    block = convnext.Block(8, 0.0, convnext.select_types("float32"), nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 8)), jnp.float32)
    np.testing.assert_allclose(block(x), x, atol=1e-4)
    gradient = nnx.grad(lambda block: (block(x) ** 2).sum())(block)
    assert float(jnp.abs(gradient.layer_scale[...]).max()) > 0


def test_the_depthwise_convolution_sees_seven_by_seven_places_of_one_channel():
    block = convnext.Block(2, 0.0, convnext.select_types("float32"), nnx.Rngs(0))
    point = jnp.zeros((1, 15, 15, 2)).at[0, 7, 7, 0].set(1.0)
    seen = np.asarray(block.depthwise(point)) != 0
    assert seen[0, 4:11, 4:11, 0].all()
    assert seen.sum() == 49
