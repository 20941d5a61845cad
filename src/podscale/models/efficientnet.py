"""EfficientNet (Tan and Le 2019, arXiv 1905.11946) and EfficientNet-Lite (Liu, TensorFlow blog, March 2020).

B0 (table 1 of the paper) is seven stages of inverted bottlenecks (Sandler et al., arXiv 1801.04381): a 1x1 convolution
widens the map, a depthwise one filters it, squeeze-and-excitation (Hu et al., arXiv 1709.01507) scales its channels,
and a 1x1 convolution narrows it again. B1 to B5 multiply widths and depths (section 3.3). Lite has no squeeze-and-
excitation, ReLU6 for swish, and the same stem, head and number of blocks in the first and the last stage for all sizes.

Batch norm is the distributed one, over groups of `batch.span` images (Wongpanich et al., arXiv 2011.00071, train it so
on pods). Squeeze-and-excitation averages over one image, and so depends on no other.

The layers are in one list, in the order of the forward pass, as in `resnet`.
"""

import math
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from podscale import recipe
from podscale.errors import UserError
from podscale.kernels.reference import multiply_pixels
from podscale.models.initializers import he_fan_out, uniform
from podscale.models.layers import DenseHead, Types, make_linear, select_types
from podscale.models.random_layers import Dropout, DropPath
from podscale.models.remat import apply_layers
from podscale.parallel.batch_norm import Activation, BatchNorm

STEM_WIDTH, FEATURES = 32, 1280
SQUEEZE = 0.25  # channels between squeeze and excitation, as a share of a block's inputs
MIN_IMAGE_SIZE = 32  # pixels that become a single one in the last map


class Stage(NamedTuple):
    """A row of the paper's table 1; the first block strides."""

    expansion: int
    size: int  # of the depthwise convolution
    stride: int
    width: int
    depth: int


STAGES = (
    Stage(1, 3, 1, 16, 1),
    Stage(6, 3, 2, 24, 2),
    Stage(6, 5, 2, 40, 2),
    Stage(6, 3, 2, 80, 3),
    Stage(6, 5, 1, 112, 3),
    Stage(6, 5, 2, 192, 4),
    Stage(6, 3, 1, 320, 1),
)


class Size(NamedTuple):
    """Factors of widths and depths, and whether it is a Lite."""

    width: float
    depth: float
    lite: bool = False


_FACTORS = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2), (1.2, 1.4), (1.4, 1.8), (1.6, 2.2))
SIZES = MappingProxyType(
    {f"efficientnet_b{i}": Size(*factors) for i, factors in enumerate(_FACTORS)}
    | {f"efficientnet_lite{i}": Size(*factors, lite=True) for i, factors in enumerate(_FACTORS[:5])}
)


def scale_width(width: int, factor: float) -> int:
    """Return a scaled number of channels as the nearest multiple of 8, but not below 90 % of what it should be.

    >>> scale_width(320, 1.1), scale_width(16, 1.1)
    (352, 16)
    """
    scaled = width * factor
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded


def scale_stages(size: Size) -> list[Stage]:
    """Return the stages of a size."""
    last = len(STAGES) - 1

    def scale(index: int, stage: Stage) -> Stage:
        depth = stage.depth if size.lite and index in (0, last) else math.ceil(stage.depth * size.depth)
        return stage._replace(width=scale_width(stage.width, size.width), depth=depth)

    return [scale(index, stage) for index, stage in enumerate(STAGES)]


# --- layers --------------------------------------------------------------------------------------------------------


class Style(NamedTuple):
    """What all layers of a network have in common."""

    types: Types
    padding: str
    epsilon: float  # of batch norms
    lite: bool

    @property
    def activation(self) -> Activation:
        """Swish, or ReLU6 in a Lite."""
        return jax.nn.relu6 if self.lite else jax.nn.silu

    def make_conv(
        self, inputs: int, outputs: int, size: int, rngs: nnx.Rngs, stride: int = 1, depthwise: bool = False
    ) -> nnx.Conv:
        """Return a convolution without bias."""
        is_pointwise = size == stride == 1 and not depthwise
        return (PointwiseConv if is_pointwise else nnx.Conv)(
            inputs,
            outputs,
            (size, size),
            strides=stride,
            padding="SAME" if self.padding == "same" else size // 2,
            feature_group_count=inputs if depthwise else 1,
            use_bias=False,
            dtype=self.types.compute,
            param_dtype=self.types.param,
            kernel_init=he_fan_out(size, 1 if depthwise else outputs),
            rngs=rngs,
        )

    def make_norm(self, features: int) -> BatchNorm:
        """Return a batch norm."""
        return BatchNorm(features, epsilon=self.epsilon, param_dtype=self.types.param)


