"""CifarNet: a small network that learns 32-pixel images in seconds (after Jordan 2024, arXiv 2404.00498).

Its first layer is not learned: its filters whiten 2x2 patches of the training images, so that the components of a patch
are uncorrelated and have equal variance; each filter occurs with both signs. Then follow three groups of two
convolutions, which start as the identity as far as they have channels for it. Their batch norms have no scale, because
the next layer would undo it.

To leave a GPU few maps to move to and from its memory, the gradients of max-pooling and of GELU are written out, so
that little is kept for them, and no convolution computes what the max-pooling after it discards.

The layers are in one list, as in `resnet`, which provides the convolutions.
"""

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from numpy.typing import NDArray

from podscale import recipe
from podscale.errors import UserError
from podscale.models.resnet import Conv, init_normal, select_param_dtype
from podscale.parallel.batch_norm import BatchNorm

PATCH = 2  # side of the patches that are whitened, in pixels
CHANNEL_ALIGNMENT = 8  # channels that the matrix units of GPUs take at once; three are padded with zeros
MIN_IMAGE_SIZE = 9  # pixels: 9 - 1 are halved three times
VARIANCE_EPSILON = 5e-4  # added to the variance of a patch's components, so that the weakest are not amplified
WIDTH_FACTOR = 4  # channels of the last two groups, as multiples of the first group's


# --- whitening -----------------------------------------------------------------------------------------------------


class Whitening(nnx.Module):
    """A 2x2 convolution whose filters `fit` computes; only its bias is learned."""

    def __init__(self, precision: str, rngs: nnx.Rngs) -> None:
        outputs = 2 * 3 * PATCH**2
        self.kernel = init_normal((PATCH, PATCH, 3, outputs), 1 / math.sqrt(outputs), precision, rngs)
        self.bias = nnx.Param(jnp.zeros(outputs, select_param_dtype(precision)))

    def __call__(self, x: jax.Array) -> jax.Array:
        padding = ((0, 0), (0, 0), (0, 0), (0, CHANNEL_ALIGNMENT - 3))
        x, kernel = jnp.pad(x, padding), jnp.pad(self.kernel[...].astype(x.dtype), (*padding[:2], padding[3], (0, 0)))
        y = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return gelu(y + self.bias[...].astype(x.dtype))

    def fit(self, images: NDArray[np.float32]) -> None:
        """Set the filters that whiten the patches of these normalized images, [n, height, width, 3]."""
        filters = compute_whitening_filters(images).T.reshape(PATCH, PATCH, 3, -1)
        self.kernel[...] = jnp.asarray(np.concatenate([filters, -filters], axis=3), self.kernel.dtype)


def compute_whitening_filters(images: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the directions in which the images' patches vary, each divided by its standard deviation: [12, 12].

    A row is a filter of [height, width, channel]; the direction of the largest variance comes first. The element of
    largest magnitude in a row is positive, so that the result is unique.
    """
    height, width = (side - PATCH + 1 for side in images.shape[1:3])
    moments = np.zeros((3 * PATCH**2,) * 2)
    for batch in np.array_split(images, max(1, len(images) // 256)):
        corners = [(y, x) for y in range(PATCH) for x in range(PATCH)]
        patches = np.concatenate([batch[:, y : y + height, x : x + width] for y, x in corners], axis=3)
        flat = patches.reshape(-1, 3 * PATCH**2).astype(np.float64)
        moments += flat.T @ flat
    variances, directions = np.linalg.eigh(moments / (len(images) * height * width))
    rows = directions.T[::-1]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1, keepdims=True), axis=1)
    filters: NDArray[np.float64] = rows * np.sign(largest) / np.sqrt(variances[::-1, None] + VARIANCE_EPSILON)
    return filters


# --- convolutions --------------------------------------------------------------------------------------------------


class Group(nnx.Module):
    """Two 3x3 convolutions, each with batch norm and GELU, with 2x2 max-pooling after the first."""

    def __init__(self, inputs: int, outputs: int, *, precision: str, rngs: nnx.Rngs) -> None:
        dtype = select_param_dtype(precision)
        self.conv1 = _init_as_identity(Conv(inputs, outputs, 3, precision=precision, rngs=rngs))
        self.norm1 = BatchNorm(outputs, scaled=False, param_dtype=dtype)
        self.conv2 = _init_as_identity(Conv(outputs, outputs, 3, precision=precision, rngs=rngs))
        self.norm2 = BatchNorm(outputs, scaled=False, param_dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = gelu(self.norm1(max_pool_2x2(_convolve_even_part(self.conv1, x))))
        return gelu(self.norm2(self.conv2(x)))


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
    margins = [(1, 1 - side % 2) for side in x.shape[1:3]]
    kernel = conv.kernel[...].astype(x.dtype)
    return lax.conv_general_dilated(x, kernel, (1, 1), margins, dimension_numbers=("NHWC", "HWIO", "NHWC"))


# --- max-pooling and GELU with written-out gradients ---------------------------------------------------------------


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
    a, b, c, d = (blocks[:, :, y, :, x] for y in range(2) for x in range(2))
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
        whitening = Whitening(config.precision, rngs)
        channels = [whitening.bias.shape[0], config.width, WIDTH_FACTOR * config.width, WIDTH_FACTOR * config.width]
        layers: list[nnx.Module] = [whitening]
        for inputs, outputs in pairwise(channels):
            layers.append(Group(inputs, outputs, precision=config.precision, rngs=rngs))
        layers.append(Head(channels[-1], classes, precision=config.precision, rngs=rngs))
        self.layers = nnx.List(layers)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.astype(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return x

    def fit(self, images: NDArray[np.float32]) -> None:
        """Compute the whitening filters from training images; called before training starts."""
        whitening = self.layers[0]
        assert isinstance(whitening, Whitening)
        whitening.fit(images)


def build_cifarnet(config: recipe.Model, classes: int, image_size: int, rngs: nnx.Rngs) -> CifarNet:
    """Return the network.

    Raises:
        UserError: images of that size are too small for it.
    """
    if image_size < MIN_IMAGE_SIZE:
        raise UserError(f"data.image_size {image_size} does not fit cifarnet, which needs at least {MIN_IMAGE_SIZE}")
    return CifarNet(config, classes, rngs)
