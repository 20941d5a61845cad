"""1x1 convolutions as matrix products in Pallas kernels, with what stands before and after them done on the way.

Forward, a tile of rows is normalized, added to the shortcut and rectified as it is loaded, and the sums that the next
batch norm needs are taken from the product before it is stored. Backward, the gradient by the product's result is put
together as it is loaded; the result is masked, and the sums that batch norm's gradient needs are taken, before it is
stored. Each large array is read once and written once.

The tensors are [rows, channels]. A program computes a tile of rows and columns; a tile lies in one batch-norm group.
Programs that share rows run one after the other, so that they find them in the cache.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from podscale.kernels.shape import Shape

Array = jax.Array
Several = tuple[Any, ...]
LEAST_ROWS, MOST_ROWS = 32, 128  # of a tile
LEAST_CHANNELS, MOST_DEPTH = 16, 2048


class Tile(NamedTuple):
    """How a product [rows, depth] x [depth, columns] is cut."""

    rows: int
    columns: int
    depth: int  # of one step of the sum over the depth
    warps: int
    stages: int = 3


def tile(rows_of_group: int, depth: int, columns: int) -> Tile | None:
    """The cut of a product, or None where none fits: channels that no power of two divides well, odd pictures."""
    rows = _divisor(rows_of_group, MOST_ROWS)
    wide, deep = _divisor(columns, 256 if rows <= 64 else 128), _divisor(depth, 64)
    if rows < LEAST_ROWS or min(wide, deep) < LEAST_CHANNELS or depth > MOST_DEPTH:
        return None
    return Tile(rows, wide, deep, warps=8 if rows * wide >= 128 * 128 else 4)


def fits(shape: Shape, x_shape: Several, kernel_shape: Several) -> bool:
    """Whether a layer is one of these products, in both directions."""
    rows = x_shape[0] // shape.groups * x_shape[1] * x_shape[2]
    depth, columns = kernel_shape[2:]
    plain = kernel_shape[:2] == (1, 1) and shape.stride == 1 and shape.padding == 0
    return plain and tile(rows, depth, columns) is not None and tile(rows, columns, depth) is not None


def forward(shape: Shape, x: Array, affine: Several, rest: Array | None, rest_affine: Several, kernel: Array) -> Several:
    """As `plain.forward`."""
    depth, columns = kernel.shape[2:]
    rows = x.size // depth
    cut = tile(rows // shape.groups, depth, columns)
    assert cut is not None
    keeps = bool(affine)
    inputs = [x.reshape(rows, depth), *affine]
    if rest is not None:
        inputs += [rest.reshape(rows, depth), *rest_affine]
    inputs.append(kernel.reshape(depth, columns))
    outputs = [jax.ShapeDtypeStruct((rows, depth), x.dtype)] if keeps else []
    outputs.append(jax.ShapeDtypeStruct((rows, columns), x.dtype))
    if shape.counts:
        outputs.append(jax.ShapeDtypeStruct((2, rows // cut.rows, columns), jnp.float32))
    parts = _Parts(bool(affine), rest is not None, bool(rest_affine), keeps, shape.counts)
    found = _call(shape, partial(_forward, cut, parts, rows // shape.groups), cut, rows, columns, inputs, outputs)
    y = found.pop(0).reshape(x.shape) if keeps else x
    z = found.pop(0).reshape(*x.shape[:-1], columns)
    return y, z, _by_group(shape, found.pop()) if shape.counts else None


class _Parts(NamedTuple):
    """Which of a kernel's optional arguments there are."""

    affine: bool
    rest: bool
    rest_affine: bool
    keeps: bool = False
    counts: bool = False
    dy: bool = False
    terms: bool = False


