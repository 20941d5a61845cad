"""EfficientNets: parameters, scaling, squeeze-and-excitation, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podscale import recipe
from podscale.errors import UserError
from podscale.models import efficientnet, registry
from podscale.parallel.batch_norm import BatchNorm

PARAMETERS = {  # timm's networks of the same names
    "efficientnet_b0": 5_288_548,
    "efficientnet_b1": 7_794_184,
    "efficientnet_b2": 9_109_994,
    "efficientnet_b3": 12_233_232,
    "efficientnet_b4": 19_341_616,
    "efficientnet_b5": 30_389_784,
    "efficientnet_lite0": 4_652_008,
    "efficientnet_lite1": 5_416_680,
    "efficientnet_lite2": 6_092_072,
    "efficientnet_lite3": 8_197_096,
    "efficientnet_lite4": 13_006_568,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    model = nnx.eval_shape(lambda: registry.build_model(recipe.Model(name=name), 1000, 224))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == PARAMETERS[name]


def test_lite_scales_neither_stem_nor_head_nor_the_depth_of_the_outer_stages():
    stages = efficientnet.scale_stages(efficientnet.SIZES["efficientnet_lite4"])
    assert [stage.depth for stage in stages] == [1, 4, 4, 6, 6, 8, 1]
    model = nnx.eval_shape(lambda: registry.build_model(recipe.Model(name="efficientnet_lite4"), 10, 300))
    assert model.layers[0].conv.kernel.shape == (3, 3, 3, 32)
    assert model.layers[-1].kernel.shape == (1280, 10)
    assert not any(isinstance(module, efficientnet.SqueezeExcitation) for _, module in nnx.iter_modules(model))


def test_small_images_are_refused():
    with pytest.raises(UserError, match=r"data\.image_size 31 does not fit efficientnet_b0, which needs at least 32"):
        registry.build_model(recipe.Model(name="efficientnet_b0"), 10, 31)


def test_all_batch_norms_are_distributed_and_have_the_recipes_epsilon():
    config = recipe.Model(name="efficientnet_b0", norm_epsilon=1e-3)
    model = nnx.eval_shape(lambda: registry.build_model(config, 10, 32))
    norms = [module for _, module in nnx.iter_modules(model) if isinstance(module, BatchNorm)]
    assert len(norms) == 49
    assert {norm.epsilon for norm in norms} == {1e-3}


def test_squeeze_and_excitation_depends_on_no_other_image():
    types = efficientnet.select_types("float32")
    layer = efficientnet.SqueezeExcitation(8, 2, types, nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4, 8)), jnp.float32)
    alone = jnp.concatenate([layer(x[i : i + 1]) for i in range(3)])
    np.testing.assert_allclose(layer(x), alone, atol=1e-6)
    assert float(jnp.abs(layer(x) / x).max()) < 1


def test_same_padding_pads_after_the_map_where_symmetric_padding_is_even():
    """TensorFlow pads an even side before a stride of 2 only at its end."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32, 32, 3)), jnp.float32)
    config = recipe.Model(name="efficientnet_lite0")
    stems = {}
    for padding in ("symmetric", "same"):
        types = efficientnet.select_types("float32")
        style = efficientnet.Style(types, padding, 1e-3, lite=True)
        stems[padding] = style.make_conv(3, 8, 3, nnx.Rngs(0), stride=2)
    shifted = jnp.pad(x, ((0, 0), (1, 0), (1, 0), (0, 0)))[:, :-1, :-1]
    assert config.padding == "symmetric"
    same, symmetric = stems["same"](shifted), stems["symmetric"](x)
    np.testing.assert_allclose(same[:, :-1, :-1], symmetric[:, :-1, :-1], atol=1e-5)
