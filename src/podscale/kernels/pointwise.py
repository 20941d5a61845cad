"""Fused layers with 1x1 convolutions as one kernel forward and one backward: `fused.py` in terms of `matmul.py`."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float

from podscale.kernels.blocking import BLOCKS, ROWS, Product, choose_blocking
from podscale.kernels.layer_spec import Affine, LayerSpec, OutputGradient, Residuals, Sums

if TYPE_CHECKING:
    from podscale.kernels.matmul import Interpreter


def can_use_kernel(
    spec: LayerSpec, x: Float[Array, "*places inputs"], kernel: Float[Array, "height width inputs outputs"]
) -> bool:
    """Return whether a layer is a matrix product that is large enough to keep a whole GPU busy."""
    is_product = kernel.shape[:2] == (1, 1) and spec.stride == 1 and spec.padding == 0
    is_large = spec.kernels.are_interpreted or x.size // x.shape[-1] >= BLOCKS * ROWS
    return is_product and is_large and spec.kernels.are_pallas and x.dtype == jnp.bfloat16


def forward(
    spec: LayerSpec,
    x: Float[Array, "images height width inputs"],
    affine: Affine,
    shortcut: Float[Array, "images height width inputs"] | None,
    shortcut_affine: Affine,
    kernel: Float[Array, "1 1 inputs outputs"],
) -> (
    tuple[
        Float[Array, "images height width inputs"],
        Float[Array, "images height width outputs"],
        Float[Array, "2 groups outputs"] | None,
    ]
    | None
):
    """Return what `spatial.forward` does; None where no blocking of the product fits shared memory."""
    depth, columns = kernel.shape[2:]
    left, vectors = [x], list(affine)
    if affine and shortcut is not None:
        left.append(shortcut)
        a, b = shortcut_affine or (jnp.ones_like(affine[0]), 0)
        vectors = [affine[0], affine[1] + b, a]
    rows, sums_count = x.size // depth, 2 if spec.output_sums else 0
    product = Product(rows, spec.groups, depth, columns, len(left), 0, sums_count, computes_left=bool(affine))
    blocking = choose_blocking(product)
    if blocking is None:
        return None
    from podscale.kernels import matmul  # it imports Pallas, which takes a second

    flat = tuple(value.reshape(rows, depth) for value in left)
    y, z, sums, _ = matmul.multiply(
        replace(blocking, kernel_is_transposed=True),  # as in the backward pass, so that there is one layout in memory
        flat,
        tuple(vectors),
        kernel.reshape(depth, columns).T,
        rectify=True,
        interpret=_make_interpreter(spec),
    )
    return (x if y is None else y.reshape(x.shape)), z.reshape(*x.shape[:-1], columns), sums


def backward(
    spec: LayerSpec,
    residuals: Residuals,
    affine: Affine,
    kernel: Float[Array, "1 1 inputs outputs"],
    gradient: OutputGradient,
    dy: Float[Array, "images height width inputs"] | None,
) -> (
    tuple[
        Float[Array, "images height width inputs"],
        Float[Array, "1 1 inputs outputs"] | None,
        Sums,
        Float[Array, "images height width outputs"] | None,
    ]
    | None
):
    """Return what `spatial.backward` does, and a fourth value; None where no blocking of the product fits.

    Either the gradient by the kernel is computed here and the fourth value is None, or the gradient by the kernel is
    None and the fourth value is the whole gradient by the convolution's output, from which it can be computed.
    """
    x, y, shortcut, z = residuals
    dz, factor, offset, slope = gradient
    depth, columns = kernel.shape[2:]
    rows = x.size // depth
    left = [dz] if offset is None else [dz, z]
    vectors = [factor, jnp.zeros_like(factor)] if offset is None else [factor, offset, slope]
    others = [value for value in (x, shortcut) if value is not None] if affine else []
    extras = len(others) + (dy is not None) + bool(affine)
    sums_count = 1 + len(others) if affine else 0
    product = Product(rows, spec.groups, columns, depth, len(left), extras, sums_count, computes_left=True)
    with_gradient = product._replace(extras=extras + (not affine), kernel_gradient=True)
    blocking = choose_blocking(with_gradient) or choose_blocking(product)
    if blocking is None:
        return None
    from podscale.kernels import matmul

    flatten = partial(jnp.reshape, shape=(rows, depth))
    whole_dz, g, sums, weights = matmul.multiply(
        blocking,
        tuple(value.reshape(rows, columns) for value in left),
        tuple(vectors),
        kernel.reshape(depth, columns).T,
        matmul.Finish(
            add=None if dy is None else flatten(dy),
            inputs=flatten(y),
            mask=flatten(y) if affine else None,
            others=tuple(map(flatten, others)),
        ),
        interpret=_make_interpreter(spec),
    )
    dkernel = None if weights is None else weights.reshape(kernel.shape).astype(kernel.dtype)
    whole_dz = None if whole_dz is None else whole_dz.reshape(z.shape)
    return g.reshape(x.shape), dkernel, () if sums is None else tuple(sums), whole_dz


def _make_interpreter(spec: LayerSpec) -> "Interpreter | None":
    from podscale.kernels import matmul

    return matmul.make_interpreter() if spec.kernels.are_interpreted else None
