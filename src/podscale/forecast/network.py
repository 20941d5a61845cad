"""Predict the seconds of sums over a pod, in closed form, from the bytes and hops of each strategy.

A sum consists of rings whose hops are synchronized. In one hop every device of a ring sends one message to the next,
which costs the hop's latency plus the message's bytes over the link's rate. `tests/forecast/test_network.py` simulates
every message of a torus on its links, one by one, and arrives at the same times.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from podscale.errors import UserError
from podscale.forecast.chips import Chip, get_chip
from podscale.parallel.exchanges import Exchange, list_messages, make_paths, measure_span
from podscale.parallel.routes import Path, Route
from podscale.pod import Pod

# Up to so many bytes of all cores of a chip together, libtpu 0.0.51 sums over a part of a pod in one round: tried with
# 4, 8 and 10 KB on v4:4x4x4 and v3:4x4.
ONE_ROUND_BYTES = 8192


@dataclass(frozen=True)
class Axis:
    """A dimension of the torus: rings of `size` devices, each linked to its two neighbours."""

    size: int
    rate: float  # bytes per second and direction
    hop_s: float
    link_s: float = 0.0  # what each further link adds to a hop over several; 0: a switch connects all devices
    pair_rate: float = math.inf  # of two devices that send to each other, where that is less than `rate`

    def __post_init__(self) -> None:
        if self.size < 1 or not self.rate > 0 or self.hop_s < 0:
            raise UserError(f"an axis of {self.size} chips with links of {self.rate:g} bytes/s is impossible")


RingMessage = tuple[Axis, float]  # a ring, and the bytes of each of its messages


def time_rings(rings: Sequence[RingMessage], *, in_turn: bool = False) -> float:
    """Return the seconds for all rings to complete one round with synchronized hops; shorter rings finish earlier.

    Args:
        rings: each with the bytes of its messages.
        in_turn: messages of rings that differ in length are sent one after the other, not at the same time; the costs
            of an axis are then those of a hop of all rings.
    """
    total, first = 0.0, 0
    for last in sorted({axis.size - 1 for axis, _ in rings}):
        times = [axis.hop_s + size / axis.rate for axis, size in rings if axis.size - 1 >= last]
        total, first = total + (last - first) * (sum(times) / len(rings) if in_turn else max(times)), last
    return total


def time_paths(paths: Sequence[Sequence[Axis]], size: float, *, in_turn: bool = False) -> float:
    """Return the seconds to sum `size` bytes, an equal part along each path.

    The data of a path is reduce-scattered along its axes in turn, then gathered in reverse. No two paths may use the
    same link at the same time. Paths whose axes differ in size may send their messages `in_turn`.
    """
    parts = [size / len(paths)] * len(paths)
    scatter_s = 0.0
    for stage in zip(*paths, strict=True):
        parts = [part / axis.size for part, axis in zip(parts, stage, strict=True)]
        scatter_s += time_rings(list(zip(stage, parts, strict=True)), in_turn=in_turn)
    return 2 * scatter_s  # the gather takes as long


def time_swing(axes: Mapping[str, Axis], count: int, size: float) -> float:
    """Return the seconds to sum `size` bytes by exchanges of halves, an equal part along each path.

    Args:
        axes: "row", "column" and "slice".
        count: number of paths, as `exchanges.make_paths` takes it.
        size: bytes.
    """
    stages = _list_swing_stages(axes["column"].size, axes["row"].size, count)
    stretched = [[_stretch(axes[along], span) for along, span in stage] for stage in stages]
    return time_paths(list(zip(*stretched, strict=True)), size)


def time_messages(axes: Mapping[str, Axis], size: float) -> float:
    """Return the seconds to sum `size` bytes by exchanges of whole arrays along "row", "column" and "slice"."""
    total = 0.0
    for axis in axes.values():
        for copies, span in _list_message_spans(axis.size):
            hop = _stretch(axis, span)
            total += hop.hop_s + copies * size / hop.rate
    return total


class Span(NamedTuple):
    """How far the messages of an exchange go, and what they share."""

    chips: int  # that send to each other in turn
    links: int  # of the longest message
    load: int  # messages on the link that most of them share
    are_pairs: bool  # whether each two chips send to each other


def _measure(hops: Sequence[tuple[int, int]], length: int, chips: int) -> Span:
    """Return the span of messages (from, to) on a ring of `length` chips."""
    present = set(hops)
    return Span(chips, *measure_span(hops, length), all((end, start) in present for start, end in hops))


@functools.cache
def _list_swing_stages(rows: int, cols: int, count: int) -> tuple[tuple[tuple[str, Span | None], ...], ...]:
    """Return each path's axis and span in every stage of Swing; paths share links. A ring of a whole axis has none."""
    lengths, stages = {"row": cols, "column": rows}, []
    for routes in zip(*make_paths(rows, cols, count), strict=True):
        hops: dict[str, list[tuple[int, int]]] = {"row": [], "column": []}
        for route in routes:
            if isinstance(route, Exchange):
                hops[route.along] += route.list_hops()
        stages.append(
            tuple(
                (along, _measure(hops[along], lengths[along], len(route.groups[0])))
                if isinstance(route, Exchange)
                else (along, None)
                for route in routes
                for along in (route.along,)
            )
        )
    return tuple(stages)


