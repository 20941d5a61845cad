"""The plain twin: normalize, add, rectify, convolve and count, as XLA compiles it.

What belongs to a channel is [groups, channels], float32. Pictures keep their four axes all the way, and sums are taken
picture by picture first: XLA then has no reason to turn them around in memory, which costs more than all else here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podscale.kernels.shape import Shape

Array = jax.Array
Several = tuple[Any, ...]


def forward(
    shape: Shape, x: Array, affine: Several, rest: Array | None, rest_affine: Several, kernel: Array
) -> Several:
    """The rectified input, its convolution, and the sums of that and of its squares by group: [2, groups, channels]."""
    y = rectified(x, affine, rest, rest_affine)
    z = convolved(shape, y, kernel)
    return y, z, counted(shape, z) if shape.counts else None


def backward(
    shape: Shape,
    saved: Several,
    affine: Several,
    kernel: Array,
    dz: Array,
    by_z: Several,
    dy: Array | None,
) -> Several:
    """Gradients by the sum before rectifying, by the kernel, and their sums by group: alone, times x, times rest.

    The gradient by the convolution's output comes as a product and two terms: factor · dz + offset + slope · z.
    """
    x, y, rest, z = saved
    dz = settled(dz, z, by_z)
    _, pull = jax.vjp(lambda y, kernel: convolved(shape, y, kernel), y, kernel)
    by_y, dkernel = pull(dz)
    if dy is not None:
        by_y = by_y + dy
    if not affine:
        return by_y, dkernel, ()
    g, sums = masked(shape, by_y, x, y, rest)
    return g, dkernel, sums


def masked(shape: Shape, dy: Array, x: Array, y: Array, rest: Array | None) -> Several:
    """The gradient by what was rectified to y, and its sums by group: alone, times x, times rest."""
    g = jnp.where(y > 0, dy, 0)
    wide = _wide(g)
    terms = [wide, wide * _wide(x)] + ([] if rest is None else [wide * _wide(rest)])
    return g, tuple(_summed(shape, term) for term in terms)


def rectified(x: Array, affine: Several, rest: Array | None, rest_affine: Several) -> Array:
    """relu(x · a + b + rest), where rest may have an a and b of its own; x as it is where there is no a and b."""
    if not affine:
        return x
    wide = _scaled(x, affine)
    if rest is not None:
        wide = wide + (_scaled(rest, rest_affine) if rest_affine else _wide(rest))
    return jnp.maximum(wide, 0).astype(x.dtype)


def convolved(shape: Shape, y: Array, kernel: Array) -> Array:
    """A square convolution without bias."""
    padding = (shape.padding, shape.padding)
    return lax.conv_general_dilated(
        y, kernel, (shape.stride, shape.stride), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def counted(shape: Shape, z: Array) -> Array:
    """Sums of the values and of their squares by group and channel."""
    wide = _wide(z)
    return jnp.stack([_summed(shape, wide), _summed(shape, wide * wide)])


def settled(dz: Array, z: Array, by_z: Several) -> Array:
    """factor · dz + offset + slope · z, in the dtype of z."""
    factor, offset, slope = by_z
    wide = _wide(dz) * _spread(factor, dz)
    if offset is not None:
        wide = wide + _spread(offset, dz) + _spread(slope, dz) * _wide(z)
    return wide.astype(z.dtype)


def _scaled(x: Array, affine: Several) -> Array:
    a, b = affine
    return _wide(x) * _spread(a, x) + _spread(b, x)


def _summed(shape: Shape, x: Array) -> Array:
    """[images, height, width, channels] -> [groups, channels]"""
    return x.sum(axis=(1, 2)).reshape(shape.groups, -1, x.shape[-1]).sum(axis=1)


def _spread(channels: Array, x: Array) -> Array:
    """[groups, channels] -> [images of x, 1, 1, channels]"""
    return jnp.repeat(channels, x.shape[0] // channels.shape[0], axis=0)[:, None, None]


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
