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
from typing import NamedTuple, TypeAlias

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from podscale.kernels.blocking import BOX, SCRATCH_BYTES, Blocking
from podscale.kernels.matmul_body import Block, run_block
from podscale.kernels.matmul_memory import Operands, Outputs, Ref, describe_outputs, describe_shared

Rows: TypeAlias = Float[Array, "rows columns"]
Interpreter: TypeAlias = object  # parameters of Pallas's interpreter for GPUs, whose class is not public yet


class Finish(NamedTuple):
    """How the product becomes v.

    Attributes:
        add: an array to add to the product.
        inputs: the array of inputs^T @ u; it may be the mask.
        mask: where it is not above zero, v is zero.
        others: arrays by which v is multiplied for the sums; without them the sums are those of v and of its squares.
    """

    add: Rows | None = None
    inputs: Rows | None = None
    mask: Rows | None = None
    others: tuple[Rows, ...] = ()


class Result(NamedTuple):
    """What `multiply` returns.

    Attributes:
        u: the left side; None if it is p itself or not stored.
        v: the result.
        sums: of the result, by group; None if the blocking has none.
        weights: inputs^T @ u; None if the blocking has none.
    """

    u: Float[Array, "rows depth"] | None
    v: Float[Array, "rows columns"]
    sums: Float[Array, "sums groups columns"] | None
    weights: Float[Array, "boxes box depth"] | None


@partial(jax.jit, static_argnames=("blocking", "rectify", "interpret"))
def multiply(
    blocking: Blocking,
    left: tuple[Float[Array, "rows depth"], ...],
    vectors: tuple[Float[Array, "groups depth"], ...],
    kernel: Float[Array, "depth columns"] | Float[Array, "columns depth"],
    finish: Finish = Finish(),
    *,
    rectify: bool = False,
    interpret: Interpreter | None = None,
) -> Result:
    """Compute the product that the module describes.

    Args:
        blocking: how the product is divided.
        left: p, or p and q.
        vectors: A and C, or A, C and B; empty: u = p.
        kernel: the right side; [columns, depth] if `blocking.kernel_is_transposed`.
        finish: how the product becomes v.
        rectify: whether to rectify u.
        interpret: parameters of the interpreter, to run without a GPU.
    """
    is_interpreted = interpret is not None
    operands = _describe_operands(blocking, left, vectors, kernel, finish)
    outputs = describe_outputs(blocking, left[0], blocking.parts * blocking.part)
    shared = describe_shared(blocking, operands, is_interpreted=is_interpreted)
    structure = jax.tree.structure((operands, outputs, shared))

    def body(*refs: Ref) -> None:
        run_block(Block(blocking, rectify, is_interpreted, *jax.tree.unflatten(structure, refs)))

    results = plgpu.kernel(
        body,
        out_type=tuple(jax.tree.leaves(outputs)),
        scratch_types=tuple(jax.tree.leaves(shared)),
        grid=(blocking.groups * blocking.blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=SCRATCH_BYTES, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )(*jax.tree.leaves(operands))
    return _combine_blocks(blocking, jax.tree.unflatten(jax.tree.structure(outputs), results))


def _describe_operands(
    blocking: Blocking, left: tuple[Array, ...], vectors: tuple[Array, ...], kernel: Array, finish: Finish
) -> Operands[Array]:
    return Operands(
        left=left,
        kernel=kernel,
        vectors=tuple(vector.reshape(blocking.groups, blocking.steps, BOX) for vector in vectors),
        add=finish.add,
        mask=finish.mask,
        inputs=finish.inputs if blocking.kernel_gradient and finish.mask is None else None,
        others=finish.others,
    )


def _combine_blocks(blocking: Blocking, outputs: Outputs[Array]) -> Result:
    """Add up the parts of the blocks."""
    columns, sums, weights = outputs.v.shape[1], None, None
    if outputs.sums is not None:
        by_block = outputs.sums.reshape(blocking.groups, blocking.blocks * 2, blocking.sums, columns)
        sums = by_block.sum(axis=1).swapaxes(0, 1)
    if outputs.weights is not None:  # boxes of the columns come side by side
        total = outputs.weights.sum(axis=(0, 1))
        weights = total.reshape(BOX, columns // BOX, blocking.steps * BOX).swapaxes(0, 1)
    return Result(outputs.u, outputs.v, sums, weights)


def make_interpreter() -> Interpreter:
    """Return parameters that make `multiply` run on a machine without such a GPU, slowly."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # not public in every version yet

    return InterpretGPUParams()
