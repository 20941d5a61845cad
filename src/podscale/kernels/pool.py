"""The stem's maximum over 3x3 windows at stride 2, with a gradient that gathers instead of scattering.

Forward it notes which of its nine places each window took. Backward, a pixel asks the windows that it lies in, at most
two by two, whether they took it: one pass, in no particular order. Where several places are the largest, the first one
counts, as in XLA's own gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Array = jax.Array


def plain(x: Array) -> Array:
    """The twin."""
    return nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


def fits(x: Array) -> bool:
    """Whether height and width are even."""
    return x.shape[1] % 2 == 0 and x.shape[2] % 2 == 0


@jax.custom_vjp
def max_pool(x: Array) -> Array:
    """[images, height, width, channels] to half the height and half the width, both even."""
    return _forward(x)[0]


def _forward(x: Array) -> Any:
    rows, columns = x.shape[1] // 2, x.shape[2] // 2
    edged = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    most, place = edged[:, 0 : 2 * rows : 2, 0 : 2 * columns : 2], jnp.zeros((), jnp.uint8)
    for k in range(1, 9):
        down, right = divmod(k, 3)
        here = edged[:, down : down + 2 * rows : 2, right : right + 2 * columns : 2]
        place = jnp.where(here > most, jnp.uint8(k), place)
        most = jnp.maximum(here, most)
    return most, place


def _backward(place: Array, dy: Array) -> tuple[Array]:
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
    return (total.reshape(images, 2 * rows, 2 * columns, channels),)


def _shifted(x: Array, down: int, right: int) -> Array:
    """The window `down` below and `right` beside each, 0 past the border: [images, rows, 1, columns, 1, channels]"""
    x = jnp.pad(x, ((0, 0), (0, down), (0, right), (0, 0)))
    return x[:, down:, right:][:, :, None, :, None]


max_pool.defvjp(_forward, _backward)
