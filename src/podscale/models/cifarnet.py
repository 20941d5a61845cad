"""CifarNet: a small network that learns 32-pixel pictures in seconds (after Jordan 2024, arXiv 2404.00498).

Its first layer is not learnt: 2x2 patches of the training pictures, turned and scaled so that their parts are
uncorrelated and equally strong, each once with either sign. Then come three groups of two convolutions, which begin as
the identity as far as they have channels for it, and whose batch norms have no scale: what comes next would undo it.

A GPU shall have few maps to move to and from its memory: gradients of maxima and of GELUs are written out, so that
little is kept for them, and no convolution computes what a maximum after it leaves out.

Parts stand in one list, as in `resnet`, whose convolutions these are.
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
from podscale.models.resnet import Conv, draw, param_dtype
from podscale.parallel.batch_norm import BatchNorm

PATCH = 2  # side of the patches that are whitened, in pixels
ALIGNED = 8  # channels, which the matrix units of GPUs take at once; three are filled up with zeros
SMALLEST = 9  # pixels: 9 - 1 are halved three times
FAINT = 5e-4  # added to the variance of a patch's parts, so that the faintest are not blown up
WIDER = 4  # channels of the last two groups, as multiples of the first's


class Whitening(nnx.Module):
    """A 2x2 convolution whose filters `fit` makes; its bias is learnt."""

    def __init__(self, precision: str, rngs: nnx.Rngs) -> None:
        outputs = 2 * 3 * PATCH**2
        self.kernel = draw((PATCH, PATCH, 3, outputs), 1 / math.sqrt(outputs), precision, rngs)
        self.bias = nnx.Param(jnp.zeros(outputs, param_dtype(precision)))

    def __call__(self, x: jax.Array) -> jax.Array:
        more = ((0, 0), (0, 0), (0, 0), (0, ALIGNED - 3))
        x, kernel = jnp.pad(x, more), jnp.pad(self.kernel[...].astype(x.dtype), (*more[:2], more[3], (0, 0)))
        y = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return gelu(y + self.bias[...].astype(x.dtype))

    def fit(self, images: NDArray[np.float32]) -> None:
        """Filters that whiten the patches of these pictures, as they are normalized: [n, height, width, 3]."""
        filters = whitening(images).T.reshape(PATCH, PATCH, 3, -1)
        self.kernel[...] = jnp.asarray(np.concatenate([filters, -filters], axis=3), self.kernel.dtype)


def whitening(images: NDArray[np.float32]) -> NDArray[np.float64]:
    """The directions in which the pictures' patches vary, strongest first, each over its standard deviation: [12, 12].

    A row is a filter of [height, width, channel]. Its largest number is positive, so that there is but one answer.
    """
    height, width = (side - PATCH + 1 for side in images.shape[1:3])
    moments = np.zeros((3 * PATCH**2,) * 2)
    for some in np.array_split(images, max(1, len(images) // 256)):
        corners = [(y, x) for y in range(PATCH) for x in range(PATCH)]
        patches = np.concatenate([some[:, y : y + height, x : x + width] for y, x in corners], axis=3)
        flat = patches.reshape(-1, 3 * PATCH**2).astype(np.float64)
        moments += flat.T @ flat
    variances, directions = np.linalg.eigh(moments / (len(images) * height * width))
    rows = directions.T[::-1]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1, keepdims=True), axis=1)
    found: NDArray[np.float64] = rows * np.sign(largest) / np.sqrt(variances[::-1, None] + FAINT)
    return found


class Group(nnx.Module):
    """Two 3x3 convolutions, each with batch norm, and the map halved after the first."""

    def __init__(self, inputs: int, outputs: int, *, precision: str, rngs: nnx.Rngs) -> None:
        dtype = param_dtype(precision)
        self.conv1 = _as_identity(Conv(inputs, outputs, 3, precision=precision, rngs=rngs))
        self.norm1 = BatchNorm(outputs, scaled=False, param_dtype=dtype)
        self.conv2 = _as_identity(Conv(outputs, outputs, 3, precision=precision, rngs=rngs))
        self.norm2 = BatchNorm(outputs, scaled=False, param_dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = gelu(self.norm1(halved(_even_part(self.conv1, x))))
        return gelu(self.norm2(self.conv2(x)))


def _as_identity(conv: Conv) -> Conv:
    """The convolution, its first outputs the same as its inputs; the others drawn with variance 1/(27·inputs)."""
    conv.kernel[...] = _with_identity(conv.kernel[...])
    return conv


@jax.jit  # as one program, because each takes its time to compile
def _with_identity(drawn: jax.Array) -> jax.Array:
    size, _, inputs, outputs = drawn.shape
    same = jnp.arange(outputs) < inputs
    unit = jnp.zeros_like(drawn).at[size // 2, size // 2].set(jnp.eye(inputs, outputs, dtype=drawn.dtype))
    return jnp.where(same, unit, drawn * math.sqrt(outputs / (6 * inputs)))  # from He's scale, which is for outputs


def _even_part(conv: Conv, x: jax.Array) -> jax.Array:
    """What the convolution gives, without an odd last row or column, which halving would leave out."""
    margins = [(1, 1 - side % 2) for side in x.shape[1:3]]
    kernel = conv.kernel[...].astype(x.dtype)
    return lax.conv_general_dilated(x, kernel, (1, 1), margins, dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    """The largest of every 2x2 places of a map [images, height, width, channels] of even sides.

    Its gradient goes to the first of them that is the largest. Which one that is, a byte, is all that is kept for it.
    """
    return _largest(x)[0]


def _largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    images, height, width, channels = x.shape
    blocks = x.reshape(images, height // 2, 2, width // 2, 2, channels)
    a, b, c, d = (blocks[:, :, y, :, x] for y in range(2) for x in range(2))
    most = jnp.maximum(jnp.maximum(a, b), jnp.maximum(c, d))
    which = jnp.where(a == most, 0, jnp.where(b == most, 1, jnp.where(c == most, 2, 3)))
    return lax.optimization_barrier((most, which.astype(jnp.int8)))  # both now, while the map is read anyway


def _back_to_the_largest(which: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    images, height, width, channels = which.shape
    place = jnp.arange(4, dtype=jnp.int8).reshape(2, 1, 2, 1)  # of [height, 2, width, 2, channels]
    blocks = jnp.where(which[:, :, None, :, None] == place, gradient[:, :, None, :, None], 0)
    return (blocks.reshape(images, 2 * height, 2 * width, channels),)


halved.defvjp(_largest, _back_to_the_largest)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """GELU by tanh (Hendrycks and Gimpel, arXiv 1606.08415); of it only its input is kept for the gradient."""
    return jax.nn.gelu(x)


def _through_gelu(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    # Behind the barrier the compiler does not see that it has computed the same before, and would have to keep it.
    return tuple(jax.vjp(jax.nn.gelu, lax.optimization_barrier(x))[1](gradient))


gelu.defvjp(lambda x: (jax.nn.gelu(x), x), _through_gelu)


class Head(nnx.Module):
    """The largest of each channel's map, then one dense layer without bias, its answers made small."""

    def __init__(self, inputs: int, classes: int, *, precision: str, rngs: nnx.Rngs) -> None:
        self.kernel = draw((inputs, classes), 1.0, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        features = x.max(axis=(1, 2)).astype(self.kernel.dtype)
        return features @ self.kernel[...] / self.kernel.shape[0]


class CifarNet(nnx.Module):
    """Normalized pictures [images, height, width, 3] to logits [images, classes], float32 (float64 for float64)."""

    def __init__(self, config: recipe.Model, classes: int, rngs: nnx.Rngs) -> None:
        self.dtype = jnp.dtype(config.precision)
        whitened = Whitening(config.precision, rngs)
        channels = [whitened.bias.shape[0], config.width, WIDER * config.width, WIDER * config.width]
        layers: list[nnx.Module] = [whitened]
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
        """Looks at training pictures before training begins."""
        whitened = self.layers[0]
        assert isinstance(whitened, Whitening)
        whitened.fit(images)


def build(config: recipe.Model, classes: int, image_size: int, rngs: nnx.Rngs) -> CifarNet:
    """The network, if pictures of that size are large enough for it."""
    if image_size < SMALLEST:
        raise UserError(f"data.image_size {image_size} does not fit cifarnet, which needs at least {SMALLEST}")
    return CifarNet(config, classes, rngs)
