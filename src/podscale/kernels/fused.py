"""A layer from one convolution's raw output to the next one's: normalize, add, rectify, convolve, sum.

A network of such layers reads and writes its large arrays as seldom as the order of its sums allows. A convolution
leaves its output raw, with the sums over each batch-norm group beside it. What normalizes it is a factor and an offset
per channel (`parallel/batch_norm.py`), which the next layer applies while it loads. The backward pass works the same
way: a layer leaves the gradient by what it rectified, `g`, and the sums over groups of g and of g times its input. From
these, the gradient through batch norm is a factor, an offset and a slope per channel, which the previous layer applies
while it loads.

So the gradient by a raw output travels in two parts. Let z be a convolution's raw output, and y = relu(a·z + b) what
the next layer makes of it, with a and b by group and channel, computed from the sums s₁ = Σz and s₂ = Σz² of each
group. For the gradient g by a·z + b, the chain rule gives

    dL/dz = a·g + dL/ds₁ + 2·dL/ds₂·z     where     dL/da = Σ g·z,   dL/db = Σ g

A layer that returned a·g as the gradient by z would read and write the large array g once more, only to multiply it by
a number per channel. Instead the forward pass carries an array of ones beside z, `RawOutput.factor`, as if it
multiplied z. The backward pass returns g, unscaled, as the cotangent of z, and a as the cotangent of the factor. Both
are cotangents in name only: JAX adds up and passes on what it is given, and the layer before, which made z, combines
them as factor·g + dL/ds₁ + 2·dL/ds₂·z while it loads (`OutputGradient`). This holds as long as exactly one layer takes
a raw output, so that nothing is added to either part; a function that takes a `RawOutput` must differentiate by its
factor as well.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podscale.kernels import pointwise, reduction, reference, spatial
from podscale.kernels.layer_spec import LayerSpec, OutputGradient

Array = jax.Array
Affine = tuple[Array, Array] | tuple[()]  # factor and offset of each channel, [groups, channels] each; empty: neither


@partial(jax.tree_util.register_dataclass, data_fields=("values", "sums", "factor"), meta_fields=())
@dataclass(frozen=True)
class RawOutput:
    """A convolution's output before its batch norm.

    Attributes:
        values: [images, height, width, channels].
        sums: of the values and of their squares, over this device's part of each group: [2, groups, channels].
        factor: ones; the gradient by the values is a product, and its factor is the "gradient" by this.
    """

    values: Array
    sums: Array | None
    factor: Array


# --- the layer -----------------------------------------------------------------------------------------------------


def apply_layer(
    spec: LayerSpec,
    x: RawOutput | Array,
    affine: Affine,
    shortcut: RawOutput | Array | None,
    shortcut_affine: Affine,
    kernel: Array,
) -> tuple[Array, RawOutput]:
    """Return y = relu(x · a + b + shortcut · shortcut_a + shortcut_b), and conv(y).

    Args:
        spec: the layer.
        x: the raw output of the previous convolution, or an array that is already rectified.
        affine: a and b; empty: y = x.
        shortcut: a raw output, an array that is added as it is, or None.
        shortcut_affine: factor and offset of a raw shortcut.
        kernel: [height, width, inputs, outputs].

    Returns:
        y, which has a gradient only if `spec.keep_input`, and its raw convolution.
    """
    x_values, x_factor = (x.values, x.factor) if isinstance(x, RawOutput) else (x, None)
    shortcut_values, shortcut_factor = _unpack(shortcut)
    kernel = kernel.astype(x_values.dtype)
    y, z, sums, factor = _apply_layer(
        spec, x_values, x_factor, affine, shortcut_values, shortcut_factor, shortcut_affine, kernel
    )
    return y, RawOutput(z, sums, factor)


def _unpack(shortcut: RawOutput | Array | None) -> tuple[Array | None, Array | None]:
    return (shortcut.values, shortcut.factor) if isinstance(shortcut, RawOutput) else (shortcut, None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply_layer(
    spec: LayerSpec,
    x: Array,
    x_factor: Array | None,
    affine: Affine,
    shortcut: Array | None,
    shortcut_factor: Array | None,
    shortcut_affine: Affine,
    kernel: Array,
) -> Any:
    return _apply_layer_forward(spec, x, x_factor, affine, shortcut, shortcut_factor, shortcut_affine, kernel)[0]


def _apply_layer_forward(spec: LayerSpec, *arguments: Any) -> Any:
    x, _, affine, shortcut, _, shortcut_affine, kernel = arguments
    inputs = spec, x, affine, shortcut, shortcut_affine, kernel
    outputs = pointwise.forward(*inputs) if pointwise.can_use_kernel(spec, x, kernel) else None
    y, z, sums = outputs or spatial.forward(*inputs)
    saved = x if affine else None, y, shortcut if shortcut_affine else None, z, affine, shortcut_affine, kernel
    return (y, z, sums, make_unit_factor(spec.groups, z)), (saved, () if shortcut is None else ((),))


def _apply_layer_backward(spec: LayerSpec, residuals: Any, cotangents: Any) -> Any:
    # `added` is nonempty if there was a shortcut; it holds no array.
    (x, y, shortcut, z, affine, shortcut_affine, kernel), added = residuals
    dy, dz, dsums, factor = cotangents
    offset, slope = (None, None) if dsums is None else (dsums[0], 2 * dsums[1])
    saved, gradient = (y if x is None else x, y, shortcut, z), OutputGradient(dz, factor, offset, slope)
    dy = dy if spec.keep_input else None
    inputs = spec, saved, affine, kernel, gradient, dy
    gradients = pointwise.backward(*inputs) if pointwise.can_use_kernel(spec, y, kernel) else None
    if gradients:
        g, dkernel, sums, whole_dz = gradients
        if whole_dz is not None:
            (dkernel,) = jax.vjp(lambda kernel: reference.convolve(spec, y, kernel), kernel)[1](whole_dz)
    else:
        g, dkernel, sums = spatial.backward(*inputs, has_shortcut=bool(added))
    if not affine:
        return g, None, (), None, None, (), dkernel
    by_affine = (sums[1], sums[0])
    by_shortcut = (g, shortcut_affine[0], (sums[2], sums[0])) if shortcut_affine else (g if added else None, None, ())
    return g, affine[0], by_affine, *by_shortcut, dkernel


_apply_layer.defvjp(_apply_layer_forward, _apply_layer_backward)


def make_unit_factor(groups: int, z: Array) -> Array:
    """Return the factor of a raw output: ones, [groups, channels]."""
    return jnp.ones((groups, z.shape[-1]), jnp.promote_types(z.dtype, jnp.float32))


# --- entry: from an ordinary convolution to fused layers -----------------------------------------------------------


def make_raw_output(spec: LayerSpec, z: Array) -> RawOutput:
    """Return the output of any convolution as a raw output, with its sums if `spec.output_sums`."""
    if not spec.output_sums:
        return RawOutput(z, None, make_unit_factor(spec.groups, z))
    return RawOutput(*_attach_sums(spec, z))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach_sums(spec: LayerSpec, z: Array) -> tuple[Array, Array, Array]:
    return z, reduction.compute_sums(spec, z), make_unit_factor(spec.groups, z)


def _attach_sums_backward(spec: LayerSpec, z: Array, cotangents: Any) -> tuple[Array]:
    dz, dsums, factor = cotangents
    return (reference.combine_gradient(dz, z, (factor, dsums[0], 2 * dsums[1])),)


_attach_sums.defvjp(lambda spec, z: (_attach_sums(spec, z), z), _attach_sums_backward)


# --- exit: from fused layers to an ordinary layer ------------------------------------------------------------------


def activate(
    spec: LayerSpec,
    x: RawOutput,
    affine: Affine,
    shortcut: RawOutput | Array | None = None,
    shortcut_affine: Affine = (),
) -> Array:
    """Return relu(x · a + b + shortcut · shortcut_a + shortcut_b), for a next layer that is no convolution."""
    shortcut_values, shortcut_factor = _unpack(shortcut)
    return _activate(spec, x.values, x.factor, affine, shortcut_values, shortcut_factor, shortcut_affine)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activate(
    spec: LayerSpec,
    x: Array,
    x_factor: Array,
    affine: Affine,
    shortcut: Array | None,
    shortcut_factor: Array | None,
    shortcut_affine: Affine,
) -> Array:
    return reference.normalize_and_rectify(x, affine, shortcut, shortcut_affine)


def _activate_forward(spec: LayerSpec, *inputs: Any) -> Any:
    return _activate(spec, *inputs), inputs


def _activate_backward(spec: LayerSpec, inputs: Any, dy: Array) -> Any:
    x, _, affine, shortcut, _, shortcut_affine = inputs
    y = reference.normalize_and_rectify(x, affine, shortcut, shortcut_affine)  # cheaper to recompute than to keep
    only_affine = affine if shortcut is None else ()
    g, sums = reduction.backpropagate_relu(spec, dy, x, y, shortcut if shortcut_affine else None, only_affine)
    unscaled = (None if shortcut is None else g, None, ())
    by_shortcut = (g, shortcut_affine[0], (sums[2], sums[0])) if shortcut_affine else unscaled
    return g, affine[0], (sums[1], sums[0]), *by_shortcut


_activate.defvjp(_activate_forward, _activate_backward)
