"""Sums over batch-norm groups in one pass over memory, with what is computed along the way, as Pallas kernels for GPUs.

XLA's own reductions over the rows of [rows, channels] read small images at a tenth to a half of the memory's rate. And
where the sums of groups are added up once more, for the gradient of a batch norm's bias, XLA reads all rows again.

A program of the grid takes a block of channels and a range of one group's rows. It keeps one sum per element of its
block of rows, so that threads exchange nothing before the end, and writes its sums; XLA adds up those of a group.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from podscale.kernels import reference
from podscale.kernels.layer_spec import Affine, Images, LayerSpec, Sums

Arrays: TypeAlias = tuple[Num[Array, "*places channels"], ...]
Blocks: TypeAlias = tuple[Float[Array, "block_rows block_channels"], ...]
Vectors: TypeAlias = tuple[Float[Array, "1 block_channels"], ...]
# Takes blocks of the vectors, and of each array; returns blocks of the outputs, and terms of the sums.
Compute: TypeAlias = Callable[..., tuple[Blocks, Blocks]]
BLOCK = 4096  # elements of a program's block
MULTIPROCESSORS = 132
MAX_ELEMENTS = 2**31  # offsets are 32-bit integers


class Tuning(NamedTuple):
    """How a kernel is divided. Measured on an H200 for the layers of a ResNet-50, but for the size of a block."""

    warps: int  # of a program
    channels: int  # of a block, at most
    programs: int  # about as many as a kernel should have


ONLY_SUMS = Tuning(warps=8, channels=128, programs=4 * MULTIPROCESSORS)
WITH_OUTPUTS = Tuning(warps=4, channels=128, programs=8 * MULTIPROCESSORS)


def compute_sums(spec: LayerSpec, z: Images) -> Float[Array, "2 groups channels"]:
    """Return the sums of the values and of their squares, by group and channel."""
    if not can_use_kernel(spec, z):
        return reference.compute_sums(spec, z)
    return _compute_sums(_select_fields(spec), z)


def backpropagate_relu(
    spec: LayerSpec, dy: Images, x: Images, y: Images, shortcut: Images | None, affine: Affine = ()
) -> tuple[Images, Sums]:
    """Return the gradient by what was rectified to y, and its sums by group: alone, times x, times the shortcut.

    Args:
        spec: the layer.
        dy: the gradient by y.
        x: the raw input.
        y: the rectified values.
        shortcut: the raw shortcut, or None.
        affine: factor and offset of x if y = relu(x · factor + offset), so that y need not be read.
    """
    if not can_use_kernel(spec, dy):
        return reference.backpropagate_relu(spec, dy, x, y, shortcut)
    return _backpropagate_relu(_select_fields(spec), dy, x, None if affine else y, shortcut, affine)


def sum_relu_gradient(spec: LayerSpec, dy: Images, x: Images, y: Num[Array, "images height width channels"]) -> Sums:
    """Return the sums that `backpropagate_relu` does, of dy where y > 0 and of that times x, and no gradient."""
    if not can_use_kernel(spec, dy):
        return reference.backpropagate_relu(spec, dy, x, y, None)[1]

    def compute(vectors: Vectors, dy: Array, x: Array, y: Array) -> tuple[Blocks, Blocks]:
        g = jnp.where(y > 0, dy, 0.0)
        return (), (g, g * x)

    return tuple(map_and_sum(spec, compute, (dy, x, y), (), terms=2)[1])


def _select_fields(spec: LayerSpec) -> LayerSpec:
    """Return a layer with only those fields that matter here, so that more layers share a traced kernel."""
    return LayerSpec(groups=spec.groups, kernels=spec.kernels)


@partial(jax.jit, static_argnums=0)
def _compute_sums(spec: LayerSpec, z: Images) -> Float[Array, "2 groups channels"]:
    _, sums = map_and_sum(spec, lambda vectors, z: ((), (z, z * z)), (z,), (), terms=2)
    return sums


@partial(jax.jit, static_argnums=0)
def _backpropagate_relu(
    spec: LayerSpec, dy: Images, x: Images, y: Images | None, shortcut: Images | None, affine: Affine
) -> tuple[Images, Sums]:
    others = () if shortcut is None else (shortcut,)

    def compute(vectors: Vectors, dy: Array, x: Array, *values: Array) -> tuple[Blocks, Blocks]:
        above = x * vectors[0] + vectors[1] if affine else values[-1]
        g = jnp.where(above > 0, dy, 0.0)
        return (g,), (g, g * x, *(g * value for value in values[: len(others)]))

    arrays = (dy, x, *others) if y is None else (dy, x, *others, y)
    (g,), sums = map_and_sum(spec, compute, arrays, affine, terms=2 + len(others), outputs=1)
    return g, tuple(sums)


def can_use_kernel(spec: LayerSpec, x: Num[Array, "*places channels"]) -> bool:
    """Return whether the rows and channels of an array can be divided into blocks."""
    rows, channels = x.size // x.shape[-1], x.shape[-1]
    is_divisible = (
        channels % 16 == 0
        and rows % spec.groups == 0
        and rows >= BLOCK // min(WITH_OUTPUTS.channels, channels & -channels)
    )
    return spec.kernels.are_pallas and x.dtype == jnp.bfloat16 and is_divisible and x.size < MAX_ELEMENTS


def map_and_sum(
    spec: LayerSpec, compute: Compute, arrays: Arrays, vectors: Sums, *, terms: int, outputs: int = 0, first: int = 0
) -> tuple[list[Float[Array, "*places channels"]], Float[Array, "{terms} {spec.groups} _channels"]]:
    """Apply `compute` to blocks of the arrays, in float32.

    Args:
        spec: the layer.
        compute: (blocks of the vectors, *blocks of the arrays) -> (outputs, terms), all [rows, channels] or broadcast.
        arrays: of one shape.
        vectors: what belongs to a channel.
        terms: how many sums `compute` returns terms of; there may be none.
        outputs: how many outputs it returns.
        first: how many channels are read, where there is no output; 0: all.

    Returns:
        the outputs, like the arrays, and the sums of the terms.
    """
    results, parts = map_and_sum_parts(spec, compute, arrays, vectors, terms=terms, outputs=outputs, first=first)
    return results, parts.sum(axis=2)


def map_and_sum_parts(
    spec: LayerSpec, compute: Compute, arrays: Arrays, vectors: Sums, *, terms: int, outputs: int = 0, first: int = 0
) -> tuple[list[Float[Array, "*places channels"]], Float[Array, "{terms} {spec.groups} programs _channels"]]:
    """Do what `map_and_sum` does, but return the sums of each program."""
    from jax.experimental import pallas as pl  # takes a second
    from jax.experimental.pallas import triton

    width = arrays[0].shape[-1]
    channels = first or width
    tuning = WITH_OUTPUTS if outputs else ONLY_SUMS
    rows, columns = arrays[0].size // width, min(tuning.channels, channels & -channels)
    group_rows, block_rows = rows // spec.groups, BLOCK // columns
    programs = max(1, tuning.programs * columns // (spec.groups * channels))  # per group and block of channels
    blocks = math.ceil(group_rows / programs / block_rows)  # per program
    programs = math.ceil(group_rows / (blocks * block_rows))

    def body(*refs: jax.Ref) -> None:
        inputs, refs = refs[: len(arrays)], refs[len(arrays) :]
        vector_refs, output_refs = refs[: len(vectors)], refs[len(vectors) : len(vectors) + outputs]
        group, program = pl.program_id(0), pl.program_id(1)
        column = pl.ds(pl.program_id(2) * columns, columns)
        by_channel = tuple(ref[group, column][None] for ref in vector_refs)

        def add_block(i: Int[Array, ""], sums: Blocks) -> Blocks:
            first = group * group_rows + (program * blocks + i) * block_rows
            start = jnp.minimum(first, rows - block_rows)  # the last block of all overlaps the one before it
            row = start + lax.broadcasted_iota(jnp.int32, (block_rows, columns), 0)
            own = (row >= first) & (row < (group + 1) * group_rows)
            place = pl.ds(start, block_rows), column
            values = [triton.load(ref.at[place], mask=own, other=0.0).astype(jnp.float32) for ref in inputs]
            results, added = compute(by_channel, *values)
            for ref, result in zip(output_refs, results, strict=True):
                triton.store(ref.at[place], result.astype(ref.dtype), mask=own)
            return tuple(map(jnp.add, sums, added))

        zero = jnp.zeros((block_rows, columns), jnp.float32)
        for number, term in enumerate(lax.fori_loop(0, blocks, add_block, (zero,) * terms)):
            refs[-1][number, group, program, column] = term.sum(axis=0)

    sums_shape = jax.ShapeDtypeStruct((terms, spec.groups, programs, channels), jnp.float32)
    output_shape = jax.ShapeDtypeStruct((rows, width), arrays[0].dtype)
    results = pl.pallas_call(
        body,
        out_shape=(*[output_shape] * outputs, *[sums_shape] * (terms > 0)),
        grid=(spec.groups, programs, channels // columns),
        compiler_params=triton.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=spec.kernels.are_interpreted,
        name="map_and_sum",
    )(*(array.reshape(rows, width) for array in arrays), *vectors)
    sums = results[-1] if terms else jnp.zeros(sums_shape.shape, sums_shape.dtype)
    return [result.reshape(arrays[0].shape) for result in results[:outputs]], sums
