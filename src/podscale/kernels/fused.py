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
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podscale.kernels import pointwise, reduction, reference, spatial
from podscale.kernels.layer_spec import (
    Affine,
    FactorAndOffset,
    Images,
    Kernel,
    LayerSpec,
    OutputGradient,
    Residuals,
    SumAndSquareSum,
    Vector,
)


@partial(jax.tree_util.register_dataclass, data_fields=("values", "sums", "factor"), meta_fields=())
@dataclass(frozen=True)
class RawOutput:
    """A convolution's output before its batch norm.

    Attributes:
        values: the output itself.
        sums: of the values and of their squares, over this device's part of each group.
        factor: ones; the gradient by the values is a product, and its factor is the "gradient" by this.
    """

    values: Images
    sums: SumAndSquareSum | None
    factor: Vector


class LayerOutputs(NamedTuple):
    """What a layer returns; or the cotangents of it.

    Attributes:
        y: the rectified input.
        z: its convolution.
        sums: of z and of its squares; None without `LayerSpec.output_sums`.
        factor: of z.
    """

    y: Images
    z: Float[Array, "images out_height out_width outputs"]
    sums: SumAndSquareSum | None
    factor: Float[Array, "groups outputs"]


class LayerResiduals(NamedTuple):
    """What the gradient of a layer needs.

    Attributes:
        x: the raw input; None where it is y.
        y: the rectified input.
        shortcut: the raw shortcut; None if there was none, or one that was added as it is.
        z: the convolution's output.
        affine: factor and offset of x.
        shortcut_affine: factor and offset of the shortcut.
        kernel: of the convolution.
        added: nonempty if there was a shortcut; it holds no array.
    """

    x: Images | None
    y: Images
    shortcut: Images | None
    z: Float[Array, "images out_height out_width outputs"]
    affine: Affine
    shortcut_affine: Affine
    kernel: Kernel
    added: tuple[()] | tuple[tuple[()]]


# x, its factor, affine, shortcut, its factor, shortcut_affine; or the gradients by them.
ActivationInputs: TypeAlias = tuple[Images, Vector, FactorAndOffset, Images | None, Vector | None, Affine]


# --- the layer -----------------------------------------------------------------------------------------------------


