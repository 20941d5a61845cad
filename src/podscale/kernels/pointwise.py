"""Fused layers with 1x1 convolutions as one kernel forward and one backward: `fused.py` in terms of `matmul.py`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podscale.kernels.blocking import BLOCKS, ROWS, choose_blocking
from podscale.kernels.layer_spec import INTERPRET, REFERENCE, LayerSpec

Array = jax.Array
Arrays = tuple[Any, ...]


def can_use_kernel(spec: LayerSpec, x: Array, kernel: Array) -> bool:
    """Return whether a layer is a matrix product that is large enough to keep a whole GPU busy."""
    is_product = kernel.shape[:2] == (1, 1) and spec.stride == 1 and spec.padding == 0
    is_large = spec.kernels == INTERPRET or x.size // x.shape[-1] >= BLOCKS * ROWS
    return is_product and is_large and spec.kernels != REFERENCE and x.dtype == jnp.bfloat16


def forward(
    spec: LayerSpec, x: Array, affine: Arrays, shortcut: Array | None, shortcut_affine: Arrays, kernel: Array
) -> Arrays | None:
    """Return what `spatial.forward` does; None where no blocking of the product fits shared memory."""
    depth, columns = kernel.shape[2:]
    left, vectors = [x], list(affine)
    if affine and shortcut is not None:
        left.append(shortcut)
        a, b = shortcut_affine or (jnp.ones_like(affine[0]), 0)
        vectors = [affine[0], affine[1] + b, a]
    rows, sums_count = x.size // depth, 2 if spec.output_sums else 0
    blocking = choose_blocking(rows, spec.groups, depth, columns, len(left), 0, sums_count, computes_left=bool(affine))
    if blocking is None:
        return None
    from podscale.kernels import matmul  # it imports Pallas, which takes a second

    flat = tuple(value.reshape(rows, depth) for value in left)
    y, z, sums, _ = matmul.multiply(
        blocking, flat, tuple(vectors), kernel.reshape(depth, columns), rectify=True, interpret=_make_interpreter(spec)
    )
    return (x if y is None else y.reshape(x.shape)), z.reshape(*x.shape[:-1], columns), sums


def backward(
    spec: LayerSpec,
    residuals: Arrays,
    affine: Arrays,
    kernel: Array,
    dz: Array,
    dz_terms: Arrays,
    dy: Array | None,
) -> Arrays | None:
    """Return what `spatial.backward` does, and a fourth value; None where no blocking of the product fits.

    Either the gradient by the kernel is computed here and the fourth value is None, or the gradient by the kernel is
    None and the fourth value is the whole gradient by the convolution's output, from which it can be computed.
    """
    x, y, shortcut, z = residuals
    factor, offset, slope = dz_terms
    depth, columns = kernel.shape[2:]
    rows = x.size // depth
    left = [dz] if offset is None else [dz, z]
    vectors = [factor, jnp.zeros_like(factor)] if offset is None else [factor, offset, slope]
    others = [value for value in (x, shortcut) if value is not None] if affine else []
    extras = len(others) + (dy is not None) + bool(affine)
    sums_count = 1 + len(others) if affine else 0
    size = rows, spec.groups, columns, depth, len(left)
    blocking = choose_blocking(*size, extras + (not affine), sums_count, computes_left=True, kernel_gradient=True)
    blocking = blocking or choose_blocking(*size, extras, sums_count, computes_left=True)
    if blocking is None:
        return None
    from podscale.kernels import matmul

    flatten = partial(jnp.reshape, shape=(rows, depth))
    whole_dz, g, sums, weights = matmul.multiply(
        blocking,
        tuple(value.reshape(rows, columns) for value in left),
        tuple(vectors),
        kernel.reshape(depth, columns).T,
        add=None if dy is None else flatten(dy),
        mask=flatten(y) if affine else None,
        others=tuple(map(flatten, others)),
        inputs=flatten(y),
        interpret=_make_interpreter(spec),
    )
    dkernel = None if weights is None else weights.reshape(kernel.shape).astype(kernel.dtype)
    whole_dz = None if whole_dz is None else whole_dz.reshape(z.shape)
    return g.reshape(x.shape), dkernel, () if sums is None else tuple(sums), whole_dz


def _make_interpreter(spec: LayerSpec) -> Any:
    from podscale.kernels import matmul

    return matmul.make_interpreter() if spec.kernels == INTERPRET else None