def _forward(cut: Tile, parts: _Parts, rows_of_group: int, *refs: Any) -> None:
    taken = iter(refs)
    x = next(taken)
    a, b = (next(taken), next(taken)) if parts.affine else (None, None)
    rest = next(taken) if parts.rest else None
    rest_a, rest_b = (next(taken), next(taken)) if parts.rest_affine else (None, None)
    kernel = next(taken)
    y_out = next(taken) if parts.keeps else None
    z_out = next(taken)
    sums = next(taken) if parts.counts else None

    row, column = _place(kernel.shape[1] // cut.columns)
    rows, columns = _span(row, cut.rows), _span(column, cut.columns)
    group = row * cut.rows // rows_of_group

    def step(i: Any, product: Array) -> Array:
        depth = _span(i, cut.depth)
        y = x[rows, depth]
        if parts.affine:
            wide = y.astype(jnp.float32) * a[group, depth] + b[group, depth]
            if parts.rest:
                more = rest[rows, depth].astype(jnp.float32)
                wide += more * rest_a[group, depth] + rest_b[group, depth] if parts.rest_affine else more
            y = jnp.maximum(wide, 0).astype(x.dtype)
        if parts.keeps:

            @pl.when(column == 0)
            def _() -> None:
                y_out[rows, depth] = y

        return product + jnp.dot(y, kernel[depth, columns], preferred_element_type=jnp.float32)

    nothing = jnp.zeros((cut.rows, cut.columns), jnp.float32)
    z = lax.fori_loop(0, x.shape[1] // cut.depth, step, nothing).astype(z_out.dtype)
    z_out[rows, columns] = z
    if parts.counts:
        wide = z.astype(jnp.float32)
        sums[0, row, columns] = wide.sum(axis=0)
        sums[1, row, columns] = (wide * wide).sum(axis=0)


def backward(
    shape: Shape,
    saved: Several,
    affine: Several,
    kernel: Array,
    dz: Array,
    by_z: Several,
    dy: Array | None,
) -> Several:
    """As `plain.backward`, but instead of the gradient by the kernel the one by the convolution's output."""
    x, y, rest, z = saved
    factor, offset, slope = by_z
    depth, columns = kernel.shape[2:]
    rows = x.size // depth
    cut = tile(rows // shape.groups, columns, depth)
    assert cut is not None
    flat = partial(jnp.reshape, shape=(rows, depth))
    inputs = [dz.reshape(rows, columns), factor]
    if offset is not None:
        inputs += [z.reshape(rows, columns), offset, slope]
    inputs.append(kernel.reshape(depth, columns).T)
    if dy is not None:
        inputs.append(flat(dy))
    if affine:
        inputs += [flat(x), flat(y)]
    if rest is not None:
        inputs.append(flat(rest))
    outputs = [jax.ShapeDtypeStruct((rows, depth), x.dtype), jax.ShapeDtypeStruct((rows, columns), z.dtype)]
    if affine:
        outputs.append(jax.ShapeDtypeStruct((3 if rest is not None else 2, rows // cut.rows, depth), jnp.float32))
    parts = _Parts(bool(affine), rest is not None, False, dy=dy is not None, terms=offset is not None)
    found = _call(shape, partial(_backward, cut, parts, rows // shape.groups), cut, rows, depth, inputs, outputs)
    sums = tuple(_by_group(shape, found[2])) if affine else ()
    return found[0].reshape(x.shape), found[1].reshape(z.shape), sums


def _backward(cut: Tile, parts: _Parts, rows_of_group: int, *refs: Any) -> None:
    taken = iter(refs)
    dz, factor = next(taken), next(taken)
    z, offset, slope = (next(taken), next(taken), next(taken)) if parts.terms else (None, None, None)
    kernel = next(taken)
    dy = next(taken) if parts.dy else None
    x, y = (next(taken), next(taken)) if parts.affine else (None, None)
    rest = next(taken) if parts.rest else None
    g_out, dz_out = next(taken), next(taken)
    sums = next(taken) if parts.affine else None

    row, column = _place(kernel.shape[1] // cut.columns)
    rows, columns = _span(row, cut.rows), _span(column, cut.columns)
    group = row * cut.rows // rows_of_group

    def step(i: Any, product: Array) -> Array:
        depth = _span(i, cut.depth)
        wide = dz[rows, depth].astype(jnp.float32) * factor[group, depth]
        if parts.terms:
            wide += offset[group, depth] + slope[group, depth] * z[rows, depth].astype(jnp.float32)
        whole = wide.astype(dz_out.dtype)

        @pl.when(column == 0)
        def _() -> None:
            dz_out[rows, depth] = whole

        return product + jnp.dot(whole, kernel[depth, columns], preferred_element_type=jnp.float32)

    nothing = jnp.zeros((cut.rows, cut.columns), jnp.float32)
    g = lax.fori_loop(0, dz.shape[1] // cut.depth, step, nothing)
    if parts.dy:
        g += dy[rows, columns].astype(jnp.float32)
    if parts.affine:
        g = jnp.where(y[rows, columns] > 0, g, 0)
    g = g.astype(g_out.dtype)
    g_out[rows, columns] = g
    if parts.affine:
        wide = g.astype(jnp.float32)
        sums[0, row, columns] = wide.sum(axis=0)
        sums[1, row, columns] = (wide * x[rows, columns].astype(jnp.float32)).sum(axis=0)
        if parts.rest:
            sums[2, row, columns] = (wide * rest[rows, columns].astype(jnp.float32)).sum(axis=0)


def _call(
    shape: Shape,
    kernel: Callable[..., None],
    cut: Tile,
    rows: int,
    columns: int,
    inputs: list[Array],
    outputs: list[jax.ShapeDtypeStruct],
) -> list[Array]:
    return list(
        pl.pallas_call(
            kernel,
            grid=(rows // cut.rows * (columns // cut.columns),),
            out_shape=outputs,
            compiler_params=triton.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
            interpret=shape.kernels == "interpret",
            name=kernel.func.__name__.strip("_") + "_pointwise",  # type: ignore[attr-defined]
        )(*inputs)
    )


def _place(columns: int) -> tuple[Any, Any]:
    program = pl.program_id(0)
    return program // columns, program % columns


def _span(index: Any, size: int) -> Any:
    return pl.ds(index * size, size)


def _by_group(shape: Shape, sums: Array) -> Array:
    """[kinds, tiles, channels] -> [kinds, groups, channels]"""
    return sums.reshape(sums.shape[0], shape.groups, -1, sums.shape[-1]).sum(axis=2)


def _divisor(number: int, most: int) -> int:
    """The largest power of two up to `most` that divides `number`."""
    return min(number & -number, most)
