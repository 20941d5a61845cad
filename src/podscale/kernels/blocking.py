"""How a matrix product is cut for a GPU's shared memory: tiles of rows, boxes of channels, and rings of boxes."""

from dataclasses import dataclass, replace
from typing import Any

ROWS, HALF, BOX = 128, 64, 64  # of a tile, of a warpgroup's share of it; channels of a box
WIDEST, PART = 256, 128  # columns that a product has at most; those of a part where there are more
BLOCKS = 132  # that run at the same time
SHARED_BYTES = 225 * 1024  # of a Hopper GPU's multiprocessor
SCRATCH_BYTES = 2048  # of these, the compiler's own


@dataclass(frozen=True)
class Cut:
    """How a product is cut and how many boxes each ring holds."""

    groups: int
    tiles: int  # of a group
    steps: int  # boxes of the depth
    part: int  # columns of a part
    parts: int
    lefts: int  # arrays of the left side: p, q
    extras: int  # arrays that finish the result: add, mask, other
    sums: int  # kinds of them
    computed: bool  # whether the left side is computed, or p as it is
    weighed: bool = False  # whether the gradient by the kernel is computed on the way, and the left side not kept
    left_ring: int = 3
    kernel_ring: int = 3
    extra_ring: int = 2
    result_ring: int = 2

    @property
    def blocks(self) -> int:
        """Of a group."""
        return max(1, min(self.tiles, BLOCKS // self.groups))

    @property
    def kept(self) -> int:
        """Boxes of the computed left side: all of them, if several products need them."""
        return self.steps if self.parts > 1 or self.weighed else 2

    @property
    def leaving(self) -> int:
        """Boxes of the result that may still be on their way out when the next one is put together."""
        return 0 if self.part // BOX % self.result_ring else self.result_ring - 1

    @property
    def bytes(self) -> int:
        box = ROWS * BOX * 2
        left = self.left_ring * self.lefts * box + (self.kept * box if self.computed else 0)
        right = self.kernel_ring * BOX * self.part * 2
        result = (self.result_ring + self.extra_ring * self.extras) * box
        vectors = 4 * (3 * self.steps * BOX + 2 * self.sums * self.part * self.parts)
        return left + right + result + vectors + SCRATCH_BYTES


def cut(
    rows: int,
    groups: int,
    depth: int,
    columns: int,
    lefts: int,
    extras: int,
    sums: int,
    computed: bool,
    weighed: bool = False,
) -> Cut | None:
    """The cut of a product, or None where none fits: rows or channels that boxes do not divide, too many of them."""
    if rows % (groups * ROWS) or depth % BOX or columns % BOX:
        return None
    if weighed and depth * columns > BOX * WIDEST:  # more sums than registers
        return None
    part = BOX if weighed else columns if columns <= WIDEST else PART
    if columns % part or (columns > part and not computed):
        return None
    found = Cut(
        groups, rows // groups // ROWS, depth // BOX, part, columns // part, lefts, extras, sums, computed, weighed
    )
    leaner: list[dict[str, Any]] = [{"kernel_ring": 2}, {"left_ring": 2}, {"extra_ring": 1}, {"result_ring": 1}]
    if computed:
        leaner += [{"left_ring": 1}, {"part": BOX, "parts": columns // BOX}]
    for change in [{}, *leaner]:
        found = replace(found, **change)
        if found.bytes <= SHARED_BYTES:
            return found
    return None
