"""ResNet, version 1.5 (He et al., arXiv 1512.03385): the network of the paper, from 8 layers to 152.

Version 1.5 strides in the 3x3 convolution of a bottleneck, not in the 1x1 before it. The last batch-norm scale of every
block starts at 0, so that a fresh network is its shortcuts alone (Goyal et al., arXiv 1706.02677, section 5.1).
Padding is written out and symmetric, so that torchvision's weights give torchvision's logits.

Pictures are [images, height, width, channels] and kernels [height, width, inputs, outputs]. The layers stand in one
list, in the order of the forward pass, because parameters are listed by key: whoever walks them backwards meets the
gradients in the order in which the backward pass finishes them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from podscale import recipe
from podscale.config.suggestions import suggest_numbers
from podscale.errors import UserError
from podscale.parallel.batch_norm import BatchNorm


def param_dtype(precision: str) -> Any:
    """What parameters are kept in: float64 where the computation is in float64, else float32."""
    return jnp.float64 if precision == "float64" else jnp.float32


def draw(shape: tuple[int, ...], std: float, precision: str, rngs: nnx.Rngs) -> nnx.Param:
    """A parameter of normal numbers."""
    # Drawn in float32 always: the float64 network that checks another starts from the very same numbers.
    chunks = -(-math.prod(shape) // _CHUNK)
    return nnx.Param(_scaled(_normals(rngs.params(), chunks), shape, std).astype(param_dtype(precision)))


# Compiling a normal draw takes a third of a second for every shape; in whole chunks a few shapes serve all layers.
_CHUNK = 2**18


@functools.partial(jax.jit, static_argnums=1)
def _normals(key: jax.Array, chunks: int) -> jax.Array:
    return lax.map(lambda key: jax.random.normal(key, (_CHUNK,), jnp.float32), jax.random.split(key, chunks)).ravel()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _scaled(numbers: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    return numbers[: math.prod(shape)].reshape(shape) * std


def _convolve(x: jax.Array, kernel: jax.Array, stride: int, padding: tuple[int, int]) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


class Conv(nnx.Module):
    """A square convolution without bias, padded on every side by half its kernel."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, *, precision: str, rngs: nnx.Rngs):
        self.stride = stride
        he_fan_out = math.sqrt(2 / (size * size * outputs))
        self.kernel = draw((size, size, inputs, outputs), he_fan_out, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        margin = self.kernel.shape[0] // 2
        return _convolve(x, self.kernel[...].astype(x.dtype), self.stride, (margin, margin))


class BlockedConv(Conv):
    """The 7x7 convolution of stride 2, computed as a 4x4 one of stride 1 on 2x2 blocks of pixels.

    The parameter is the 7x7 kernel itself; only the arithmetic is arranged anew. Output i needs pixels 2i-3 to 2i+3;
    with a leading zero, 2i-4 to 2i+3: blocks i-2 to i+1.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        return _convolve(blocks_of_pixels(x), _blocked_kernel(self.kernel[...]).astype(x.dtype), 1, (2, 1))


def blocks_of_pixels(x: jax.Array, side: int = 2) -> jax.Array:
    """Every 2x2 block of pixels as one pixel of four times the channels ("space to depth"), or of another side.

    >>> blocks_of_pixels(jnp.arange(16).reshape(1, 4, 4, 1))[0, 0].tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    n, height, width, channels = x.shape
    x = x.reshape(n, height // side, side, width // side, side, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, height // side, width // side, side * side * channels)


def _blocked_kernel(kernel: jax.Array) -> jax.Array:
    inputs, outputs = kernel.shape[2:]
    kernel = jnp.pad(kernel, ((1, 0), (1, 0), (0, 0), (0, 0))).reshape(4, 2, 4, 2, inputs, outputs)
    return kernel.transpose(0, 2, 1, 3, 4, 5).reshape(4, 4, 4 * inputs, outputs)


def convolve_in_fours(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The 7x7 convolution of stride 2 as a 3x3 one on 4x4 blocks of pixels, which gives 2x2 of its outputs at once.

    [images, height, width, inputs] becomes [images, height / 4, width / 4, 4 · outputs]. It is more arithmetic, much of
    it with zeros, but on as many channels as matrix units are made for. Output 2i+s needs pixels 4i+2s-3 to 4i+2s+3,
    of blocks i-1 to i+1; these begin at pixel 4i-4.
    """
    inputs, outputs = kernel.shape[2:]
    margins = (1, 4), (3, 2)  # zeros before and after, where s is 0 and 1
    kernels = jnp.stack(
        [jnp.pad(kernel, (rows, columns, (0, 0), (0, 0))) for rows in margins for columns in margins], 3
    )
    kernels = kernels.reshape(3, 4, 3, 4, inputs, 4 * outputs).transpose(0, 2, 1, 3, 4, 5)
    kernels = kernels.reshape(3, 3, 16 * inputs, 4 * outputs)
    return _convolve(blocks_of_pixels(x, 4), kernels.astype(x.dtype), 1, (1, 1))


class Stem(nnx.Module):
    """From pixels to the first feature map: a quarter of the side, or all of it with the stem for small pictures."""

    def __init__(self, config: recipe.Model, rngs: nnx.Rngs):
        self.small = config.stem == "small"
        size, stride = (3, 1) if self.small else (7, 2)
        kind = BlockedConv if config.stem == "space_to_depth" else Conv
        self.conv = kind(3, config.width, size, stride, precision=config.precision, rngs=rngs)
        self.norm = BatchNorm(config.width, param_dtype=param_dtype(config.precision))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        return x if self.small else max_pool(x)


def max_pool(x: jax.Array) -> jax.Array:
    """The largest of each 3x3 window, at stride 2."""
    return nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


class Projection(nnx.Module):
    """The shortcut of a block that changes the number of channels or the size of the map."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, precision: str, rngs: nnx.Rngs):
        self.conv = Conv(inputs, outputs, 1, stride, precision=precision, rngs=rngs)
        self.norm = BatchNorm(outputs, param_dtype=param_dtype(precision))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, *, precision: str, rngs: nnx.Rngs):
        dtype = param_dtype(precision)
        self.conv1 = Conv(inputs, width, 3, stride, precision=precision, rngs=rngs)
        self.norm1 = BatchNorm(width, param_dtype=dtype)
        self.conv2 = Conv(width, width, 3, precision=precision, rngs=rngs)
        self.norm2 = BatchNorm(width, zero_scale=True, param_dtype=dtype)
        self.shortcut = _shortcut(inputs, width, stride, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class BottleneckBlock(nnx.Module):
    """A 3x3 convolution between two 1x1 ones that narrow and widen by four, beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, *, precision: str, rngs: nnx.Rngs):
        dtype, outputs = param_dtype(precision), width * self.expansion
        self.conv1 = Conv(inputs, width, 1, precision=precision, rngs=rngs)
        self.norm1 = BatchNorm(width, param_dtype=dtype)
        self.conv2 = Conv(width, width, 3, stride, precision=precision, rngs=rngs)
        self.norm2 = BatchNorm(width, param_dtype=dtype)
        self.conv3 = Conv(width, outputs, 1, precision=precision, rngs=rngs)
        self.norm3 = BatchNorm(outputs, zero_scale=True, param_dtype=dtype)
        self.shortcut = _shortcut(inputs, outputs, stride, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


Block = type[BasicBlock] | type[BottleneckBlock]


def convolutions(block: BasicBlock | BottleneckBlock) -> list[tuple[Conv, BatchNorm]]:
    """Those of a block beside its shortcut, each with its batch norm, in the order of the forward pass."""
    found = [(block.conv1, block.norm1), (block.conv2, block.norm2)]
    return [*found, (block.conv3, block.norm3)] if isinstance(block, BottleneckBlock) else found


def _shortcut(inputs: int, outputs: int, stride: int, precision: str, rngs: nnx.Rngs) -> Projection | None:
    if inputs == outputs and stride == 1:
        return None
    return Projection(inputs, outputs, stride, precision=precision, rngs=rngs)


class Head(nnx.Module):
    """The mean over the map, then one dense layer; both in the parameters' dtype, whatever the computation's."""

    def __init__(self, inputs: int, classes: int, *, precision: str, rngs: nnx.Rngs):
        self.kernel = draw((inputs, classes), 0.01, precision, rngs)
        self.bias = nnx.Param(jnp.zeros(classes, param_dtype(precision)))

    def __call__(self, x: jax.Array) -> jax.Array:
        features = jnp.mean(x, axis=(1, 2), dtype=self.kernel.dtype)
        return features @ self.kernel[...] + self.bias[...]


# Blocks per stage; every stage after the first halves the map and doubles the channels.
DEPTHS: dict[str, tuple[Block, tuple[int, ...]]] = {
    "resnet8": (BasicBlock, (1, 1, 1)),
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (BottleneckBlock, (3, 4, 6, 3)),
    "resnet101": (BottleneckBlock, (3, 4, 23, 3)),
    "resnet152": (BottleneckBlock, (3, 8, 36, 3)),
}


class ResNet(nnx.Module):
    """Normalized pictures [images, height, width, 3] to logits [images, classes], float32 (float64 for float64)."""

    def __init__(self, block: Block, stages: tuple[int, ...], config: recipe.Model, classes: int, rngs: nnx.Rngs):
        self.stages = stages
        self.dtype = jnp.dtype(config.precision)
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
        x = images.astype(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


def build(name: str, config: recipe.Model, classes: int, image_size: int, rngs: nnx.Rngs) -> ResNet:
    """The ResNet of that name in `DEPTHS`, if pictures of that size fit its stem."""
    _check_size(config.stem, image_size)
    block, stages = DEPTHS[name]
    return ResNet(block, stages, config, classes, rngs)


def _check_size(stem: str, size: int) -> None:
    least = 8 if stem == "small" else 32  # pixels that become the last map's one
    step, words = (2, "an even number, at least") if stem == "space_to_depth" else (1, "at least")
    if size < least or size % step:
        around = suggest_numbers(size, range(least, max(size, least) + 2, step))
        raise UserError(f"data.image_size {size} does not fit the stem {stem}, which needs {words} {least}; {around}")
