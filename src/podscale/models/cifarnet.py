"""CifarNet: a small network that learns 32-pixel images in seconds (after Jordan 2024, arXiv 2404.00498).

Its first layer is not learned: its filters whiten 2x2 patches of the training images, so that the components of a patch
are uncorrelated and have equal variance; each filter occurs with both signs. Then follow three groups of two
convolutions, which start as the identity as far as they have channels for it. Their batch norms have no scale, because
the next layer would undo it.

To leave a GPU few maps to move to and from its memory, the gradients of max-pooling and of the activations are written
out, so that little is kept for them; batch norm and the activation after it keep one map together; and no convolution
computes what the max-pooling after it discards. With `model.stem` space_to_depth the first two convolutions work on
2x2 blocks of places, because a GPU's matrix units are too wide for their few channels.

The layers are in one list, as in `resnet`, which provides the convolutions.
"""

import math
from itertools import pairwise
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from numpy.typing import NDArray

from podscale import recipe
from podscale.errors import UserError
from podscale.models.initializers import init_normal, select_param_dtype
from podscale.models.resnet import Conv
from podscale.parallel.batch_norm import BatchNorm
from podscale.parallel.placement import fill

PATCH = 2  # side of the patches that are whitened, in pixels
CHANNEL_ALIGNMENT = 8  # channels that the matrix units of GPUs take at once; three are padded with zeros
MIN_IMAGE_SIZE = 9  # pixels: 9 - 1 are halved three times
VARIANCE_EPSILON = 5e-4  # added to the variance of a patch's components, so that the weakest are not amplified
GATE_EDGE = 2.25  # where the cubic gate of `cubic_gelu` reaches 0 and 1
PATCH_VALUES = 2**26  # values of patches that are held in memory at once
WIDTH_FACTOR = 4  # channels of the last two groups, as multiples of the first group's


# --- whitening -----------------------------------------------------------------------------------------------------


class Whitening(nnx.Module):
    """A 2x2 convolution whose filters `compute_whitening_kernel` computes; only its bias is learned."""

    def __init__(self, precision: str, rngs: nnx.Rngs, activation: str = "default") -> None:
        outputs = 2 * 3 * PATCH**2
        self.kernel = init_normal((PATCH, PATCH, 3, outputs), 1 / math.sqrt(outputs), precision, rngs)
        self.bias = nnx.Param(fill(outputs, 0, select_param_dtype(precision)))
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        padding = ((0, 0), (0, 0), (0, 0), (0, CHANNEL_ALIGNMENT - 3))
        x, kernel = jnp.pad(x, padding), jnp.pad(self.kernel[...].astype(x.dtype), (*padding[:2], padding[3], (0, 0)))
        return ACTIVATIONS[self.activation](_convolve(x, kernel) + self.bias[...].astype(x.dtype))

    def forward_blocks(self, x: jax.Array) -> jax.Array:
        """Return the same map, with a row of zeros above it and a column of zeros before it, as 2x2 blocks.

        [images, 2·height, 2·width, 3] becomes [images, height, width, 4·outputs].
        """
        x = to_blocks(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 1))))
        kernel = make_block_kernel(jnp.pad(self.kernel[...], ((0, 0), (0, 0), (0, 1), (0, 0))))
        y = _convolve(x, kernel.astype(x.dtype)) + jnp.tile(self.bias[...], 4).astype(x.dtype)
        row, column, channel = (lax.broadcasted_iota(jnp.int32, y.shape[1:], axis) for axis in range(3))
        place = channel // self.bias.shape[0]
        inside = ((row > 0) | (place >= 2)) & ((column > 0) | (place % 2 == 1))
        return jnp.where(inside, ACTIVATIONS[self.activation](y), 0)


