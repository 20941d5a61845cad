"""The stem's end: normalize, rectify and take the maximum over 3x3 windows at stride 2, without the maps in between.

The pixels come in blocks of 2x2, as many as there are windows: a window is its own block, and what borders on it of the
blocks above and beside it. What is stored and loaded is then always whole channels in a row.

Forward, each window notes which of its nine places it took, and what stood there before it was normalized. Backward, a
pixel asks the windows that it lies in, at most two by two, whether they took it, instead of the windows scattering what
they have. The sums that batch norm's gradient needs are over windows, a quarter as many as pixels. Where several places
are the largest, the first one counts, as in XLA's own gradient.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from podscale.kernels import reference
from podscale.kernels.fused import Affine, Raw
from podscale.kernels.shape import Shape

Array = jax.Array


def twin(x: Array, affine: Affine) -> Array:
    """The same, step by step."""
    images, rows, columns, channels = x.shape
    pixels = x.reshape(images, rows, columns, 2, 2, channels // 4).transpose(0, 1, 3, 2, 4, 5)
    y = reference.rectified(pixels.reshape(images, 2 * rows, 2 * columns, channels // 4), affine, None, ())
    return nnx.max_pool(y, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


def pooled(groups: int, x: Raw, affine: Affine) -> Array:
    """From blocks of 2x2 pixels [images, rows, columns, 4 · channels] to windows [images, rows, columns, channels]."""
    return _pooled(groups, x.values, x.factor, affine)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pooled(groups: int, x: Array, x_factor: Array, affine: Affine) -> Array:
    return _forward(groups, x, x_factor, affine)[0]


def _forward(groups: int, x: Array, x_factor: Array, affine: Affine) -> Any:
    images, rows, columns, channels = x.shape
    blocks = x.reshape(images, rows, columns, 2, 2, channels // 4)
    inner_row, inner_column = (jnp.arange(n) > 0 for n in (rows, columns))
    most: Any = None
    for k in range(9):
        down, right = divmod(k, 3)
        raw = blocks[:, :, :, (down + 1) % 2, (right + 1) % 2]
        if down == 0:
            raw = jnp.pad(raw, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :rows]  # the block above
        if right == 0:
            raw = jnp.pad(raw, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :columns]
        here = reference.rectified(raw, affine, None, ())
        # Beside the picture there is 0, which is never more than what is in it, and takes no part in the gradient.
        if down == 0:
            here = jnp.where(inner_row[:, None, None], here, 0)
        if right == 0:
            here = jnp.where(inner_column[:, None], here, 0)
        if k == 0:
            most, place, taken = here, jnp.zeros((), jnp.uint8), raw
        else:
            more = here > most
            most, place, taken = (
                jnp.maximum(here, most),
                jnp.where(more, jnp.uint8(k), place),
                jnp.where(more, raw, taken),
            )
    # All three now, or XLA keeps eight maps of what was more than what until the gradient asks for the place.
    most, place, taken = lax.optimization_barrier((most, place, taken))
    return most, (most, place, taken, affine)


def _backward(groups: int, saved: Any, dy: Array) -> Any:
    most, place, taken, affine = saved
    g, sums = reference.masked(Shape(groups), dy, taken, most, None)
    return _unpooled(g, place), jnp.tile(affine[0], 4), (sums[1], sums[0])


def _unpooled(dy: Array, place: Array) -> Array:
    images, rows, columns, channels = dy.shape
    # Where in a window a block's two rows or columns are: in the one that begins above the block, and in the next one.
    # An even one lies in the first only; 9 makes a place that no window has.
    along = np.array([[1, 2], [9, 0]], np.uint8)
    total: Any = 0
    for down, right in np.ndindex(2, 2):
        mine = 3 * along[down][:, None, None] + along[right][:, None]
        total = total + jnp.where(_shifted(place, down, right) == mine, _shifted(dy, down, right), 0)
    return total.reshape(images, rows, columns, 4 * channels)


def _shifted(x: Array, down: int, right: int) -> Array:
    """The window `down` below and `right` beside each, 0 past the border: [images, rows, columns, 1, 1, channels]"""
    x = jnp.pad(x, ((0, 0), (0, down), (0, right), (0, 0)))
    return x[:, down:, right:, None, None]


_pooled.defvjp(_forward, _backward)
