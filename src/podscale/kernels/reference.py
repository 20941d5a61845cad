"""Reference implementation of what fused layers consist of: normalize, add, rectify, convolve and sum, by XLA.

Whatever belongs to a channel is [groups, channels], float32. Images keep their four axes throughout, and sums are taken
image by image first: XLA then has no reason to transpose them in memory, which costs more than all else here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podscale.kernels.layer_spec import LayerSpec

Array = jax.Array
Arrays = tuple[Any, ...]


def normalize_and_rectify(x: Array, affine: Arrays, shortcut: Array | None, shortcut_affine: Arrays) -> Array:
    """Return relu(x · a + b + shortcut), where the shortcut may have its own a and b; x itself without a and b."""
    if not affine:
        return x
    wide = _scale(x, affine)
    if shortcut is not None:
        wide = wide + (_scale(shortcut, shortcut_affine) if shortcut_affine else _widen(shortcut))
    return jnp.maximum(wide, 0).astype(x.dtype)


def backpropagate_relu(spec: LayerSpec, dy: Array, x: Array, y: Array, shortcut: Array | None) -> Arrays:
    """Return the gradient by what was rectified to y, and its sums by group: alone, times x, times the shortcut."""
    g = jnp.where(y > 0, dy, 0)
    wide = _widen(g)
    terms = [wide, wide * _widen(x)] + ([] if shortcut is None else [wide * _widen(shortcut)])
    return g, tuple(_sum_groups(spec, term) for term in terms)


def convolve(spec: LayerSpec, y: Array, kernel: Array) -> Array:
    """Return a square convolution without bias."""
    padding = (spec.padding, spec.padding)
    return lax.conv_general_dilated(
        y, kernel, (spec.stride, spec.stride), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def compute_sums(spec: LayerSpec, z: Array) -> Array:
    """Return the sums of the values and of their squares, by group and channel: [2, groups, channels]."""
    wide = _widen(z)
    return jnp.stack([_sum_groups(spec, wide), _sum_groups(spec, wide * wide)])


def combine_gradient(dz: Array, z: Array, dz_terms: Arrays) -> Array:
    """Return factor · dz + offset + slope · z, in the dtype of z."""
    factor, offset, slope = dz_terms
    wide = _widen(dz) * _broadcast_to_images(factor, dz)
    if offset is not None:
        wide = wide + _broadcast_to_images(offset, dz) + _broadcast_to_images(slope, dz) * _widen(z)
    return wide.astype(z.dtype)


def _scale(x: Array, affine: Arrays) -> Array:
    factor, offset = affine
    return _widen(x) * _broadcast_to_images(factor, x) + _broadcast_to_images(offset, x)


def _sum_groups(spec: LayerSpec, x: Array) -> Array:
    """[images, height, width, channels] -> [groups, channels]"""
    return x.sum(axis=(1, 2)).reshape(spec.groups, -1, x.shape[-1]).sum(axis=1)


def _broadcast_to_images(channels: Array, x: Array) -> Array:
    """[groups, channels] -> [images of x, 1, 1, channels]"""
    return jnp.repeat(channels, x.shape[0] // channels.shape[0], axis=0)[:, None, None]


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