@functools.cache
def _list_message_spans(count: int) -> tuple[tuple[int, Span], ...]:
    """Return, for each message of exchanges of whole arrays, how many arrays it holds, and its span."""
    return tuple(
        (message.copies, _measure([(source, chip) for chip, source in enumerate(message.sources)], count, count))
        for message in list_messages("row", count)
    )


def _stretch(axis: Axis, span: Span | None) -> Axis:
    """Return an axis with the costs of messages that may be several links long and share links."""
    if span is None:
        return axis
    links, load = (span.links, span.load) if axis.link_s else (1, 1)
    rate = min(axis.rate, axis.pair_rate) if span.are_pairs else axis.rate
    return replace(axis, size=span.chips, hop_s=axis.hop_s + (links - 1) * axis.link_s, rate=rate / max(load, 1))


def time_ring(axes: Sequence[Axis], size: float) -> float:
    """Return the seconds of one ring through all chips, in one direction.

    >>> time_ring((Axis(4, 1e9, 0.0), Axis(4, 1e9, 0.0)), 16e9)
    30.0
    """
    return time_paths([(_join_axes(axes),)], size)


def time_independent_paths(axes: Sequence[Axis], size: float) -> float:
    """Return the seconds of a sum over all links of a chip, a path for each axis to start with and each direction.

    The paths that start along one axis are synchronized with each other, but not with those that start along another.
    """
    return max(time_paths([path] * 2, size / len(axes)) for path in _rotate_axes(axes))


def _rotate_axes(axes: Sequence[Axis]) -> list[tuple[Axis, ...]]:
    """Return all rotations of the axes: each starts with another axis."""
    return [tuple(axes[(first + i) % len(axes)] for i in range(len(axes))) for first in range(len(axes))]


def _join_axes(axes: Sequence[Axis]) -> Axis:
    """Return one ring through all chips of the axes, with the rate and latency of its slowest links."""
    used = [axis for axis in axes if axis.size > 1] or list(axes)
    return Axis(
        math.prod(axis.size for axis in axes),
        min(axis.rate for axis in used),
        max(axis.hop_s for axis in used),
        max(axis.link_s for axis in used),
    )


# --- pods ----------------------------------------------------------------------------------------------------------


