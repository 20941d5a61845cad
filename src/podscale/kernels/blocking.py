"""How a matrix product is divided for a GPU's shared memory: tiles of rows, boxes of channels, and rings of boxes."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

ROWS, HALF, BOX = 128, 64, 64  # rows of a tile, rows of a warpgroup's half of it, channels of a box
WIDEST, PART = 256, 128  # columns of a product at most, and of each of its parts where there are more
BLOCKS = 132  # blocks that run at the same time: one per multiprocessor
SHARED_BYTES = 224 * 1024  # shared memory of a Hopper GPU's multiprocessor is 227 KiB; barriers and alignment need some
MAX_KERNEL_RING = 6
SCRATCH_BYTES = 2048  # the compiler's share of it


@dataclass(frozen=True)
class Blocking:
    """How a product is divided, and how many boxes each ring holds.

    Attributes:
        groups: batch-norm groups.
        tiles: tiles of a group.
        steps: boxes of the depth.
        part: columns of a part.
        parts: parts of the columns.
        left_arrays: arrays of the left side: p, q.
        extras: arrays that finish the result: add, mask, other.
        sums: sums of the result to compute.
        computes_left: whether the left side is computed, or is p as it is.
        kernel_gradient: whether the gradient by the kernel is computed along the way, and the left side not stored.
        kernel_is_transposed: whether the right side is given as [columns, depth].
    """

    groups: int
    tiles: int
    steps: int
    part: int
    parts: int
    left_arrays: int
    extras: int
    sums: int
    computes_left: bool
    kernel_gradient: bool = False
    kernel_is_transposed: bool = False
    left_ring: int = 3
    kernel_ring: int = 3
    extra_ring: int = 2
    result_ring: int = 2

    @property
    def blocks(self) -> int:
        """Blocks of a group."""
        return max(1, min(self.tiles, BLOCKS // self.groups))

    @property
    def left_boxes(self) -> int:
        """Boxes of the computed left side in shared memory: all of them, if several products need them."""
        return self.steps if self.parts > 1 or self.kernel_gradient else 2

    @property
    def pending_stores(self) -> int:
        """Boxes of the result that may still be on their way out when the next one is put together."""
        return 0 if self.part // BOX % self.result_ring else self.result_ring - 1

    @property
    def bytes(self) -> int:
        """Shared memory that a block needs."""
        box = ROWS * BOX * 2
        left = self.left_ring * self.left_arrays * box + (self.left_boxes * box if self.computes_left else 0)
        right = self.kernel_ring * BOX * self.part * 2
        result = (self.result_ring + self.extra_ring * self.extras) * box
        vectors = 4 * (3 * self.steps * BOX + 2 * self.sums * self.part * self.parts)
        return left + right + result + vectors + SCRATCH_BYTES


class Product(NamedTuple):
    """A product to divide; the last five fields as in `Blocking`."""

    rows: int
    groups: int
    depth: int
    columns: int
    left_arrays: int
    extras: int
    sums: int
    computes_left: bool
    kernel_gradient: bool = False


def choose_blocking(product: Product) -> Blocking | None:
    """Return the blocking of a product with large rings that fit shared memory.

    Returns:
        None where there is none: boxes do not divide rows or channels, or there are too many channels.
    """
    rows, groups, depth, columns, *_, computes_left, kernel_gradient = product
    if rows % (groups * ROWS) or depth % BOX or columns % BOX:
        return None
    if kernel_gradient and depth * columns > BOX * WIDEST:  # more sums than registers
        return None
    part = BOX if kernel_gradient else columns if columns <= WIDEST else PART
    if columns % part or (columns > part and not computes_left):
        return None
    blocking = Blocking(
        groups=groups,
        tiles=rows // groups // ROWS,
        steps=depth // BOX,
        part=part,
        parts=columns // part,
        left_arrays=product.left_arrays,
        extras=product.extras,
        sums=product.sums,
        computes_left=computes_left,
        kernel_gradient=kernel_gradient,
    )
    for change in [{}, *_list_reductions(blocking, columns)]:
        blocking = replace(blocking, **change)
        if blocking.bytes <= SHARED_BYTES:
            return _grow_kernel_ring(blocking)
    return None


def _list_reductions(blocking: Blocking, columns: int) -> list[dict[str, Any]]:
    """Return what to make smaller until shared memory suffices, what costs the least time first.

    Where the result is wide, most boxes are those that finish it; where it is one part, most are those of the left side
    (measured on an H200: 10 % of the time of a wide product).
    """
    left, extra, result = ({"left_ring": 2}, {"extra_ring": 1}, {"result_ring": 1})
    narrow = [{"left_ring": 1}, {"part": BOX, "parts": columns // BOX}] if blocking.computes_left else []
    if blocking.parts > 1 and narrow:
        return [{"kernel_ring": 2}, left, narrow[0], result, narrow[1], extra]
    return [{"kernel_ring": 2}, left, extra, result, *narrow]


def _grow_kernel_ring(blocking: Blocking) -> Blocking:
    """Return the blocking with as many boxes of the kernel as there is memory left for, up to MAX_KERNEL_RING."""
    while blocking.kernel_ring < MAX_KERNEL_RING:
        larger = replace(blocking, kernel_ring=blocking.kernel_ring + 1)
        if larger.bytes > SHARED_BYTES:
            break
        blocking = larger
    return blocking
