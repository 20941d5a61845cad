"""The stem's end: normalize, rectify and take the maximum over 3x3 windows at stride 2, without the maps in between.

Forward, each window notes which of its nine places it took, and what stood there before it was normalized. Backward, a
pixel asks the windows that it lies in, at most two by two, whether they took it, instead of the windows scattering what
they have. The sums that batch norm's gradient needs are over windows, a quarter as many as pixels. Where several places
are the largest, the first one counts, as in XLA's own gradient.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from podscale.kernels import plain
from podscale.kernels.fused import Affine, Raw
from podscale.kernels.shape import Shape

Array = jax.Array


def twin(x: Array, affine: Affine) -> Array:
    """The same, step by step."""
    y = plain.rectified(x, affine, None, ())
    return nnx.max_pool(y, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


def fits(x: Array) -> bool:
    """Whether height and width are even."""
    return x.shape[1] % 2 == 0 and x.shape[2] % 2 == 0


def pooled(groups: int, x: Raw, affine: Affine) -> Array:
    """[images, height, width, channels] to half the height and half the width, both even."""
    return _pooled(groups, x.values, x.factor, affine)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pooled(groups: int, x: Array, x_factor: Array, affine: Affine) -> Array:
    return _forward(groups, x, x_factor, affine)[0]


def _forward(groups: int, x: Array, x_factor: Array, affine: Affine) -> Any:
    rows, columns = x.shape[1] // 2, x.shape[2] // 2
    edged = jnp.pad(x, ((0, 0), (1, 0), (1, 0), (0, 0)))
    inner_row, inner_column = (jnp.arange(n) > 0 for n in (rows, columns))
    most: Any = None
    for k in range(9):
        down, right = divmod(k, 3)
        raw = edged[:, down : down + 2 * rows : 2, right : right + 2 * columns : 2]
        here = plain.rectified(raw, affine, None, ())
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
    g, sums = plain.masked(Shape(groups), dy, taken, most, None)
    return _unpooled(g, place), affine[0], (sums[1], sums[0])


def _unpooled(dy: Array, place: Array) -> Array:
    images, rows, columns, channels = dy.shape
    half = jnp.arange(2, dtype=jnp.uint8)
    odd_row, odd_column = half[:, None, None, None], half[:, None]  # of a pixel: [2, 1, 2, 1]
    total: Any = 0
    for down in (0, 1):  # the window that begins above the pixel, or the next one
        for right in (0, 1):
            window, taken = _shifted(dy, down, right), _shifted(place, down, right)
            # Which place of that window the pixel is. An even row lies in one window only: at its middle, 1.
            row = (1 + odd_row) if down == 0 else jnp.where(odd_row == 1, 0, 9).astype(jnp.uint8)
            column = (1 + odd_column) if right == 0 else jnp.where(odd_column == 1, 0, 9).astype(jnp.uint8)
            mine = (taken == 3 * row + column) & (row < 3) & (column < 3)
            total = total + jnp.where(mine, window, 0)
    return total.reshape(images, 2 * rows, 2 * columns, channels)


def _shifted(x: Array, down: int, right: int) -> Array:
    """The window `down` below and `right` beside each, 0 past the border: [images, rows, 1, columns, 1, channels]"""
    x = jnp.pad(x, ((0, 0), (0, down), (0, right), (0, 0)))
    return x[:, down:, right:][:, :, None, :, None]


_pooled.defvjp(_forward, _backward)
