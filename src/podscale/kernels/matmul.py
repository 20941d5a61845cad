"""A matrix product on Hopper GPUs whose left side is computed, and whose result is finished, inside one kernel.

    u = p · A + q · B + C, rectified on request     [rows, depth], stored as an output; A, B, C by group and channel
    v = u @ kernel + add, zero where mask <= 0      [rows, columns]
    sums of v and of v · v, or of v · other, over each group's rows
    inputs^T @ u on request, for which u itself need not be stored: the gradient by a convolution's kernel

This is a 1x1 convolution with the operations before and after it, forward (p the raw output of the previous layer, q
the shortcut) as well as backward (p and q the gradient and the values that the gradient through batch norm consists
of). Each large array is read once and written once.

The kernel is a Pallas kernel for Mosaic GPU. A block of three warpgroups walks over tiles of 128 rows of one group: the
third warpgroup loads boxes of 64 channels ahead of time, the other two compute 64 rows each. All boxes pass through
rings in shared memory. Each box has a barrier that says it is full and one that says it is free again.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from podscale.kernels.blocking import BOX, HALF, ROWS, SCRATCH_BYTES, Blocking
from podscale.kernels.matmul_body import Block, Refs, run_block

Array = jax.Array


class Finish(NamedTuple):
    """How the product becomes v.

    Attributes:
        add: an array to add to the product, [rows, columns].
        inputs: the array of inputs^T @ u, [rows, columns]; it may be the mask.
        mask: where it is not above zero, v is zero, [rows, columns].
        others: arrays by which v is multiplied for the sums; without them the sums are those of v and of its squares.
    """

    add: Array | None = None
    inputs: Array | None = None
    mask: Array | None = None
    others: tuple[Array, ...] = ()


@partial(jax.jit, static_argnames=("blocking", "rectify", "interpret"))
def multiply(
    blocking: Blocking,
    left: tuple[Array, ...],
    vectors: tuple[Array, ...],
    kernel: Array,
    finish: Finish = Finish(),
    *,
    rectify: bool = False,
    interpret: Any = None,
) -> tuple[Array | None, Array, Array | None, Array | None]:
    """Compute the product that the module describes.

    Args:
        blocking: how the product is divided.
        left: p, or p and q, [rows, depth] each.
        vectors: A and C, or A, C and B, [groups, depth] each; empty: u = p.
        kernel: [depth, columns].
        finish: how the product becomes v.
        rectify: whether to rectify u.
        interpret: parameters of the interpreter, to run without a GPU.

    Returns:
        u, v, the sums [sums, groups, columns], and inputs^T @ u; None for u if it is p itself or not stored, and for
        sums and gradient if the blocking has none.
    """
    (_, depth), columns, dtype = left[0].shape, kernel.shape[1], left[0].dtype
    extras, outputs = _name_extras(blocking, finish), _describe_outputs(blocking, left[0], columns)
    boxed_vectors = [v.reshape(blocking.groups, blocking.steps, BOX) for v in vectors]
    arrays = {f"left{i}": value for i, value in enumerate(left)} | {"kernel": kernel}
    arrays |= {f"vector{i}": value for i, value in enumerate(boxed_vectors)} | extras
    names = (*arrays, *outputs)

    def body(*refs: Any, **shared: Any) -> None:
        run_block(Block(blocking, rectify, dict(zip(names, refs, strict=True)), shared, interpret is not None))

    results = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=_allocate_shared(blocking, len(vectors), len(left), list(extras), dtype, interpret is not None),
        grid=(blocking.groups * blocking.blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=SCRATCH_BYTES, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )(*arrays.values())
    named = dict(zip(outputs, results, strict=True))
    sums = weights = None
    if blocking.sums:
        by_block = named["sums"].reshape(blocking.groups, blocking.blocks * 2, blocking.sums, columns)
        sums = by_block.sum(axis=1).swapaxes(0, 1)
    if blocking.kernel_gradient:  # boxes of the columns come side by side
        weights = named["weights"].sum(axis=(0, 1)).reshape(BOX, columns // BOX, depth).swapaxes(0, 1)
    return named.get("u"), named["v"], sums, weights


def _name_extras(blocking: Blocking, finish: Finish) -> dict[str, Array]:
    """Return the arrays that finish the product, by the names that the kernel has for them."""
    inputs = finish.inputs if blocking.kernel_gradient and finish.mask is None else None
    optional = {"add": finish.add, "mask": finish.mask, "input": inputs}
    extras = {name: value for name, value in optional.items() if value is not None}
    return extras | {f"other{i}": value for i, value in enumerate(finish.others)}


def _describe_outputs(blocking: Blocking, left: Array, columns: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return what the kernel writes to global memory, by name."""
    (rows, depth), blocks = left.shape, blocking.groups * blocking.blocks
    outputs = {"v": jax.ShapeDtypeStruct((rows, columns), left.dtype)}
    if blocking.kernel_gradient:
        outputs["weights"] = jax.ShapeDtypeStruct((blocks, 2, BOX, depth * columns // BOX), jnp.float32)
    elif blocking.computes_left:
        outputs["u"] = jax.ShapeDtypeStruct((rows, depth), left.dtype)
    if blocking.sums:
        outputs["sums"] = jax.ShapeDtypeStruct((blocks, 2, blocking.sums, columns // BOX, BOX), jnp.float32)
    return outputs


def _allocate_shared(
    blocking: Blocking, vectors: int, lefts: int, extras: list[str], dtype: Any, interpreted: bool
) -> Refs:
    """Return the shared memory of a block: boxes as the matrix units need them, vectors, sums and barriers.

    Memory is laid out in the sorted order of the names, so that another name may mean another program.
    """
    swizzled = (plgpu.TilingTransform((8, BOX)), plgpu.SwizzleTransform(2 * BOX))

    def allocate_ring(name: str, number: int, arrays: list[str], *shape: int) -> Refs:
        """Return boxes, each with a barrier that says it is full and one that says both warpgroups are done with it."""
        boxes = {array: plgpu.SMEM((number, *shape), dtype, transforms=swizzled) for array in arrays}
        full = plgpu.Barrier(num_arrivals=len(arrays), num_barriers=number)
        return boxes | {f"{name}_full": full, f"{name}_free": plgpu.Barrier(num_arrivals=2, num_barriers=number)}

    memory = allocate_ring("left", blocking.left_ring, [f"left{i}" for i in range(lefts)], ROWS, BOX)
    memory |= allocate_ring("kernel", blocking.kernel_ring, ["kernel"], BOX, blocking.part)
    memory |= allocate_ring("extra", blocking.extra_ring, extras, ROWS, BOX) if extras else {}
    memory["result"] = plgpu.SMEM((2, blocking.result_ring, HALF, BOX), dtype, transforms=swizzled)
    if blocking.computes_left:
        memory["intermediate"] = plgpu.SMEM((2, blocking.left_boxes, HALF, BOX), dtype, transforms=swizzled)
    if blocking.kernel_gradient and interpreted:
        memory["transposed"] = plgpu.SMEM((2, BOX, HALF), dtype)
    if vectors:
        memory |= {f"vector{i}": plgpu.SMEM((blocking.steps, BOX), jnp.float32) for i in range(vectors)}
        memory["vectors_full"] = plgpu.Barrier(num_arrivals=vectors, num_barriers=1)
    if blocking.sums:
        memory["sums"] = plgpu.SMEM((2, blocking.sums, blocking.parts * blocking.part // BOX, BOX), jnp.float32)
    return memory


def make_interpreter() -> Any:
    """Return parameters that make `multiply` run on a machine without such a GPU, slowly."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # not public in every version yet

    return InterpretGPUParams()
