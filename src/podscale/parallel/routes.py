"""Routes over the chips of a torus, and the paths of each ring-based gradient summation. No array library is needed.

A path is what a part of the data goes through: the data is reduce-scattered along each of its routes in turn, and then
all-gathered along the same routes in reverse (`collectives.py`). Where a pod has several slices, the last route of a
path leads from slice to slice: each chip sums what it owns of its slice's sum with the chips in its place in the other
slices, so that the slow network between them carries as little as possible. On N = R·C chips of a slice:

    ring     one path of one ring through all chips: 2(N-1) hops
    ring2    two paths, half of the data each: the same ring in both directions
    torus    one path, rows then columns: 2(R-1) + 2(C-1) hops (2-D gradient summation of Ying et al. 2018,
             arXiv 1811.06992)
    torus4   four paths, a quarter of the data each: rows or columns first, in both directions, so that all four links
             of a chip carry data at the same time
    sharded  the path of `torus`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Chips = NDArray[np.int64]  # device ids


@dataclass(frozen=True)
class Route:
    """Disjoint cycles of equal length that cover the chips of a pod, every hop of which is one link.

    Attributes:
        along: in every slice a cycle for each row, one for each column, or a single one through all its chips; or a
            cycle from slice to slice for each place in a slice.
        backwards: whether the cycles are followed in the opposite direction.
    """

    along: Literal["row", "column", "all", "slice"]
    backwards: bool = False

    def list_cycles(self, chips: Chips) -> Chips:
        """Return the cycles through chips [slices, rows, columns]: [cycles, chips of a cycle]."""
        slices, rows, cols = chips.shape
        match self.along:
            case "row":
                cycles = chips.reshape(-1, cols)
            case "column":
                cycles = chips.transpose(0, 2, 1).reshape(-1, rows)
            case "all":
                cycles = np.array([[torus[place] for place in find_hamiltonian_cycle(rows, cols)] for torus in chips])
            case "slice":
                cycles = chips.reshape(slices, -1).T
        return cycles[:, ::-1] if self.backwards else cycles

    def count_chips(self, rows: int, cols: int, slices: int = 1) -> int:
        """Return the chips of a cycle, on slices of rows x columns."""
        return {"row": cols, "column": rows, "all": rows * cols, "slice": slices}[self.along]

    def reverse(self) -> "Route":
        """Return the route that follows the same cycles in the opposite direction."""
        return replace(self, backwards=not self.backwards)


Path = tuple[Route, ...]
FOLLOW_ROWS, FOLLOW_COLUMNS, VISIT_ALL_CHIPS, CROSS_SLICES = Route("row"), Route("column"), Route("all"), Route("slice")


def _both_ways(*routes: Route) -> tuple[Path, Path]:
    return routes, tuple(route.reverse() for route in routes)


_TORUS: Path = (FOLLOW_ROWS, FOLLOW_COLUMNS, CROSS_SLICES)
PATHS: Mapping[str, tuple[Path, ...]] = MappingProxyType(
    {
        "ring": ((VISIT_ALL_CHIPS, CROSS_SLICES),),
        "ring2": _both_ways(VISIT_ALL_CHIPS, CROSS_SLICES),
        "torus": (_TORUS,),
        "torus4": (*_both_ways(*_TORUS), *_both_ways(FOLLOW_COLUMNS, FOLLOW_ROWS, CROSS_SLICES)),
        "sharded": (_TORUS,),
    }
)


def count_hops(paths: Sequence[Path], rows: int, cols: int, slices: int = 1) -> int:
    """Return the hops from chip to chip of a sum along these paths, all of which hop together.

    Args:
        paths: of a strategy.
        rows: of a slice.
        cols: of a slice.
        slices: how many there are.

    >>> count_hops(PATHS["torus"], 32, 32), count_hops(PATHS["ring"], 32, 32), count_hops(PATHS["torus"], 16, 16, 4)
    (124, 2046, 66)
    """
    stages = zip(*paths, strict=True)
    return 2 * sum(max(route.count_chips(rows, cols, slices) for route in stage) - 1 for stage in stages)


def find_hamiltonian_cycle(rows: int, cols: int) -> list[tuple[int, int]]:
    """Return all chips of a torus as (row, column), each one link from the previous, the last one link from the first.

    Every row is walked as a whole ring, so a row walked to the right ends one column left of where it began, and the
    next row begins there. With k rows to the right and the others to the left, the walk ends rows - 2k columns from
    where it began, which must be 0 modulo `cols`. Such a k exists if the number of rows is even (half of them), or if
    both numbers are odd and rows >= cols (k = (rows - cols) / 2); in all other cases it exists for the transpose.

    >>> find_hamiltonian_cycle(2, 3)
    [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]
    """
    rightwards = next((k for k in range(rows, -1, -1) if (rows - 2 * k) % cols == 0), None)
    if rightwards is None:
        return [(row, col) for col, row in find_hamiltonian_cycle(cols, rows)]
    cycle, start = [], 0
    for row in range(rows):
        step = 1 if row < rightwards else -1
        cycle += [(row, (start + step * i) % cols) for i in range(cols)]
        start -= step
    return cycle
