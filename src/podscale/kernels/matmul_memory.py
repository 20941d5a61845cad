"""The memory that the kernel of `matmul.py` works on: arrays in global memory, and boxes and barriers in shared memory.

Each class is a pytree. The same one holds arrays or descriptions of memory outside of the kernel, and references to
that memory inside of it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Int

from podscale.kernels.blocking import BOX, HALF, ROWS, Blocking

# JAX has no public types for a reference to arrays or barriers in a GPU's memory, and for how registers hold values.
Ref: TypeAlias = Any
Layout: TypeAlias = Any
Index: TypeAlias = Int[Array, ""] | int
Slice: TypeAlias = slice | pl.Slice
T = TypeVar("T")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("left", "kernel", "vectors", "add", "mask", "inputs", "others"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Operands(Generic[T]):
    """What the kernel reads from global memory; `matmul.py` says what the arrays are.

    Attributes:
        left: p, or p and q.
        kernel: the right side, or its transpose.
        vectors: A and C, or A, C and B, in boxes; empty: the left side is p.
        add: what is added to the product.
        mask: where it is not above zero, the result is zero.
        inputs: the left side of the gradient by the kernel, where that is not the mask.
        others: what the result is multiplied by for the sums.
    """

    left: tuple[T, ...]
    kernel: T
    vectors: tuple[T, ...]
    add: T | None
    mask: T | None
    inputs: T | None
    others: tuple[T, ...]

    @property
    def extras(self) -> list[T]:
        """What finishes the product: its boxes are loaded together."""
        return [*(x for x in (self.add, self.mask, self.inputs) if x is not None), *self.others]


@partial(jax.tree_util.register_dataclass, data_fields=("v", "weights", "u", "sums"), meta_fields=())
@dataclass(frozen=True)
class Outputs(Generic[T]):
    """What the kernel writes to global memory.

    Attributes:
        v: the result.
        weights: each warpgroup's part of the gradient by the kernel.
        u: the left side that was computed.
        sums: each warpgroup's part of the sums.
    """

    v: T
    weights: T | None
    u: T | None
    sums: T | None


@partial(jax.tree_util.register_dataclass, data_fields=("free", "full"), meta_fields=("slots",))
@dataclass(frozen=True)
class Ring:
    """The barriers of boxes that are loaded and released in turn.

    Attributes:
        free: says for each slot that both computing warpgroups are done with it.
        full: says for each slot that all its boxes are loaded.
        slots: boxes of each array that the ring holds.
    """

    free: Ref
    full: Ref
    slots: int

    def find_slot(self, count: Index) -> Int[Array, ""]:
        """Return the slot that the count-th box takes."""
        return lax.rem(count, jnp.int32(self.slots))

    def get_full(self, count: Index) -> Ref:
        """Return the barrier that says that the count-th box is loaded."""
        return self.full.at[self.find_slot(count)]

    def get_free(self, count: Index) -> Ref:
        """Return the barrier that says that the count-th box is no longer needed."""
        return self.free.at[self.find_slot(count)]


SHARED_FIELDS = (
    *("add", "extra_ring", "inputs", "intermediate", "kernel", "kernel_ring", "left", "left_ring", "mask"),
    *("others", "result", "sums", "transposed", "transposed_kernel", "vectors", "vectors_full"),
)


@partial(jax.tree_util.register_dataclass, data_fields=SHARED_FIELDS, meta_fields=())
@dataclass(frozen=True)
class Shared:
    """The shared memory of a block, laid out in the order of the fields: another order is another program.

    Attributes:
        add: boxes of `Operands.add`; `inputs`, `kernel`, `left`, `mask` and `others` likewise.
        extra_ring: of the boxes that finish the product.
        intermediate: the left side that was computed.
        result: boxes on their way to global memory.
        sums: each warpgroup's part.
        transposed: a transposed box; in the interpreter only.
        transposed_kernel: a transposed box of the kernel; in the interpreter only.
        vectors: whole.
        vectors_full: says that the vectors are loaded.
    """

    add: Ref
    extra_ring: Ring | None
    inputs: Ref
    intermediate: Ref
    kernel: Ref
    kernel_ring: Ring
    left: tuple[Ref, ...]
    left_ring: Ring
    mask: Ref
    others: tuple[Ref, ...]
    result: Ref
    sums: Ref
    transposed: Ref
    transposed_kernel: Ref
    vectors: tuple[Ref, ...]
    vectors_full: Ref

    @property
    def extras(self) -> list[Ref]:
        """Boxes of what finishes the product, in the order of `Operands.extras`."""
        return [*(x for x in (self.add, self.mask, self.inputs) if x is not None), *self.others]


def describe_outputs(
    blocking: Blocking, left: Float[Array, "rows depth"], columns: int
) -> Outputs[jax.ShapeDtypeStruct]:
    """Return what the kernel writes to global memory."""
    (rows, depth), blocks = left.shape, blocking.groups * blocking.blocks
    weights = u = sums = None
    if blocking.kernel_gradient:
        weights = jax.ShapeDtypeStruct((blocks, 2, BOX, depth * columns // BOX), jnp.float32)
    elif blocking.computes_left:
        u = jax.ShapeDtypeStruct((rows, depth), left.dtype)
    if blocking.sums:
        sums = jax.ShapeDtypeStruct((blocks, 2, blocking.sums, columns // BOX, BOX), jnp.float32)
    return Outputs(jax.ShapeDtypeStruct((rows, columns), left.dtype), weights, u, sums)


def describe_shared(blocking: Blocking, operands: Operands[Array], *, is_interpreted: bool) -> Shared:
    """Return the shared memory of a block: boxes as the matrix units need them, vectors, sums and barriers."""
    dtype: DTypeLike = operands.kernel.dtype
    swizzled = (plgpu.TilingTransform((8, BOX)), plgpu.SwizzleTransform(2 * BOX))

    def describe_boxes(*shape: int) -> Ref:
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    def describe_ring(slots: int, arrays: int) -> Ring:
        barrier = partial(plgpu.Barrier, num_barriers=slots)
        return Ring(free=barrier(num_arrivals=2), full=barrier(num_arrivals=arrays), slots=slots)

    def describe_extra(array: Array | None) -> Ref:
        return None if array is None else describe_boxes(blocking.extra_ring, ROWS, BOX)

    extras, vectors = len(operands.extras), len(operands.vectors)
    kernel_box = (blocking.part, BOX) if blocking.kernel_is_transposed else (BOX, blocking.part)
    sums_shape = (2, blocking.sums, blocking.parts * blocking.part // BOX, BOX)
    return Shared(
        add=describe_extra(operands.add),
        extra_ring=describe_ring(blocking.extra_ring, extras) if extras else None,
        inputs=describe_extra(operands.inputs),
        intermediate=describe_boxes(2, blocking.left_boxes, HALF, BOX) if blocking.computes_left else None,
        kernel=describe_boxes(blocking.kernel_ring, *kernel_box),
        kernel_ring=describe_ring(blocking.kernel_ring, 1),
        left=tuple(describe_boxes(blocking.left_ring, ROWS, BOX) for _ in operands.left),
        left_ring=describe_ring(blocking.left_ring, len(operands.left)),
        mask=describe_extra(operands.mask),
        others=tuple(describe_extra(other) for other in operands.others),
        result=describe_boxes(2, blocking.result_ring, HALF, BOX),
        sums=plgpu.SMEM(sums_shape, jnp.float32) if blocking.sums else None,
        transposed_kernel=plgpu.SMEM((2, BOX, blocking.part), dtype)
        if blocking.kernel_is_transposed and is_interpreted
        else None,
        transposed=plgpu.SMEM((2, BOX, HALF), dtype) if blocking.kernel_gradient and is_interpreted else None,
        vectors=tuple(plgpu.SMEM((blocking.steps, BOX), jnp.float32) for _ in operands.vectors),
        vectors_full=plgpu.Barrier(num_arrivals=vectors, num_barriers=1) if vectors else None,
    )
