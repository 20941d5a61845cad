"""Fused layers with any convolution: XLA convolves, and normalizing, masking and summing are passes of their own.

This is also how 1x1 convolutions are computed where `pointwise.py` does not fit.
"""

import jax
from jax import lax
from jaxtyping import Array, Float

from podscale.kernels import reduction, reference
from podscale.kernels.layer_spec import Affine, LayerSpec, OutputGradient, Residuals, Sums


def forward(
    spec: LayerSpec,
    x: Float[Array, "images height width inputs"],
    affine: Affine,
    shortcut: Float[Array, "images height width inputs"] | None,
    shortcut_affine: Affine,
    kernel: Float[Array, "side side inputs outputs"],
) -> tuple[
    Float[Array, "images height width inputs"],
    Float[Array, "images out_height out_width outputs"],
    Float[Array, "2 groups outputs"] | None,
]:
    """Return the rectified input, its convolution, and the sums of the convolution: [2, groups, channels] or None."""
    y = reference.normalize_and_rectify(x, affine, shortcut, shortcut_affine)
    if spec.kernels.are_pallas:
        y = lax.optimization_barrier(y)  # else XLA computes it again from the block before, and that one from its own
    z = reference.convolve(spec, y, kernel)
    return y, z, reduction.compute_sums(spec, z) if spec.output_sums else None


def backward(
    spec: LayerSpec,
    residuals: Residuals,
    affine: Affine,
    kernel: Float[Array, "side side inputs outputs"],
    gradient: OutputGradient,
    dy: Float[Array, "images height width inputs"] | None,
    has_shortcut: bool,
) -> tuple[Float[Array, "images height width inputs"], Float[Array, "side side inputs outputs"], Sums]:
    """Return the gradients of a layer.

    Args:
        spec: the layer.
        residuals: of the forward pass.
        affine: factor and offset of x; empty where the layer does not normalize.
        kernel: of the convolution.
        gradient: by the convolution's output z.
        dy: the gradient by the rectified input from elsewhere, or None.
        has_shortcut: whether a shortcut was added, raw or not.

    Returns:
        the gradient by the sum before rectifying, the gradient by the kernel, and the sums of the former by group:
        alone, times x, times the shortcut.
    """
    x, y, shortcut, z = residuals
    dz = reference.combine_gradient(gradient.values, z, gradient[1:])
    _, pull = jax.vjp(lambda y, kernel: reference.convolve(spec, y, kernel), y, kernel)
    by_y, dkernel = pull(dz)
    if dy is not None:
        by_y = by_y + dy
    if not affine:
        return by_y, dkernel, ()
    g, sums = reduction.backpropagate_relu(spec, by_y, x, y, shortcut, () if has_shortcut else affine)
    return g, dkernel, sums