def make_axes(pod: Pod, both_ways: bool = False) -> tuple[Axis, ...]:
    """Return the pod's axes: along a row, along a column, and the third dimension if it has one.

    Args:
        pod: a pod of a known kind.
        both_ways: rings run along each axis in both directions at once. In a slice too short for its rings to close, a
            ring comes back through the links of the other direction, so that the two share their rate.
    """
    row = get_chip(pod.kind)
    if row.is_torus:
        return tuple(
            Axis(size, row.link_rate / (2 if both_ways and size % row.closes else 1), row.hop_s, row.hop_s)
            for size in pod.dims
        )
    within = Axis(pod.cols, row.link_rate, row.hop_s)
    return within, Axis(pod.rows, row.node_rate, row.node_hop_s)


def make_slice_axis(pod: Pod) -> Axis:
    """Return the network between the pod's slices as an axis of as many chips as there are slices.

    Raises:
        UserError: nothing is known of it.
    """
    row = get_chip(pod.kind)
    if pod.slices > 1 and not row.slice_rate:
        raise UserError(f"nothing is known of the network between slices of {row.kind}")
    return Axis(pod.slices, row.slice_rate or row.link_rate, row.slice_hop_s)


@dataclass(frozen=True)
class PodLinks:
    """The links of a pod by the published figures of its chips: a time model for `parallel.summation`."""

    pod: Pod

    def time_paths(self, paths: Sequence[Path], size: float) -> float:
        """Return the seconds to sum `size` bytes over all devices, an equal part along each path."""
        if self.pod.rows * self.pod.cols == 1:
            return self._predict_on_chip_s(size)
        chip, axes = get_chip(self.pod.kind), _fold_axes(make_axes(self.pod, both_ways=len(paths) > 1))
        if len(paths) > 1 and not chip.is_torus:  # all paths leave a GPU through the same port, two at a time each way
            axes = tuple(Axis(axis.size, axis.rate / 2, axis.hop_s) for axis in axes)
        axes = (*axes, make_slice_axis(self.pod))
        seconds = time_paths([[_select_axis(route, axes) for route in path] for path in paths], size)
        return chip.start_s + self._predict_on_chip_s(size) + seconds

    def time_swing(self, size: float) -> float:
        """Return the seconds to sum `size` bytes over all devices by exchanges of halves."""
        if self.pod.rows * self.pod.cols == 1:
            return self._predict_on_chip_s(size)
        seconds = time_swing(self._name_axes(), self.pod.cores, size)
        return get_chip(self.pod.kind).start_s + self._predict_on_chip_s(size) + seconds

    def time_messages(self, size: float) -> float:
        """Return the seconds to sum `size` bytes over all devices by exchanges of whole arrays."""
        if self.pod.rows * self.pod.cols == 1:
            return self._predict_on_chip_s(size)
        seconds = time_messages(self._name_axes(), size)
        return get_chip(self.pod.kind).start_s + self._predict_on_chip_s(size) + seconds

    def _name_axes(self) -> dict[str, Axis]:
        axes = (*_fold_axes(make_axes(self.pod, both_ways=True)), make_slice_axis(self.pod))  # pairs send both ways
        return dict(zip(("row", "column", "slice"), axes, strict=True))

    def time_compiler_sum(self, size: float) -> float:
        """Return the seconds of the compiler's own sum of `size` bytes over all devices."""
        if self.pod.rows * self.pod.cols == 1:
            return self._predict_on_chip_s(size)
        chip, axes = get_chip(self.pod.kind), make_axes(self.pod, both_ways=True)
        seconds = chip.start_s + self._predict_on_chip_s(size) + _time_compiler_sum(chip, axes, size)
        return seconds + _time_between_slices(make_slice_axis(self.pod), size / math.prod(self.pod.dims))

    def _predict_on_chip_s(self, size: float) -> float:
        """Return the seconds in which the cores of a chip read their parts and write the sum."""
        return 3 * size / get_chip(self.pod.kind).memory_rate if self.pod.cores > 1 else 0.0


def _select_axis(route: Route, axes: tuple[Axis, ...]) -> Axis:
    across, down, between = axes
    return {"row": across, "column": down, "all": _join_axes((across, down)), "slice": between}[route.along]


