"""ResNet, version 1.5 (He et al., arXiv 1512.03385), from 8 layers to 152.

Version 1.5 strides in the 3x3 convolution of a bottleneck, not in the 1x1 before it. The last batch-norm scale of every
block starts at 0, so that a newly initialized network consists of its shortcuts alone (Goyal et al., arXiv 1706.02677,
section 5.1). Padding is explicit and symmetric, so that torchvision's weights give torchvision's logits.

Images are [images, height, width, channels] and kernels [height, width, inputs, outputs]. The layers are in one list,
in the order of the forward pass, because parameters are sorted by key: a loop over them in reverse meets the gradients
in the order in which the backward pass finishes them.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from podscale import recipe
from podscale.config.suggestions import suggest_numbers
from podscale.errors import UserError
from podscale.kernels.reference import multiply_pixels
from podscale.models.initializers import init_normal, select_param_dtype
from podscale.models.max_pool import max_pool
from podscale.models.remat import apply_layers
from podscale.parallel.batch_norm import BatchNorm
from podscale.parallel.placement import fill

# --- convolutions --------------------------------------------------------------------------------------------------


def _convolve(x: jax.Array, kernel: jax.Array, stride: int, padding: tuple[int, int]) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


class Conv(nnx.Module):
    """A square convolution without bias, padded on every side by half its kernel.

    Attributes:
        multiplies: whether a 1x1 convolution of stride 1 is computed as a matrix product.
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, *, precision: str, rngs: nnx.Rngs):
        self.stride, self.multiplies = stride, False
        he_fan_out = math.sqrt(2 / (size * size * outputs))
        self.kernel = init_normal((size, size, inputs, outputs), he_fan_out, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, margin = self.kernel[...].astype(x.dtype), self.kernel.shape[0] // 2
        if self.multiplies and margin == 0 and self.stride == 1:
            return multiply_pixels(x, kernel)
        return _convolve(x, kernel, self.stride, (margin, margin))


class SpaceToDepthConv(Conv):
    """The 7x7 convolution of stride 2, computed as a 4x4 one of stride 1 on 2x2 blocks of pixels.

    The parameter is the 7x7 kernel itself; only the arithmetic is rearranged. Output i needs pixels 2i-3 to 2i+3; with
    a leading zero, 2i-4 to 2i+3: blocks i-2 to i+1.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        return _convolve(space_to_depth(x), _rearrange_kernel(self.kernel[...]).astype(x.dtype), 1, (2, 1))


def space_to_depth(x: jax.Array, side: int = 2) -> jax.Array:
    """Return every block of side x side pixels as one pixel with side² times the channels.

    >>> space_to_depth(jnp.arange(16).reshape(1, 4, 4, 1))[0, 0].tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    n, height, width, channels = x.shape
    x = x.reshape(n, height // side, side, width // side, side, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, height // side, width // side, side * side * channels)


def _rearrange_kernel(kernel: jax.Array) -> jax.Array:
    """Return a 7x7 kernel as a 4x4 one on 2x2 blocks of pixels."""
    inputs, outputs = kernel.shape[2:]
    kernel = jnp.pad(kernel, ((1, 0), (1, 0), (0, 0), (0, 0))).reshape(4, 2, 4, 2, inputs, outputs)
    return kernel.transpose(0, 2, 1, 3, 4, 5).reshape(4, 4, 4 * inputs, outputs)


def convolve_four_outputs(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return the 7x7 convolution of stride 2, computed as a 3x3 one on 4x4 blocks of pixels with 2x2 outputs at a time.

    [images, height, width, inputs] becomes [images, height / 4, width / 4, 4 · outputs]. This is more arithmetic, much
    of it with zeros, but on as many channels as matrix units are made for. Output 2i+s needs pixels 4i+2s-3 to 4i+2s+3,
    of blocks i-1 to i+1, which begin at pixel 4i-4.
    """
    inputs, outputs = kernel.shape[2:]
    margins = (1, 4), (3, 2)  # zeros before and after the kernel, for s = 0 and s = 1
    kernels = jnp.stack(
        [jnp.pad(kernel, (rows, columns, (0, 0), (0, 0))) for rows in margins for columns in margins], 3
    )
    kernels = kernels.reshape(3, 4, 3, 4, inputs, 4 * outputs).transpose(0, 2, 1, 3, 4, 5)
    kernels = kernels.reshape(3, 3, 16 * inputs, 4 * outputs)
    return _convolve(space_to_depth(x, 4), kernels.astype(x.dtype), 1, (1, 1))


# --- layers --------------------------------------------------------------------------------------------------------


class Stem(nnx.Module):
    """From pixels to the first feature map: a quarter of the side, or all of it with the stem for small images."""

    def __init__(self, config: recipe.Model, rngs: nnx.Rngs):
        self.small = config.stem == "small"
        size, stride = (3, 1) if self.small else (7, 2)
        conv_class = SpaceToDepthConv if config.stem == "space_to_depth" else Conv
        self.conv = conv_class(3, config.width, size, stride, precision=config.precision, rngs=rngs)
        self.norm = BatchNorm(config.width, param_dtype=select_param_dtype(config.precision))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = normalize_and_rectify(self.norm, self.conv(x))
        return x if self.small else max_pool(x)


def normalize_and_rectify(norm: BatchNorm, x: jax.Array) -> jax.Array:
    """Return relu(norm(x)), in one where kernels sum: they mask the gradient themselves, and nothing stores it."""
    return nnx.relu(norm(x)) if norm.sum_kernels is None else norm(x, activation=nnx.relu)


class Projection(nnx.Module):
    """The shortcut of a block that changes the number of channels or the size of the map."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, precision: str, rngs: nnx.Rngs):
        self.conv = Conv(inputs, outputs, 1, stride, precision=precision, rngs=rngs)
        self.norm = BatchNorm(outputs, param_dtype=select_param_dtype(precision))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, *, precision: str, rngs: nnx.Rngs):
        dtype = select_param_dtype(precision)
        self.conv1 = Conv(inputs, width, 3, stride, precision=precision, rngs=rngs)
        self.norm1 = BatchNorm(width, param_dtype=dtype)
        self.conv2 = Conv(width, width, 3, precision=precision, rngs=rngs)
        self.norm2 = BatchNorm(width, zero_scale=True, param_dtype=dtype)
        self.shortcut = _make_shortcut(inputs, width, stride, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = normalize_and_rectify(self.norm1, self.conv1(x))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class BottleneckBlock(nnx.Module):
    """A 3x3 convolution between two 1x1 ones that narrow and widen by four, beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, *, precision: str, rngs: nnx.Rngs):
        dtype, outputs = select_param_dtype(precision), width * self.expansion
        self.conv1 = Conv(inputs, width, 1, precision=precision, rngs=rngs)
        self.norm1 = BatchNorm(width, param_dtype=dtype)
        self.conv2 = Conv(width, width, 3, stride, precision=precision, rngs=rngs)
        self.norm2 = BatchNorm(width, param_dtype=dtype)
        self.conv3 = Conv(width, outputs, 1, precision=precision, rngs=rngs)
        self.norm3 = BatchNorm(outputs, zero_scale=True, param_dtype=dtype)
        self.shortcut = _make_shortcut(inputs, outputs, stride, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = normalize_and_rectify(self.norm1, self.conv1(x))
        y = normalize_and_rectify(self.norm2, self.conv2(y))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


Block = type[BasicBlock] | type[BottleneckBlock]


def list_convolutions(block: BasicBlock | BottleneckBlock) -> list[tuple[Conv, BatchNorm]]:
    """Return a block's convolutions without its shortcut, each with its batch norm, in order of the forward pass."""
    pairs = [(block.conv1, block.norm1), (block.conv2, block.norm2)]
    return [*pairs, (block.conv3, block.norm3)] if isinstance(block, BottleneckBlock) else pairs


def _make_shortcut(inputs: int, outputs: int, stride: int, precision: str, rngs: nnx.Rngs) -> Projection | None:
    if inputs == outputs and stride == 1:
        return None
    return Projection(inputs, outputs, stride, precision=precision, rngs=rngs)


class Head(nnx.Module):
    """The mean over the map, then one dense layer; both in the dtype of the parameters, not of the computation."""

    def __init__(self, inputs: int, classes: int, *, precision: str, rngs: nnx.Rngs):
        self.kernel = init_normal((inputs, classes), 0.01, precision, rngs)
        self.bias = nnx.Param(fill(classes, 0, select_param_dtype(precision)))

    def __call__(self, x: jax.Array) -> jax.Array:
        features = jnp.mean(x, axis=(1, 2), dtype=self.kernel.dtype)
        return features @ self.kernel[...] + self.bias[...]


# --- the network ---------------------------------------------------------------------------------------------------

# Blocks per stage; every stage after the first halves the map and doubles the channels.
DEPTHS: Mapping[str, tuple[Block, tuple[int, ...]]] = MappingProxyType(
    {
        "resnet8": (BasicBlock, (1, 1, 1)),
        "resnet18": (BasicBlock, (2, 2, 2, 2)),
        "resnet34": (BasicBlock, (3, 4, 6, 3)),
        "resnet50": (BottleneckBlock, (3, 4, 6, 3)),
        "resnet101": (BottleneckBlock, (3, 4, 23, 3)),
        "resnet152": (BottleneckBlock, (3, 8, 36, 3)),
    }
)


class ResNet(nnx.Module):
    """Maps normalized images [images, height, width, 3] to logits [images, classes], float32 (float64 for float64)."""

    def __init__(self, block: Block, stages: tuple[int, ...], config: recipe.Model, classes: int, rngs: nnx.Rngs):
        self.stages = stages
        self.dtype, self.remat = jnp.dtype(config.precision), config.remat
        layers: list[nnx.Module] = [Stem(config, rngs)]
        inputs = config.width
        for stage, blocks in enumerate(stages):
            width = config.width * 2**stage
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(block(inputs, width, stride, precision=config.precision, rngs=rngs))
                inputs = width * block.expansion
        layers.append(Head(inputs, classes, precision=config.precision, rngs=rngs))
        self.layers = nnx.List(layers)

    def __call__(self, images: jax.Array) -> jax.Array:
        return apply_layers(self.layers, images.astype(self.dtype), self.remat)


def build_resnet(name: str, config: recipe.Model, classes: int, image_size: int, rngs: nnx.Rngs) -> ResNet:
    """Return the ResNet of that name in `DEPTHS`.

    Raises:
        UserError: images of that size do not fit its stem.
    """
    _check_image_size(config.stem, image_size)
    block, stages = DEPTHS[name]
    return ResNet(block, stages, config, classes, rngs)


def _check_image_size(stem: str, size: int) -> None:
    minimum = 8 if stem == "small" else 32  # pixels that become a single one in the last map
    step, condition = (2, "an even number, at least") if stem == "space_to_depth" else (1, "at least")
    if size < minimum or size % step:
        nearest = suggest_numbers(size, range(minimum, max(size, minimum) + 2, step))
        raise UserError(
            f"data.image_size {size} does not fit the stem {stem}, which needs {condition} {minimum}; {nearest}"
        )