def compute_whitening_kernel(images: jax.Array | NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the first layer's kernel for normalized images [n, height, width, 3]: each filter with both signs."""
    filters = compute_whitening_filters(compute_patch_moments(images)).T.reshape(PATCH, PATCH, 3, -1)
    return np.concatenate([filters, -filters], axis=3)


def compute_patch_moments(images: jax.Array | NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the mean products of any two of the 12 values [height, width, channel] of a patch, over all patches.

    The device sums over the patches of each image in float32, the host over images in float64.
    """
    patches = (images.shape[1] - PATCH + 1) * (images.shape[2] - PATCH + 1)
    at_once = max(1, PATCH_VALUES // (patches * 3 * PATCH**2))
    parts = [images] if len(images) <= at_once else [images[i : i + at_once] for i in range(0, len(images), at_once)]
    sums = sum(np.asarray(_sum_patch_products(part)).sum(axis=0, dtype=np.float64) for part in parts)
    return np.asarray(sums) / (len(images) * patches)


@jax.jit
def _sum_patch_products(images: jax.Array) -> jax.Array:
    """Return the sums over the patches of each image, [n, 12, 12]."""
    height, width = (side - PATCH + 1 for side in images.shape[1:3])
    corners = [(y, x) for y in range(PATCH) for x in range(PATCH)]
    patches = jnp.concatenate([images[:, y : y + height, x : x + width] for y, x in corners], axis=3)
    return jnp.einsum("nyxi,nyxj->nij", patches, patches, precision=lax.Precision.HIGHEST)


def compute_whitening_filters(moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the directions in which patches of these moments vary, each divided by its standard deviation: [12, 12].

    A row is a filter of [height, width, channel]; the direction of the largest variance comes first. The element of
    largest magnitude in a row is positive, so that the result is unique.
    """
    variances, directions = np.linalg.eigh(moments)
    rows = directions.T[::-1]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1, keepdims=True), axis=1)
    filters: NDArray[np.float64] = rows * np.sign(largest) / np.sqrt(variances[::-1, None] + VARIANCE_EPSILON)
    return filters


# --- convolutions --------------------------------------------------------------------------------------------------


class Group(nnx.Module):
    """Two 3x3 convolutions, each with batch norm and activation, with 2x2 max-pooling after the first."""

    def __init__(
        self, inputs: int, outputs: int, *, precision: str, rngs: nnx.Rngs, activation: str = "default"
    ) -> None:
        dtype = select_param_dtype(precision)
        self.conv1 = _init_as_identity(Conv(inputs, outputs, 3, precision=precision, rngs=rngs))
        self.norm1 = BatchNorm(outputs, scaled=False, param_dtype=dtype)
        self.conv2 = _init_as_identity(Conv(outputs, outputs, 3, precision=precision, rngs=rngs))
        self.norm2 = BatchNorm(outputs, scaled=False, param_dtype=dtype)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._forward_pooled(max_pool_2x2(_convolve_even_part(self.conv1, x)))

    def forward_blocks(self, x: jax.Array) -> jax.Array:
        """Return the same for 2x2 blocks of a map that has its zeros above and before it already."""
        kernel = make_block_kernel(self.conv1.kernel[...]).astype(x.dtype)
        return self._forward_pooled(max_pool_blocks(_convolve(x, kernel)))

    def _forward_pooled(self, x: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.activation]
        return self.norm2(self.conv2(self.norm1(x, activation=activation)), activation=activation)


def _init_as_identity(conv: Conv) -> Conv:
    """Make the first outputs of a convolution equal to its inputs, the others random with variance 1/(27·inputs)."""
    conv.kernel[...] = _set_identity(conv.kernel[...])
    return conv


