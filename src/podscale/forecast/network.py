"""Network: seconds that sums over a pod take, in closed form, from the bytes and hops of each way to do them.

A sum is made of rings that hop in step. In one hop every device of a ring sends one message to the next, which costs
the hop's latency and the message's bytes over the link's rate. `tests/forecast/test_network.py` sends every message of
a torus over its links, one by one, and comes to the same times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from podscale.errors import UserError
from podscale.forecast.chips import Chip, chip
from podscale.pod import Pod


@dataclass(frozen=True)
class Axis:
    """A dimension of the torus: rings of `size` devices, with one link to either side of each."""

    size: int
    rate: float  # bytes a second and direction
    hop_s: float

    def __post_init__(self) -> None:
        if self.size < 1 or not self.rate > 0 or self.hop_s < 0:
            raise UserError(f"an axis of {self.size} chips with links of {self.rate:g} bytes/s cannot be")


Lane = tuple[Axis, float]  # a ring, and the bytes of each of its messages


def in_step(lanes: Sequence[Lane]) -> float:
    """Seconds for all lanes to go once round, hop by hop together; a shorter ring rests while a longer one goes on."""
    total, first = 0.0, 0
    for last in sorted({axis.size - 1 for axis, _ in lanes}):
        slowest = max(axis.hop_s + size / axis.rate for axis, size in lanes if axis.size - 1 >= last)
        total, first = total + (last - first) * slowest, last
    return total


def along(paths: Sequence[Sequence[Axis]], size: float) -> float:
    """Seconds to sum `size` bytes, an even part along each path: scattered along its axes in turn, then gathered.

    The links of different paths must be different ones at all times.
    """
    parts = [size / len(paths)] * len(paths)
    there = 0.0
    for stage in zip(*paths, strict=True):
        parts = [part / axis.size for part, axis in zip(parts, stage, strict=True)]
        there += in_step(list(zip(stage, parts, strict=True)))
    return 2 * there  # and the same way back


def ring(axes: Sequence[Axis], size: float) -> float:
    """One ring through all chips, one way round.

    >>> ring((Axis(4, 1e9, 0.0), Axis(4, 1e9, 0.0)), 16e9)
    30.0
    """
    return along([(_joined(axes),)], size)


def ring_both_ways(axes: Sequence[Axis], size: float) -> float:
    """The same with half of the data going either way."""
    return along([(_joined(axes),)] * 2, size)


def torus(axes: Sequence[Axis], size: float) -> float:
    """Along the first axis, then along the next, one way round."""
    return along([tuple(axes)], size)


def all_links(axes: Sequence[Axis], size: float) -> float:
    """A part of the data for every link of a chip: each axis first once, either way round."""
    return along([path for path in _turned(axes) for _ in range(2)], size)


def colours(axes: Sequence[Axis], size: float) -> float:
    """The same parts, but those that begin along one axis do not wait for those that begin along another."""
    return max(along([path] * 2, size / len(axes)) for path in _turned(axes))


def _turned(axes: Sequence[Axis]) -> list[tuple[Axis, ...]]:
    """All orders of the axes that begin with another one and go round."""
    return [tuple(axes[(first + i) % len(axes)] for i in range(len(axes))) for first in range(len(axes))]


def _joined(axes: Sequence[Axis]) -> Axis:
    """One ring through all chips of the axes: its slowest links set the pace."""
    used = [axis for axis in axes if axis.size > 1] or list(axes)
    return Axis(
        math.prod(axis.size for axis in axes), min(axis.rate for axis in used), max(axis.hop_s for axis in used)
    )


# --- pods ----------------------------------------------------------------------------------------------------------


def axes_of(pod: Pod) -> tuple[Axis, ...]:
    """The pod's torus: along a row, then along a column, and the third where there is one."""
    row = chip(pod.kind)
    if row.torus:
        return tuple(Axis(size, row.link_rate, row.hop_s) for size in pod.dims)
    within = Axis(pod.cols, row.link_rate, row.hop_s)
    return within, Axis(pod.rows, row.node_rate, row.node_hop_s)


def summation_s(pod: Pod, strategy: str, size: float) -> float:
    """Seconds to sum `size` bytes over all devices of the pod by a strategy of `collectives`."""
    row = chip(pod.kind)
    on_chip = 3 * size / row.memory_rate if pod.cores > 1 else 0.0  # both cores' parts read, their sum written
    if pod.rows * pod.cols == 1:
        return on_chip
    axes = axes_of(pod)
    if strategy == "xla":
        seconds = _compilers(row, axes, size)
    elif strategy in ("ring2", "torus4") and not row.torus:
        # All lanes leave a GPU through the same port, two at a time each way.
        form = ring_both_ways if strategy == "ring2" else all_links
        seconds = form([Axis(axis.size, axis.rate / 2, axis.hop_s) for axis in axes], size)
    else:
        forms = {"ring": ring, "ring2": ring_both_ways, "torus": torus, "torus4": all_links}
        seconds = forms[strategy](_two(axes), size)
    return row.start_s + on_chip + seconds


def _two(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The mesh has rows and columns: the third dimension of a torus is folded into the rows."""
    return axes if len(axes) <= 2 else (_joined((axes[0], axes[2])), axes[1])


def _compilers(row: Chip, axes: tuple[Axis, ...], size: float) -> float:
    """What the compiler's own all-reduce does: every link of a torus at once; NCCL's hierarchy on nodes of GPUs."""
    if row.torus:
        return colours([axis for axis in axes if axis.size > 1], size)
    within, between = axes
    share = size / within.size
    seconds = along([(within,)], size)
    if between.size > 1:
        tree = 2 * math.log2(between.size) * between.hop_s + 2 * share / between.rate
        seconds += min(along([(between,)], share), tree)
    return seconds


def group_s(pod: Pod, tile: tuple[int, int], size: float) -> float:
    """Seconds for one sum of `size` bytes over a batch-norm tile of h x w chips and their cores.

    Proper subgroups get a one-dimensional ring from the TPU compiler. Messages are small: latency is most of it.
    """
    row = chip(pod.kind)
    h, w = tile
    if h * w * pod.cores == 1:
        return 0.0
    if row.torus:
        return row.start_s + (pod.cores > 1) * row.hop_s + ring([Axis(h * w, row.link_rate, row.hop_s)], size)
    within, between = Axis(w, row.link_rate, row.hop_s), Axis(h, row.node_rate, row.node_hop_s)
    return row.start_s + _compilers(row, (within, between), size)
