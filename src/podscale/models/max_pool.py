"""The max-pool of a ResNet's stem: 3x3 windows at stride 2, with a gradient that is the same every time on GPUs.

XLA's gradient scatters: every window adds to the pixel that is its maximum. GPUs do that in any order, or sort first,
which takes long, where results must be the same every time. There, every pixel gathers instead: it looks for itself
among the maxima of the windows that contain it, at most two by two.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

Images = Float[Array, "images height width channels"]
Maxima = Float[Array, "images rows columns channels"]
SIZE, STRIDE, PADDING = 3, 2, 1


@jax.custom_vjp
def max_pool(x: Images) -> Maxima:
    """Return the maximum of each 3x3 window, at stride 2."""
    return _compute_maxima(x)


def _compute_maxima(x: Images) -> Maxima:
    return nnx.max_pool(x, (SIZE, SIZE), strides=(STRIDE, STRIDE), padding=((PADDING, PADDING), (PADDING, PADDING)))


def _backpropagate(x: Images, dy: Maxima) -> tuple[Images]:
    return (lax.platform_dependent(x, dy, cuda=gather_gradient, default=scatter_gradient),)


max_pool.defvjp(lambda x: (_compute_maxima(x), x), _backpropagate)


def scatter_gradient(x: Images, dy: Maxima) -> Images:
    """Return the gradient by x from that by the maxima, by XLA's own rule."""
    gradient: Images = jax.vjp(_compute_maxima, x)[1](dy)[0]
    return gradient


def gather_gradient(x: Images, dy: Maxima) -> Images:
    """Return the same, each pixel's sum in a fixed order. Of equal maxima the first counts, as in XLA's rule."""
    (height, width), (rows, columns) = x.shape[1:3], dy.shape[1:3]
    padding = ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0))
    padded = jnp.pad(x, padding, constant_values=-jnp.inf)
    largest, place = jnp.full(dy.shape, -jnp.inf, x.dtype), jnp.zeros(dy.shape, jnp.uint8)
    for number, (down, right) in enumerate(np.ndindex(SIZE, SIZE)):
        value = padded[:, down : down + STRIDE * rows - 1 : STRIDE, right : right + STRIDE * columns - 1 : STRIDE]
        place = jnp.where(value > largest, jnp.uint8(number), place)
        largest = jnp.maximum(value, largest)

    def spread(offset: int, windows: int, side: int) -> tuple[int, int, int]:
        """Return what to pad along an axis with, so that each window stands at its pixel of this offset."""
        first = offset - PADDING
        return first, side - first - (STRIDE * (windows - 1) + 1), STRIDE - 1

    wide = dy.astype(jnp.promote_types(dy.dtype, jnp.float32))
    total = jnp.zeros(x.shape, wide.dtype)
    for number, (down, right) in enumerate(np.ndindex(SIZE, SIZE)):
        margins = ((0, 0, 0), spread(down, rows, height), spread(right, columns, width), (0, 0, 0))
        total += lax.pad(jnp.where(place == number, wide, 0), jnp.zeros((), wide.dtype), margins)
    return total.astype(x.dtype)
