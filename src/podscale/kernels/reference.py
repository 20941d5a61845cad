"""Reference implementation of what fused layers consist of: normalize, add, rectify, convolve and sum, by XLA.

Whatever belongs to a channel is [groups, channels], float32. Images keep their four axes throughout, and sums are taken
image by image first: XLA then has no reason to transpose them in memory, which costs more than all else here.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from podscale.kernels.layer_spec import Affine, Images, LayerSpec, Sums, Vector


def normalize_and_rectify(x: Images, affine: Affine, shortcut: Images | None, shortcut_affine: Affine) -> Images:
    """Return relu(x · a + b + shortcut), where the shortcut may have its own a and b; x itself without a and b."""
    if not affine:
        return x
    wide = _scale(x, affine)
    if shortcut is not None:
        wide = wide + (_scale(shortcut, shortcut_affine) if shortcut_affine else _widen(shortcut))
    return jnp.maximum(wide, 0).astype(x.dtype)


def backpropagate_relu(
    spec: LayerSpec, dy: Images, x: Images, y: Num[Array, "images height width channels"], shortcut: Images | None
) -> tuple[Images, Sums]:
    """Return the gradient by what was rectified to y, and its sums by group: alone, times x, times the shortcut."""
    g = jnp.where(y > 0, dy, 0)
    wide = _widen(g)
    terms = [wide, wide * _widen(x)] + ([] if shortcut is None else [wide * _widen(shortcut)])
    return g, tuple(_sum_groups(spec, term) for term in terms)


def convolve(
    spec: LayerSpec, y: Float[Array, "images height width inputs"], kernel: Float[Array, "side side inputs outputs"]
) -> Float[Array, "images out_height out_width outputs"]:
    """Return a square convolution without bias."""
    if spec.kernels.are_pallas and kernel.shape[:2] == (1, 1) and spec.stride == 1 and not spec.padding:
        return multiply_pixels(y, kernel)
    padding = (spec.padding, spec.padding)
    return lax.conv_general_dilated(
        y, kernel, (spec.stride, spec.stride), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def multiply_pixels(
    x: Float[Array, "images height width inputs"], kernel: Float[Array, "1 1 inputs outputs"]
) -> Float[Array, "images height width outputs"]:
    """Return a 1x1 convolution as a matrix product.

    XLA tries some ten ways to compute a product on a GPU, and up to sixty for a convolution, of which the best is no
    faster (docs/gpu.md).
    """
    return jnp.dot(x.reshape(-1, x.shape[-1]), kernel[0, 0]).reshape(*x.shape[:-1], kernel.shape[-1])


def compute_sums(spec: LayerSpec, z: Images) -> Float[Array, "2 groups channels"]:
    """Return the sums of the values and of their squares, by group and channel."""
    wide = _widen(z)
    return jnp.stack([_sum_groups(spec, wide), _sum_groups(spec, wide * wide)])


def combine_gradient(dz: Images, z: Images, dz_terms: tuple[Vector, Vector | None, Vector | None]) -> Images:
    """Return factor · dz + offset + slope · z, in the dtype of z."""
    factor, offset, slope = dz_terms
    wide = _widen(dz) * _broadcast_to_images(factor, dz)
    if offset is not None and slope is not None:
        wide = wide + _broadcast_to_images(offset, dz) + _broadcast_to_images(slope, dz) * _widen(z)
    return wide.astype(z.dtype)


def _scale(x: Images, affine: tuple[Vector, Vector]) -> Images:
    factor, offset = affine
    return _widen(x) * _broadcast_to_images(factor, x) + _broadcast_to_images(offset, x)


def _sum_groups(spec: LayerSpec, x: Images) -> Vector:
    return x.sum(axis=(1, 2)).reshape(spec.groups, -1, x.shape[-1]).sum(axis=1)


def _broadcast_to_images(channels: Vector, x: Images) -> Float[Array, "images 1 1 channels"]:
    return jnp.repeat(channels, x.shape[0] // channels.shape[0], axis=0)[:, None, None]


def _widen(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
