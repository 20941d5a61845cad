"""Layers with 1x1 convolutions as one kernel each way: what `product.py` computes, in the words of `fused.py`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podscale.kernels import matmul
from podscale.kernels.blocking import BLOCKS, ROWS, cut
from podscale.kernels.shape import Shape

Array = jax.Array
Several = tuple[Any, ...]


def fits(shape: Shape, x: Array, kernel: Array) -> bool:
    """Whether a layer is a matrix product at all, and one that keeps the whole of a GPU busy."""
    plain = kernel.shape[:2] == (1, 1) and shape.stride == 1 and shape.padding == 0
    enough = shape.kernels == "interpret" or x.size // x.shape[-1] >= BLOCKS * ROWS
    return plain and enough and shape.kernels != "plain" and x.dtype == jnp.bfloat16


def forward(
    shape: Shape, x: Array, affine: Several, rest: Array | None, rest_affine: Several, kernel: Array
) -> Several | None:
    """As `plain.forward`; None where the kernel cannot be cut to size."""
    depth, columns = kernel.shape[2:]
    left, vectors = [x], list(affine)
    if affine and rest is not None:
        left.append(rest)
        a, b = rest_affine or (jnp.ones_like(affine[0]), 0)
        vectors = [affine[0], affine[1] + b, a]
    rows, kinds = x.size // depth, 2 if shape.counts else 0
    found = cut(rows, shape.groups, depth, columns, len(left), 0, kinds, computed=bool(affine))
    if found is None:
        return None
    flat = tuple(value.reshape(rows, depth) for value in left)
    y, z, sums, _ = matmul.product(
        found, flat, tuple(vectors), kernel.reshape(depth, columns), rectify=True, interpret=_interpreter(shape)
    )
    return (x if y is None else y.reshape(x.shape)), z.reshape(*x.shape[:-1], columns), sums


def backward(
    shape: Shape,
    saved: Several,
    affine: Several,
    kernel: Array,
    dz: Array,
    by_z: Several,
    dy: Array | None,
) -> Several | None:
    """As `plain.backward`, and the gradient by the convolution's output where the one by its kernel is still to be had.

    Of the two, one is None.
    """
    x, y, rest, z = saved
    factor, offset, slope = by_z
    depth, columns = kernel.shape[2:]
    rows = x.size // depth
    left = [dz] if offset is None else [dz, z]
    vectors = [factor, jnp.zeros_like(factor)] if offset is None else [factor, offset, slope]
    others = [value for value in (x, rest) if value is not None] if affine else []
    extras = len(others) + (dy is not None) + bool(affine)
    kinds = 1 + len(others) if affine else 0
    size = rows, shape.groups, columns, depth, len(left)
    found = cut(*size, extras + (not affine), kinds, computed=True, weighed=True)
    found = found or cut(*size, extras, kinds, computed=True)
    if found is None:
        return None
    flat = partial(jnp.reshape, shape=(rows, depth))
    whole, g, sums, weights = matmul.product(
        found,
        tuple(value.reshape(rows, columns) for value in left),
        tuple(vectors),
        kernel.reshape(depth, columns).T,
        add=None if dy is None else flat(dy),
        mask=flat(y) if affine else None,
        others=tuple(map(flat, others)),
        inputs=flat(y),
        interpret=_interpreter(shape),
    )
    dkernel = None if weights is None else weights.reshape(kernel.shape).astype(kernel.dtype)
    whole = None if whole is None else whole.reshape(z.shape)
    return g.reshape(x.shape), dkernel, () if sums is None else tuple(sums), whole


def _interpreter(shape: Shape) -> Any:
    return matmul.interpreter() if shape.kernels == "interpret" else None