def _fold_axes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return two axes: the mesh has only rows and columns, so a third dimension is folded into the rows."""
    return axes if len(axes) <= 2 else (_join_axes((axes[0], axes[2])), axes[1])


def _time_between_slices(slices: Axis, size: float) -> float:
    """Return the seconds of a sum of `size` bytes of each chip between slices: a ring, or a tree if that is faster."""
    if slices.size == 1:
        return 0.0
    tree = 2 * math.ceil(math.log2(slices.size)) * slices.hop_s + 2 * size / slices.rate
    return min(time_paths([(slices,)], size), tree)


def _time_compiler_sum(row: Chip, axes: tuple[Axis, ...], size: float) -> float:
    """Return the seconds of the compiler's all-reduce: all links of a torus at once; NCCL's hierarchy for GPU nodes."""
    if row.is_torus:
        used = [axis for axis in axes if axis.size > 1]
        return time_independent_paths(used, size) if used else 0.0  # slices of one chip
    within, between = axes
    share = size / within.size
    seconds = time_paths([(within,)], size)
    if between.size > 1:
        tree = 2 * math.log2(between.size) * between.hop_s + 2 * share / between.rate
        seconds += min(time_paths([(between,)], share), tree)
    return seconds


def predict_group_s(pod: Pod, tile: tuple[int, int], size: float) -> float:
    """Return the seconds of one sum of `size` bytes over a batch-norm tile of h x w chips and their cores.

    The TPU compiler uses a ring for proper subgroups. Small messages go round it once, and every chip adds what passes
    (its `SinglePhaseRingSumEmitter`); larger ones are scattered and gathered. Most of the time is latency.
    """
    row = get_chip(pod.kind)
    h, w = tile
    if h * w * pod.cores == 1:
        return 0.0
    if row.is_torus:
        ring = Axis(h * w, row.link_rate, row.hop_s)
        seconds = time_rings([(ring, size)]) if size <= ONE_ROUND_BYTES / pod.cores else time_ring([ring], size)
        return row.start_s + (pod.cores > 1) * row.hop_s + seconds
    within, between = Axis(w, row.link_rate, row.hop_s), Axis(h, row.node_rate, row.node_hop_s)
    return row.start_s + _time_compiler_sum(row, (within, between), size)


def predict_gather_s(pod: Pod, group: str, size: float) -> float:
    """Return the seconds in which the devices of each row, slice or pod gather `size` bytes, an equal part of each.

    It is half of a sum over the same devices: along a row by one ring, over a slice or the pod as the compiler sums.
    """
    if group == "row":
        return predict_group_s(pod, (1, pod.cols), size) / 2
    one_slice = replace(pod, rows=pod.slice_rows, slices=1)
    return PodLinks(pod if group == "pod" else one_slice).time_compiler_sum(size) / 2


def predict_exchange_s(pod: Pod, size: float) -> float:
    """Return the seconds in which every device sends `size` bytes, an equal part to each device of the pod.

    On a torus half of all bytes cross the middle of its longest dimension, where two links of each ring lie; between
    nodes and slices, all bytes pass the network card that are for others.
    """
    row = get_chip(pod.kind)
    leaving = size * pod.cores  # of a chip
    if row.is_torus:
        hops = sum(dim // 2 for dim in pod.dims) * row.hop_s
        inside = leaving * max(pod.dims) / (8 * row.link_rate) if max(pod.dims) > 1 else 0.0
        slices = make_slice_axis(pod)
        outside = leaving * (1 - 1 / slices.size) / slices.rate + (slices.size > 1) * slices.hop_s
        return row.start_s + hops + inside + outside
    inside = leaving * (1 - 1 / pod.cols) / row.link_rate + (pod.cols > 1) * row.hop_s
    outside = leaving * (1 - 1 / pod.rows) / row.node_rate + row.node_hop_s if pod.rows > 1 else 0.0
    return row.start_s + inside + outside
