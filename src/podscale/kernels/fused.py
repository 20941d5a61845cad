"""A layer from one convolution's raw output to the next one's: normalize, add, rectify, convolve, count.

A network that is written so touches its large arrays as seldom as the order of its sums allows. A convolution leaves
its output as it is, with the sums over each batch-norm group beside it; what normalizes it is a factor and an offset a
channel (`norm.py`), which the next layer applies while it loads. Backward it is the same: a layer leaves the gradient
by what it rectified, `g`, and the sums over groups of g and of g times its input. From these batch norm's own gradient
is a factor, an offset and a slope a channel, which the layer before applies while it loads.

So the gradient by a raw output travels in parts: as g, and as a factor that stands in the place of the gradient by
`Raw.factor`, a one that nobody uses forward. Whoever takes a `Raw` must take its factor with it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podscale.kernels import pointwise, reference
from podscale.kernels.shape import Shape

Array = jax.Array
Affine = tuple[Array, Array] | tuple[()]  # what a channel is multiplied by, and what is added: [groups, channels] each


@partial(jax.tree_util.register_dataclass, data_fields=("values", "sums", "factor"), meta_fields=())
@dataclass(frozen=True)
class Raw:
    """A convolution's output before its batch norm."""

    values: Array
    sums: (
        Array | None
    )  # of the values and of their squares, over this device's part of each group: [2, groups, channels]
    factor: Array  # ones; the gradient by the values is a product, and this is where its factor comes


def layer(
    shape: Shape, x: Raw | Array, affine: Affine, rest: Raw | Array | None, rest_affine: Affine, kernel: Array
) -> tuple[Array, Raw]:
    """conv(y) for y = relu(x · a + b + rest · rest_a + rest_b), and y itself; y = x where there is no a and b.

    `rest` may be raw, or an array that is added as it is, or nothing. `y` has a gradient only if the shape keeps it.
    """
    x_values, x_factor = (x.values, x.factor) if isinstance(x, Raw) else (x, None)
    rest_values, rest_factor = (rest.values, rest.factor) if isinstance(rest, Raw) else (rest, None)
    kernel = kernel.astype(x_values.dtype)
    y, z, sums, factor = _layer(shape, x_values, x_factor, affine, rest_values, rest_factor, rest_affine, kernel)
    return y, Raw(z, sums, factor)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(
    shape: Shape,
    x: Array,
    x_factor: Array | None,
    affine: Affine,
    rest: Array | None,
    rest_factor: Array | None,
    rest_affine: Affine,
    kernel: Array,
) -> Any:
    return _forward(shape, x, x_factor, affine, rest, rest_factor, rest_affine, kernel)[0]


def _forward(shape: Shape, *given: Any) -> Any:
    x, _, affine, rest, _, rest_affine, kernel = given
    inputs = shape, x, affine, rest, rest_affine, kernel
    found = pointwise.forward(*inputs) if pointwise.fits(shape, x, kernel) else None
    y, z, sums = found or reference.forward(*inputs)
    saved = x if affine else None, y, rest if rest_affine else None, z, affine, rest_affine, kernel
    return (y, z, sums, _ones(shape.groups, z)), (saved, () if rest is None else ((),))


def _backward(shape: Shape, kept: Any, cotangents: Any) -> Any:
    (x, y, rest, z, affine, rest_affine, kernel), added = kept  # `added` has a length, and no numbers
    dy, dz, dsums, factor = cotangents
    offset, slope = (None, None) if dsums is None else (dsums[0], 2 * dsums[1])
    saved, by_z = (y if x is None else x, y, rest, z), (factor, offset, slope)
    dy = dy if shape.keeps else None
    inputs = shape, saved, affine, kernel, dz, by_z, dy
    found = pointwise.backward(*inputs) if pointwise.fits(shape, y, kernel) else None
    if found:
        g, dkernel, sums, whole = found
        if whole is not None:
            (dkernel,) = jax.vjp(lambda kernel: reference.convolved(shape, y, kernel), kernel)[1](whole)
    else:
        g, dkernel, sums = reference.backward(*inputs)
    if not affine:
        return g, None, (), None, None, (), dkernel
    by_affine = (sums[1], sums[0])
    by_rest = (g, rest_affine[0], (sums[2], sums[0])) if rest_affine else (g if added else None, None, ())
    return g, affine[0], by_affine, *by_rest, dkernel


_layer.defvjp(_forward, _backward)


def _ones(groups: int, z: Array) -> Array:
    return jnp.ones((groups, z.shape[-1]), jnp.promote_types(z.dtype, jnp.float32))


# --- where something else than these layers comes before or after ------------------------------------------------


def raw(groups: int, z: Array, *, counts: bool) -> Raw:
    """What any convolution has put out, with its sums."""
    return Raw(*_counted(groups, z)) if counts else Raw(z, None, _ones(groups, z))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _counted(groups: int, z: Array) -> tuple[Array, Array, Array]:
    return z, reference.counted(Shape(groups), z), _ones(groups, z)


def _counted_backward(groups: int, z: Array, cotangents: Any) -> tuple[Array]:
    dz, dsums, factor = cotangents
    return (reference.settled(dz, z, (factor, dsums[0], 2 * dsums[1])),)


_counted.defvjp(lambda groups, z: (_counted(groups, z), z), _counted_backward)


def activation(groups: int, x: Raw, affine: Affine, rest: Raw | Array | None = None, rest_affine: Affine = ()) -> Array:
    """relu(x · a + b + rest · rest_a + rest_b), for what comes after it and is no convolution."""
    rest_values, rest_factor = (rest.values, rest.factor) if isinstance(rest, Raw) else (rest, None)
    return _activation(groups, x.values, x.factor, affine, rest_values, rest_factor, rest_affine)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activation(
    groups: int,
    x: Array,
    x_factor: Array,
    affine: Affine,
    rest: Array | None,
    rest_factor: Array | None,
    rest_affine: Affine,
) -> Array:
    return reference.rectified(x, affine, rest, rest_affine)


def _activation_forward(groups: int, *inputs: Any) -> Any:
    return _activation(groups, *inputs), inputs


def _activation_backward(groups: int, inputs: Any, dy: Array) -> Any:
    x, _, affine, rest, _, rest_affine = inputs
    shape = Shape(groups)
    y = reference.rectified(x, affine, rest, rest_affine)  # once more, which is cheaper than to keep it
    g, sums = reference.masked(shape, dy, x, y, rest if rest_affine else None)
    by_rest = (g, rest_affine[0], (sums[2], sums[0])) if rest_affine else (None if rest is None else g, None, ())
    return g, affine[0], (sums[1], sums[0]), *by_rest


_activation.defvjp(_activation_forward, _activation_backward)
