"""1x1 convolutions as matrix products: the same logits and gradients as by convolutions."""

import jax
import numpy as np
import pytest
from flax import nnx
from support import gradients

from podscale import recipe
from podscale.kernels.layer_spec import BATCH_NORM
from podscale.models import efficientnet, resnet
from podscale.models.jaxpr import iterate_equations


def build():
    config = recipe.Model(name="resnet50", stem="small", width=8)
    return resnet.ResNet(resnet.BottleneckBlock, (1, 1), config, 10, nnx.Rngs(0))


def list_kernel_sides(model, kernels):
    """Return the sides of the kernels of all convolutions, forward and backward."""
    jaxpr = jax.make_jaxpr(lambda: gradients.differentiate(model, kernels, 8))()
    shapes = [e.invars[1].aval.shape for e in iterate_equations(jaxpr.jaxpr) if e.primitive.name.startswith("conv_gen")]
    return [min(shape[:2]) for shape in shapes]


@pytest.mark.heavy
def test_a_resnet_multiplies_by_kernels_of_gpus_what_it_convolves_by_xla():
    expected, results = (gradients.differentiate(build(), kernels, 8) for kernels in (None, BATCH_NORM))
    for name, value in expected.items():
        np.testing.assert_allclose(results[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_only_strided_and_wide_convolutions_are_left():
    by_xla, by_kernels = (list_kernel_sides(build(), kernels) for kernels in (None, BATCH_NORM))
    assert len([side for side in by_xla if side == 1]) > len([side for side in by_kernels if side == 1])


def test_an_efficientnet_multiplies():
    style = efficientnet.Style(efficientnet.select_types("float32"), "same", 1e-3, lite=False)
    conv = style.make_conv(6, 5, 1, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 4, 3, 6))
    np.testing.assert_allclose(conv(x), nnx.Conv.__call__(conv, x), rtol=1e-5, atol=1e-6)


def test_a_strided_or_depthwise_convolution_of_an_efficientnet_is_none():
    style = efficientnet.Style(efficientnet.select_types("float32"), "same", 1e-3, lite=False)
    others = [{"stride": 2}, {"depthwise": True}]
    convs = [style.make_conv(6, 6, 1, nnx.Rngs(0), **changes) for changes in others]
    assert [type(conv) for conv in convs] == [nnx.Conv, nnx.Conv]
    assert convs[0](jax.numpy.ones((1, 4, 4, 6))).shape == (1, 2, 2, 6)
