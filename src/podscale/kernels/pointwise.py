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
Refs = dict[str, Any]  # the arrays that a kernel reads and writes, by name
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


def forward(
    shape: Shape, x: Array, affine: Several, rest: Array | None, rest_affine: Several, kernel: Array
) -> Several:
    """As `plain.forward`."""
    depth, columns = kernel.shape[2:]
    rows = x.size // depth
    cut = _cut(shape, rows, depth, columns)
    inputs = {"x": x.reshape(rows, depth), "kernel": kernel.reshape(depth, columns)}
    inputs |= dict(zip(("a", "b"), affine, strict=False))
    inputs |= {} if rest is None else {"rest": rest.reshape(rows, depth)}
    inputs |= dict(zip(("rest_a", "rest_b"), rest_affine, strict=False))
    outputs = {"z": jax.ShapeDtypeStruct((rows, columns), x.dtype)}
    if affine:
        outputs["y"] = jax.ShapeDtypeStruct((rows, depth), x.dtype)
    if shape.counts:
        outputs["sums"] = jax.ShapeDtypeStruct((2, rows // cut.rows, columns), jnp.float32)
    found = _call(shape, _forward, cut, rows // cut.rows * (columns // cut.columns), inputs, outputs)
    y = found["y"].reshape(x.shape) if affine else x
    z = found["z"].reshape(*x.shape[:-1], columns)
    return y, z, _by_group(shape, found["sums"]) if shape.counts else None


def _forward(cut: Tile, groups: int, at: Refs) -> None:
    row, column, group = _place(cut, groups, at["z"].shape)
    rows, columns = _span(row, cut.rows), _span(column, cut.columns)

    def step(i: Any, product: Array) -> Array:
        depth = _span(i, cut.depth)
        y = at["x"][rows, depth]
        if "a" in at:
            wide = y.astype(jnp.float32) * at["a"][group, depth] + at["b"][group, depth]
            if "rest" in at:
                more = at["rest"][rows, depth].astype(jnp.float32)
                wide += more * at["rest_a"][group, depth] + at["rest_b"][group, depth] if "rest_a" in at else more
            y = jnp.maximum(wide, 0).astype(y.dtype)

            @pl.when(column == 0)
            def _() -> None:
                at["y"][rows, depth] = y

        return product + jnp.dot(y, at["kernel"][depth, columns], preferred_element_type=jnp.float32)

    z = _summed(cut, at["x"].shape[1], step).astype(at["z"].dtype)
    at["z"][rows, columns] = z
    if "sums" in at:
        wide = z.astype(jnp.float32)
        at["sums"][0, row, columns] = wide.sum(axis=0)
        at["sums"][1, row, columns] = (wide * wide).sum(axis=0)


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
    cut = _cut(shape, rows, columns, depth)
    flat, wide = partial(jnp.reshape, shape=(rows, depth)), partial(jnp.reshape, shape=(rows, columns))
    inputs = {"dz": wide(dz), "factor": factor, "kernel": kernel.reshape(depth, columns).T}
    inputs |= {} if offset is None else {"z": wide(z), "offset": offset, "slope": slope}
    inputs |= {} if dy is None else {"dy": flat(dy)}
    inputs |= {"x": flat(x), "y": flat(y)} if affine else {}
    inputs |= {} if rest is None else {"rest": flat(rest)}
    outputs = {
        "g": jax.ShapeDtypeStruct((rows, depth), x.dtype),
        "settled": jax.ShapeDtypeStruct((rows, columns), z.dtype),
    }
    if affine:
        kinds = 2 if rest is None else 3
        outputs["sums"] = jax.ShapeDtypeStruct((kinds, rows // cut.rows, depth), jnp.float32)
    found = _call(shape, _backward, cut, rows // cut.rows * (depth // cut.columns), inputs, outputs)
    sums = tuple(_by_group(shape, found["sums"])) if affine else ()
    return found["g"].reshape(x.shape), found["settled"].reshape(z.shape), sums


def _backward(cut: Tile, groups: int, at: Refs) -> None:
    row, column, group = _place(cut, groups, at["g"].shape)
    rows, columns = _span(row, cut.rows), _span(column, cut.columns)

    def step(i: Any, product: Array) -> Array:
        depth = _span(i, cut.depth)
        wide = at["dz"][rows, depth].astype(jnp.float32) * at["factor"][group, depth]
        if "z" in at:
            wide += at["offset"][group, depth] + at["slope"][group, depth] * at["z"][rows, depth].astype(jnp.float32)
        settled = wide.astype(at["settled"].dtype)

        @pl.when(column == 0)
        def _() -> None:
            at["settled"][rows, depth] = settled

        return product + jnp.dot(settled, at["kernel"][depth, columns], preferred_element_type=jnp.float32)

    g = _summed(cut, at["dz"].shape[1], step)
    if "dy" in at:
        g += at["dy"][rows, columns].astype(jnp.float32)
    if "y" in at:
        g = jnp.where(at["y"][rows, columns] > 0, g, 0)
    g = g.astype(at["g"].dtype)
    at["g"][rows, columns] = g
    if "sums" in at:
        wide = g.astype(jnp.float32)
        at["sums"][0, row, columns] = wide.sum(axis=0)
        for kind, name in enumerate(name for name in ("x", "rest") if name in at):
            at["sums"][1 + kind, row, columns] = (wide * at[name][rows, columns].astype(jnp.float32)).sum(axis=0)


def _call(
    shape: Shape,
    kernel: Callable[[Tile, int, Refs], None],
    cut: Tile,
    programs: int,
    inputs: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
) -> dict[str, Array]:
    def named(*refs: Any) -> None:
        kernel(cut, shape.groups, dict(zip((*inputs, *outputs), refs, strict=True)))

    found = pl.pallas_call(
        named,
        grid=(programs,),
        out_shape=tuple(outputs.values()),
        compiler_params=triton.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=shape.kernels == "interpret",
        name=f"pointwise{kernel.__name__}",
    )(*inputs.values())
    return dict(zip(outputs, found, strict=True))


def _summed(cut: Tile, depth: int, step: Callable[[Any, Array], Array]) -> Array:
    return lax.fori_loop(0, depth // cut.depth, step, jnp.zeros((cut.rows, cut.columns), jnp.float32))


def _cut(shape: Shape, rows: int, depth: int, columns: int) -> Tile:
    found = tile(rows // shape.groups, depth, columns)
    assert found is not None  # or it would have been the twin's
    return found


def _place(cut: Tile, groups: int, result: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Which tile of rows and columns this program computes, and in which group it lies."""
    across, program = result[1] // cut.columns, pl.program_id(0)
    row = program // across
    return row, program % across, row * cut.rows // (result[0] // groups)


def _span(index: Any, size: int) -> Any:
    return pl.ds(index * size, size)


def _by_group(shape: Shape, sums: Array) -> Array:
    """[kinds, tiles, channels] -> [kinds, groups, channels]"""
    return sums.reshape(sums.shape[0], shape.groups, -1, sums.shape[-1]).sum(axis=2)


def _divisor(number: int, most: int) -> int:
    """The largest power of two up to `most` that divides `number`."""
    return min(number & -number, most)