def apply_layer(
    spec: LayerSpec,
    x: RawOutput | Images,
    affine: Affine,
    shortcut: RawOutput | Images | None,
    shortcut_affine: Affine,
    kernel: Kernel,
) -> tuple[Images, RawOutput]:
    """Return y = relu(x · a + b + shortcut · shortcut_a + shortcut_b), and conv(y).

    Args:
        spec: the layer.
        x: the raw output of the previous convolution, or an array that is already rectified.
        affine: a and b; empty: y = x.
        shortcut: a raw output, an array that is added as it is, or None.
        shortcut_affine: factor and offset of a raw shortcut.
        kernel: of the convolution.

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


def _unpack(shortcut: RawOutput | Images | None) -> tuple[Images | None, Vector | None]:
    return (shortcut.values, shortcut.factor) if isinstance(shortcut, RawOutput) else (shortcut, None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply_layer(
    spec: LayerSpec,
    x: Images,
    x_factor: Vector | None,
    affine: Affine,
    shortcut: Images | None,
    shortcut_factor: Vector | None,
    shortcut_affine: Affine,
    kernel: Kernel,
) -> LayerOutputs:
    return _apply_layer_forward(spec, x, x_factor, affine, shortcut, shortcut_factor, shortcut_affine, kernel)[0]


def _apply_layer_forward(
    spec: LayerSpec,
    x: Images,
    x_factor: Vector | None,
    affine: Affine,
    shortcut: Images | None,
    shortcut_factor: Vector | None,
    shortcut_affine: Affine,
    kernel: Kernel,
) -> tuple[LayerOutputs, LayerResiduals]:
    inputs = spec, x, affine, shortcut, shortcut_affine, kernel
    outputs = pointwise.forward(*inputs) if pointwise.can_use_kernel(spec, x, kernel) else None
    y, z, sums = outputs or spatial.forward(*inputs)
    residuals = LayerResiduals(
        x=x if affine else None,
        y=y,
        shortcut=shortcut if shortcut_affine else None,
        z=z,
        affine=affine,
        shortcut_affine=shortcut_affine,
        kernel=kernel,
        added=() if shortcut is None else ((),),
    )
    pair = None if sums is None else (sums[0], sums[1])
    return LayerOutputs(y, z, pair, make_unit_factor(spec.groups, z)), residuals


def _apply_layer_backward(
    spec: LayerSpec, residuals: LayerResiduals, cotangents: LayerOutputs
) -> tuple[Images, Vector | None, Affine, Images | None, Vector | None, Affine, Kernel]:
    x, y, shortcut, z, affine, shortcut_affine, kernel, added = residuals
    dy, dz, dsums, factor = cotangents
    offset, slope = (None, None) if dsums is None else (dsums[0], 2 * dsums[1])
    saved, gradient = Residuals(y if x is None else x, y, shortcut, z), OutputGradient(dz, factor, offset, slope)
    inputs = spec, saved, affine, kernel, gradient, dy if spec.keep_input else None
    gradients = pointwise.backward(*inputs) if pointwise.can_use_kernel(spec, y, kernel) else None
    if gradients:
        g, dkernel, sums, whole_dz = gradients
        if dkernel is None:
            (dkernel,) = jax.vjp(lambda kernel: reference.convolve(spec, y, kernel), kernel)[1](whole_dz)
    else:
        g, dkernel, sums = spatial.backward(*inputs, has_shortcut=bool(added))
    if not affine:
        return g, None, (), None, None, (), dkernel
    by_affine = (sums[1], sums[0])
    by_shortcut = (g, shortcut_affine[0], (sums[2], sums[0])) if shortcut_affine else (g if added else None, None, ())
    return g, affine[0], by_affine, *by_shortcut, dkernel


_apply_layer.defvjp(_apply_layer_forward, _apply_layer_backward)


def make_unit_factor(groups: int, z: Images) -> Vector:
    """Return the factor of a raw output: ones."""
    return jnp.ones((groups, z.shape[-1]), jnp.promote_types(z.dtype, jnp.float32))


# --- entry: from an ordinary convolution to fused layers -----------------------------------------------------------


def make_raw_output(spec: LayerSpec, z: Images) -> RawOutput:
    """Return the output of any convolution as a raw output, with its sums if `spec.output_sums`."""
    if not spec.output_sums:
        return RawOutput(z, None, make_unit_factor(spec.groups, z))
    return RawOutput(*_attach_sums(spec, z))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach_sums(spec: LayerSpec, z: Images) -> tuple[Images, SumAndSquareSum, Vector]:
    sums, square_sums = reduction.compute_sums(spec, z)
    return z, (sums, square_sums), make_unit_factor(spec.groups, z)


def _attach_sums_backward(
    spec: LayerSpec, z: Images, cotangents: tuple[Images, SumAndSquareSum, Vector]
) -> tuple[Images]:
    dz, dsums, factor = cotangents
    return (reference.combine_gradient(dz, z, (factor, dsums[0], 2 * dsums[1])),)


_attach_sums.defvjp(lambda spec, z: (_attach_sums(spec, z), z), _attach_sums_backward)


# --- exit: from fused layers to an ordinary layer ------------------------------------------------------------------


def activate(
    spec: LayerSpec,
    x: RawOutput,
    affine: FactorAndOffset,
    shortcut: RawOutput | Images | None = None,
    shortcut_affine: Affine = (),
) -> Images:
    """Return relu(x · a + b + shortcut · shortcut_a + shortcut_b), for a next layer that is no convolution."""
    shortcut_values, shortcut_factor = _unpack(shortcut)
    return _activate(spec, x.values, x.factor, affine, shortcut_values, shortcut_factor, shortcut_affine)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activate(
    spec: LayerSpec,
    x: Images,
    x_factor: Vector,
    affine: FactorAndOffset,
    shortcut: Images | None,
    shortcut_factor: Vector | None,
    shortcut_affine: Affine,
) -> Images:
    return reference.normalize_and_rectify(x, affine, shortcut, shortcut_affine)


def _activate_forward(
    spec: LayerSpec,
    x: Images,
    x_factor: Vector,
    affine: FactorAndOffset,
    shortcut: Images | None,
    shortcut_factor: Vector | None,
    shortcut_affine: Affine,
) -> tuple[Images, ActivationInputs]:
    inputs = x, x_factor, affine, shortcut, shortcut_factor, shortcut_affine
    return _activate(spec, *inputs), inputs


def _activate_backward(spec: LayerSpec, inputs: ActivationInputs, dy: Images) -> ActivationInputs:
    x, _, affine, shortcut, _, shortcut_affine = inputs
    y = reference.normalize_and_rectify(x, affine, shortcut, shortcut_affine)  # cheaper to recompute than to keep
    only_affine = affine if shortcut is None else ()
    g, sums = reduction.backpropagate_relu(spec, dy, x, y, shortcut if shortcut_affine else None, only_affine)
    unscaled = (None if shortcut is None else g, None, ())
    by_shortcut = (g, shortcut_affine[0], (sums[2], sums[0])) if shortcut_affine else unscaled
    return g, affine[0], (sums[1], sums[0]), *by_shortcut


_activate.defvjp(_activate_forward, _activate_backward)