class PointwiseConv(nnx.Conv):
    """A 1x1 convolution of stride 1 as a matrix product, which takes a GPU's compiler less time to tune."""

    def __call__(self, x: jax.Array, out_sharding: None = None) -> jax.Array:
        dtype = self.dtype or x.dtype
        return multiply_pixels(x.astype(dtype), self.kernel[...].astype(dtype))


class ConvNorm(nnx.Module):
    """A convolution, batch norm and, unless it is linear, the activation."""

    def __init__(self, conv: nnx.Conv, style: Style, *, linear: bool = False) -> None:
        self.conv = conv
        self.norm = style.make_norm(conv.out_features)
        self.activation = None if linear else style.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x), activation=self.activation)


class SqueezeExcitation(nnx.Module):
    """Scales every channel of an image by a factor between 0 and 1 that follows from the means of all its channels."""

    def __init__(self, width: int, squeezed: int, types: Types, rngs: nnx.Rngs) -> None:
        self.squeeze = make_linear(width, squeezed, he_fan_out(1, squeezed), types, rngs)
        self.excite = make_linear(squeezed, width, he_fan_out(1, width), types, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        means = x.mean(axis=(1, 2), dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)
        factors = jax.nn.sigmoid(self.excite(jax.nn.silu(self.squeeze(means))))
        return x * factors[:, None, None]


class Block(nnx.Module):
    """An inverted bottleneck, beside a shortcut where it changes neither size nor channels."""

    def __init__(self, inputs: int, stage: Stage, stride: int, drop_path: float, style: Style, rngs: nnx.Rngs) -> None:
        width, make_conv = inputs * stage.expansion, partial(style.make_conv, rngs=rngs)
        self.has_shortcut = stride == 1 and inputs == stage.width
        self.expand = ConvNorm(make_conv(inputs, width, 1), style) if stage.expansion > 1 else None
        self.depthwise = ConvNorm(make_conv(width, width, stage.size, stride=stride, depthwise=True), style)
        squeezed = round(SQUEEZE * inputs)
        self.squeeze_excitation = None if style.lite else SqueezeExcitation(width, squeezed, style.types, rngs)
        self.project = ConvNorm(make_conv(width, stage.width, 1), style, linear=True)
        self.drop_path = DropPath(drop_path)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x if self.expand is None else self.expand(x)
        y = self.depthwise(y)
        y = y if self.squeeze_excitation is None else self.squeeze_excitation(y)
        y = self.project(y)
        return x + self.drop_path(y) if self.has_shortcut else y


# --- the network ---------------------------------------------------------------------------------------------------


class EfficientNet(nnx.Module):
    """Maps normalized images [images, height, width, 3] to logits [images, classes], float32 (float64 for float64)."""

    def __init__(self, size: Size, stages: list[Stage], config: recipe.Model, classes: int, rngs: nnx.Rngs) -> None:
        types = select_types(config.precision)
        style = Style(types, config.padding, config.norm_epsilon or 1e-5, size.lite)
        factor = 1.0 if size.lite else size.width  # of stem and head
        inputs, features = scale_width(STEM_WIDTH, factor), scale_width(FEATURES, factor)
        self.depths = tuple(stage.depth for stage in stages)
        blocks = sum(self.depths)
        rates = (config.drop_path * index / blocks for index in range(blocks))  # as in the paper's code
        self.dropout, self.remat = Dropout(config.dropout), config.remat
        layers: list[nnx.Module] = [ConvNorm(style.make_conv(3, inputs, 3, rngs, stride=2), style)]
        for stage in stages:
            for index in range(stage.depth):
                layers.append(Block(inputs, stage, 1 if index else stage.stride, next(rates), style, rngs))
                inputs = stage.width
        layers.append(ConvNorm(style.make_conv(inputs, features, 1, rngs), style))
        layers.append(DenseHead(features, classes, uniform(1 / math.sqrt(classes)), types, rngs))
        self.layers = nnx.List(layers)

    def __call__(self, images: jax.Array) -> jax.Array:
        *layers, head = list[Any](self.layers)
        x = apply_layers(layers, images.astype(layers[0].conv.dtype), self.remat)
        return head(self.dropout(x.mean(axis=(1, 2), dtype=head.kernel.dtype)))


def build_efficientnet(name: str, config: recipe.Model, classes: int, image_size: int, rngs: nnx.Rngs) -> EfficientNet:
    """Return the EfficientNet of that name in `SIZES`.

    Raises:
        UserError: images of that size are too small for it.
    """
    if image_size < MIN_IMAGE_SIZE:
        raise UserError(f"data.image_size {image_size} does not fit {name}, which needs at least {MIN_IMAGE_SIZE}")
    return EfficientNet(SIZES[name], scale_stages(SIZES[name]), config, classes, rngs)