@jax.jit  # one program, because each takes time to compile
def _set_identity(kernel: jax.Array) -> jax.Array:
    size, _, inputs, outputs = kernel.shape
    is_identity = jnp.arange(outputs) < inputs
    identity = jnp.zeros_like(kernel).at[size // 2, size // 2].set(jnp.eye(inputs, outputs, dtype=kernel.dtype))
    return jnp.where(is_identity, identity, kernel * math.sqrt(outputs / (6 * inputs)))  # from He's scale by fan-out


def _convolve_even_part(conv: Conv, x: jax.Array) -> jax.Array:
    """Return the convolution without an odd last row or column, which max-pooling would discard."""
    return _convolve(x, conv.kernel[...].astype(x.dtype), [(1, 1 - side % 2) for side in x.shape[1:3]])


def _convolve(x: jax.Array, kernel: jax.Array, padding: str | list[tuple[int, int]] = "VALID") -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


# --- 2x2 blocks of places, which have four times the channels ------------------------------------------------------


def to_blocks(x: jax.Array) -> jax.Array:
    """Return a map [images, 2·height, 2·width, channels] as [images, height, width, 4·channels]."""
    images, height, width, channels = x.shape
    split = x.reshape(images, height // 2, 2, width // 2, 2, channels)
    return split.transpose(0, 1, 3, 2, 4, 5).reshape(images, height // 2, width // 2, 4 * channels)


def make_block_kernel(kernel: jax.Array) -> jax.Array:
    """Return the kernel [2, 2, 4·inputs, 4·outputs] that does to blocks what `kernel`, of side 2 or 3, does to the map.

    Block [y, x] of the result needs blocks [y, x] to [y + 1, x + 1]: four rows, of which each of its own two takes
    `side`. That is 4 or 16/9 times the arithmetic, on four times the channels.
    """
    side, _, inputs, outputs = kernel.shape
    for axis in (0, 1):
        shifted = []
        for start in range(2):
            padding = [(0, 0)] * 4
            padding[axis] = (start, 4 - side - start)
            shifted.append(jnp.pad(kernel, padding))
        kernel = jnp.stack(shifted, axis=-2)  # [..., place of an output's row and column, outputs]
        kernel = kernel.reshape(*kernel.shape[:3], -1)
    split = kernel.reshape(2, 2, 2, 2, inputs, 2, 2, outputs)  # [ky, dy, kx, dx, inputs, ox, oy, outputs]
    return split.transpose(0, 2, 1, 3, 4, 6, 5, 7).reshape(2, 2, 4 * inputs, 4 * outputs)


@jax.custom_vjp
def max_pool_blocks(x: jax.Array) -> jax.Array:
    """Return `max_pool_2x2` of a map that is given as blocks, [images, height, width, 4·channels]."""
    return _max_pool_blocks_forward(x)[0]


def _max_pool_blocks_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _find_largest(*jnp.split(x, 4, axis=-1))


def _max_pool_blocks_backward(index: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    places = jnp.arange(4, dtype=jnp.int8)[:, None]
    blocks = jnp.where(index[..., None, :] == places, gradient[..., None, :], 0)
    return (blocks.reshape(*index.shape[:-1], -1),)


max_pool_blocks.defvjp(_max_pool_blocks_forward, _max_pool_blocks_backward)


# --- max-pooling and activations with written-out gradients --------------------------------------------------------


@jax.custom_vjp
def max_pool_2x2(x: jax.Array) -> jax.Array:
    """Return the maximum of every 2x2 window of a map [images, height, width, channels] of even sides.

    The gradient goes to the first place of a window that holds its maximum. The index of that place, a byte, is all
    that is kept for it.
    """
    return _max_pool_forward(x)[0]


def _max_pool_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    images, height, width, channels = x.shape
    blocks = x.reshape(images, height // 2, 2, width // 2, 2, channels)
    return _find_largest(*(blocks[:, :, y, :, x] for y in range(2) for x in range(2)))


def _find_largest(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest of four values, and the index of the first that has it."""
    largest = jnp.maximum(jnp.maximum(a, b), jnp.maximum(c, d))
    index = jnp.where(a == largest, 0, jnp.where(b == largest, 1, jnp.where(c == largest, 2, 3)))
    return lax.optimization_barrier((largest, index.astype(jnp.int8)))  # both now, while the map is read anyway


def _max_pool_backward(index: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    images, height, width, channels = index.shape
    places = jnp.arange(4, dtype=jnp.int8).reshape(2, 1, 2, 1)  # of [height, 2, width, 2, channels]
    blocks = jnp.where(index[:, :, None, :, None] == places, gradient[:, :, None, :, None], 0)
    return (blocks.reshape(images, 2 * height, 2 * width, channels),)


max_pool_2x2.defvjp(_max_pool_forward, _max_pool_backward)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Return GELU in its tanh form (Hendrycks and Gimpel, arXiv 1606.08415); only x is kept for the gradient."""
    return jax.nn.gelu(x)


def _gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    # The barrier hides from the compiler that it has computed the same before, which it would otherwise keep.
    return tuple(jax.vjp(jax.nn.gelu, lax.optimization_barrier(x))[1](gradient))


gelu.defvjp(lambda x: (jax.nn.gelu(x), x), _gelu_backward)


@jax.custom_vjp
def cubic_gelu(x: jax.Array) -> jax.Array:
    """Return x times a gate that rises from 0 to 1 as a cubic between ∓GATE_EDGE: GELU to within 0.031.

    It takes seven instructions where GELU's tanh takes dozens, which keep a GPU busy longer than its memory does.
    """
    return x * _compute_gate(x)[0]


def _compute_gate(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gate and its argument, scaled and clipped to -1..1."""
    t = jnp.clip(x * (1 / GATE_EDGE), -1, 1)
    return 0.5 + t * (0.75 - 0.25 * t * t), t


def _cubic_gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    gate, t = _compute_gate(x)
    return (gradient * (gate + x * (0.75 / GATE_EDGE) * (1 - t * t)),)


cubic_gelu.defvjp(lambda x: (cubic_gelu(x), x), _cubic_gelu_backward)

ACTIVATIONS = MappingProxyType({"default": gelu, "cubic_gelu": cubic_gelu})  # by `model.activation`


# --- the network ---------------------------------------------------------------------------------------------------


class Head(nnx.Module):
    """The maximum over each channel's map, then one dense layer without bias whose logits are scaled down."""

    def __init__(self, inputs: int, classes: int, *, precision: str, rngs: nnx.Rngs) -> None:
        self.kernel = init_normal((inputs, classes), 1.0, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        features = x.max(axis=(1, 2)).astype(self.kernel.dtype)
        return features @ self.kernel[...] / self.kernel.shape[0]


class CifarNet(nnx.Module):
    """Maps normalized images [images, height, width, 3] to logits [images, classes], float32 (float64 for float64)."""

    def __init__(self, config: recipe.Model, classes: int, rngs: nnx.Rngs) -> None:
        self.dtype = jnp.dtype(config.precision)
        whitening = Whitening(config.precision, rngs, config.activation)
        channels = [whitening.bias.shape[0], config.width, WIDTH_FACTOR * config.width, WIDTH_FACTOR * config.width]
        layers: list[nnx.Module] = [whitening]
        for inputs, outputs in pairwise(channels):
            layers.append(Group(inputs, outputs, precision=config.precision, rngs=rngs, activation=config.activation))
        layers.append(Head(channels[-1], classes, precision=config.precision, rngs=rngs))
        self.layers = nnx.List(layers)
        self.uses_blocks = config.stem == "space_to_depth"

    def __call__(self, images: jax.Array) -> jax.Array:
        x, layers = images.astype(self.dtype), list(self.layers)
        if self.uses_blocks:
            for layer in layers[:2]:
                assert isinstance(layer, Whitening | Group)
                x = layer.forward_blocks(x)
            layers = layers[2:]
        for layer in layers:
            x = layer(x)
        return x

    def fit_parameters(self, images: jax.Array | NDArray[np.float32]) -> dict[str, NDArray]:
        """Return the parameters that follow from training images, by name: the whitening filters."""
        return {"layers.0.kernel": compute_whitening_kernel(images)}


def build_cifarnet(config: recipe.Model, classes: int, image_size: int, rngs: nnx.Rngs) -> CifarNet:
    """Return the network.

    Raises:
        UserError: images of that size are too small for it, or an odd number of pixels does not make 2x2 blocks.
    """
    if config.stem == "space_to_depth" and image_size % 2:
        raise UserError(
            f"data.image_size {image_size} does not fit model.stem space_to_depth, which needs an even number"
        )
    if image_size < MIN_IMAGE_SIZE:
        raise UserError(f"data.image_size {image_size} does not fit cifarnet, which needs at least {MIN_IMAGE_SIZE}")
    return CifarNet(config, classes, rngs)
