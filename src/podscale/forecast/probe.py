"""Measure the cost of messages on the present pod, and predict the seconds of sums from it.

A hop costs a latency plus its bytes over a rate, and both depend on the other messages at the same time: two links of a
torus carry twice as much as one, two streams through the same port do not. So each pattern of hops that a strategy
consists of is timed separately, and the closed forms of `network` combine them. The compiler's own sum is a pattern
too.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from podscale.config.json_types import JsonObject
from podscale.forecast import network
from podscale.forecast.network import Axis
from podscale.parallel.collectives import make_rings
from podscale.parallel.exchanges import Exchange
from podscale.parallel.routes import FOLLOW_COLUMNS, FOLLOW_ROWS, VISIT_ALL_CHIPS, Path, Route
from podscale.pod import ALL_AXES, COLUMN, CORE, ROW, Pod

SMALL_BYTES, MIDDLE_BYTES, LARGE_BYTES = 64, 4 << 10, 256 << 10  # of the messages
Arrays: TypeAlias = PyTree  # an array, or one for each ring
SUM_BYTES = (64, 1 << 10, 4 << 10, 64 << 10, 1 << 20)  # of the compiler's sum, which is no straight line
LAST_SUM_BYTES, MAX_LAST_S = 16 << 20, 0.25  # the last of these, if the previous one took less than that
ON_CHIP_BYTES = 4 << 20  # between the cores of a chip, where latency dominates smaller messages
LINE_BYTES = 64 << 10  # of the compiler's sum over a row
FAR_LINKS, MIN_FAR_CHIPS = 3, 6  # a message over several links, and the rings on which there are such messages
SUM_REPEATS = 3
SMALL_HOPS, LARGE_HOPS = 8, 2  # in sequence, so that different start times of the processes matter less
REPEATS = 5


@dataclass(frozen=True)
class LinearCost:
    """A cost in seconds that is linear in the bytes: a latency and a rate."""

    hop_s: float
    rate: float  # bytes per second
    middle_s: float = 0.0  # of a message of MIDDLE_BYTES; 0: not measured

    def predict_s(self, size: float) -> float:
        return self.hop_s + size / self.rate

    def get_rate(self, size: float) -> float:
        """Return the bytes per second, after the latency, of a message of this size.

        The first bytes may leave faster than the rest, as long as buffers take them.

        >>> cost = LinearCost(hop_s=1.0, rate=1000.0, middle_s=2.0)
        >>> cost.get_rate(64), cost.get_rate(4096), cost.get_rate(1 << 30)
        (4096.0, 4096.0, 1000.0)
        """
        if not self.middle_s or size >= LARGE_BYTES or math.isinf(self.rate):
            return self.rate
        large_s = LARGE_BYTES / self.rate
        middle_s = min(max(self.middle_s - self.hop_s, 0.01 * self.middle_s), large_s)
        size = max(size, MIDDLE_BYTES)  # of a smaller message, the rate is the same
        return size / float(np.interp(size, (MIDDLE_BYTES, LARGE_BYTES), (middle_s, large_s)))


@dataclass(frozen=True)
class SampledCost:
    """A cost in seconds that was measured at some sizes, linear between them and proportional to larger ones."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def predict_s(self, size: float) -> float:
        if size <= self.sizes[-1]:
            return float(np.interp(size, self.sizes, self.seconds))
        return self.seconds[-1] * size / self.sizes[-1]


@dataclass(frozen=True)
class Probe:
    """Measured costs of the message patterns on a pod of rows x columns; bytes are those of one path's message."""

    rows: int
    cols: int
    row: LinearCost  # one message along the row
    column: LinearCost
    ring: LinearCost  # one along the ring through all chips
    ring2: LinearCost  # one in each direction along that ring
    four: LinearCost  # one along the row and one along the column, in each direction
    cores: LinearCost  # the sum over the cores of a chip
    xla: LinearCost | SampledCost  # the compiler's sum over the pod
    slices: int = 1  # messages between which cost what all links at once cost
    per_chip: int = 1  # cores of a chip
    link_s: float = 0.0  # what each further link adds to a message over several
    row_pairs: LinearCost | None = None  # two neighbours of a row send to each other
    column_pairs: LinearCost | None = None
    line: LinearCost | None = None  # the compiler's sum over a row, or over a column if rows have one chip
    row2: LinearCost | None = None  # one message in each direction along the row, where rows and columns differ
    column2: LinearCost | None = None

    def time_paths(self, paths: Sequence[Path], size: float) -> float:
        """Return the seconds to sum `size` bytes over all devices, an equal part along each path."""
        if self.rows * self.cols == 1:
            return self.cores.predict_s(size)
        stages = [
            [self._make_axis(route, self._find_cost(stage)) for route in stage] for stage in zip(*paths, strict=True)
        ]
        axes = list(zip(*stages, strict=True))
        in_turn = len({tuple(axis.size for axis in path) for path in axes}) > 1
        if in_turn and self.per_chip % len(paths) == 0:  # each core waits for the messages of its own path alone
            return self.cores.predict_s(size) + self._time_own_paths(paths, size)
        return self.cores.predict_s(size) + network.time_paths(axes, size, in_turn=in_turn)

    def _time_own_paths(self, paths: Sequence[Path], size: float) -> float:
        """Return the seconds of a sum whose paths differ in length, each followed by cores of its own.

        Paths wait for each other between stages only. A stage takes as long as the slowest path; where all links at
        once are slower than those of rows or of columns, as behind one network card, the bytes of the others wait too.
        """
        row, column = self.row2 or self.four, self.column2 or self.four
        shared = min(max(min(row.rate, column.rate) / self.four.rate - 1, 0.0), 1.0)
        parts, seconds = [size / len(paths)] * len(paths), 0.0
        for stage in zip(*paths, strict=True):
            times: dict[str, tuple[float, float]] = {}  # by axis, of both directions: seconds, and those of the bytes
            for i, route in enumerate(stage):
                count = route.count_chips(self.rows // self.slices, self.cols, self.slices)
                cost = {"row": row, "column": column}.get(route.along, self.four)
                parts[i] /= count
                times[route.along] = (count - 1) * cost.predict_s(parts[i]), (count - 1) * parts[i] / cost.rate
            slowest_s, own_s = max(times.values())
            seconds += slowest_s + shared * (sum(bytes_s for _, bytes_s in times.values()) - own_s)
        return 2 * seconds

    def time_swing(self, size: float) -> float:
        """Return the seconds to sum `size` bytes over all devices by exchanges of halves."""
        if self.rows * self.cols == 1:
            return self.cores.predict_s(size)
        return self.cores.predict_s(size) + network.time_swing(self._name_axes(), self.per_chip, size)

    def time_messages(self, size: float) -> float:
        """Return the seconds to sum `size` bytes over all devices by exchanges of whole arrays."""
        if self.rows * self.cols == 1:
            return self.cores.predict_s(size)
        return self.cores.predict_s(size) + network.time_messages(self._name_axes(size), size)

    def _name_axes(self, size: float = math.inf) -> dict[str, Axis]:
        """Return the axes by name, with the costs of messages of `size` bytes."""
        sizes = {"row": self.cols, "column": self.rows // self.slices, "slice": self.slices}
        costs = {"row": (self.row, self.row_pairs), "column": (self.column, self.column_pairs)}
        costs["slice"] = self.four, None
        link_s = max(self.link_s, 1e-9)  # links are shared even where a further one costs no time
        return {
            name: Axis(
                sizes[name], cost.get_rate(size), cost.hop_s, link_s, pairs.get_rate(size) if pairs else math.inf
            )
            for name, (cost, pairs) in costs.items()
        }

    def compare_line(self, size: float) -> float:
        """Return the seconds to sum `size` bytes over a row by exchanges of whole arrays, as a share of the compiler's.

        If rows have one chip, over a column.
        """
        axes = self._name_axes(size)
        name = "row" if self.cols > 1 else "column"
        return network.time_messages({name: axes[name]}, size) / self.line.predict_s(size) if self.line else 1.0

    def time_compiler_sum(self, size: float) -> float:
        """Return the seconds of the compiler's own sum of `size` bytes over all devices."""
        return self.xla.predict_s(size)

    def _find_cost(self, routes: Sequence[Route]) -> LinearCost:
        """Return the cost of a hop along all of these routes at once; of patterns not measured, that of all links."""
        name = next((name for name, pattern in PATTERNS.items() if set(pattern) == set(routes)), "four")
        cost: LinearCost = getattr(self, name)
        return cost

    def _make_axis(self, route: Route, cost: LinearCost) -> Axis:
        return Axis(route.count_chips(self.rows // self.slices, self.cols, self.slices), cost.rate, cost.hop_s)

    @property
    def chip_rate(self) -> float:
        """The best measured bytes per second that a chip sends over all of its links at once."""
        return max(self.row.rate, self.column.rate, self.ring.rate, 2 * self.ring2.rate, 4 * self.four.rate)

    def to_dict(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: JsonObject) -> "Probe":
        """Return the probe that `to_dict` wrote, also after JSON, which has no infinity; other keys are left out."""
        fields = {field.name: values[field.name] for field in dataclass_fields(cls) if field.name in values}
        costs: dict[str, Any] = {name: _read_cost(value) for name, value in fields.items() if isinstance(value, dict)}
        return cls(**fields | costs)


def _read_cost(value: JsonObject) -> LinearCost | SampledCost:
    if "sizes" in value:
        return SampledCost(tuple(value["sizes"]), tuple(value["seconds"]))
    return LinearCost(value["hop_s"], value["rate"] or math.inf, value.get("middle_s", 0.0))


# The routes that carry messages at the same time in each measured pattern.
PATTERNS: Mapping[str, Path] = MappingProxyType(
    {
        "row": (FOLLOW_ROWS,),
        "column": (FOLLOW_COLUMNS,),
        "ring": (VISIT_ALL_CHIPS,),
        "ring2": (VISIT_ALL_CHIPS, VISIT_ALL_CHIPS.reverse()),
        "four": (FOLLOW_ROWS, FOLLOW_ROWS.reverse(), FOLLOW_COLUMNS, FOLLOW_COLUMNS.reverse()),
    }
)


def measure_links(pod: Pod) -> Probe:
    """Time messages over the pod. All processes must call it, and all get the same figures."""
    mesh, free = pod.mesh(), LinearCost(0.0, math.inf)
    costs = {
        name: _fit_cost(mesh, _make_hops(pod.cores, routes), middle=name in ("row", "column"))
        for name, routes in PATTERNS.items()
    }
    if pod.cores % len(PATTERNS["four"]) == 0 and pod.cols != pod.slice_rows:
        for name in ("row", "column"):
            (route,) = PATTERNS[name]
            costs[f"{name}2"] = _fit_cost(mesh, _make_hops(pod.cores, [route, route.reverse()]))
    costs["cores"] = _fit_cost(mesh, _repeat(_sum_over_cores), ON_CHIP_BYTES) if pod.cores > 1 else free
    lengths: dict[Literal["row", "column"], int] = {"row": pod.cols, "column": pod.slice_rows}
    for along, count in lengths.items():
        if count % 2 == 0:  # neighbours in pairs, as in the first step of Swing
            pairs = Exchange(along, groups=tuple((chip, chip + 1) for chip in range(0, count, 2)))
            costs[f"{along}_pairs"] = _fit_cost(mesh, _make_hops(pod.cores, [pairs]), middle=True)
    line = ROW if pod.cols > 1 else COLUMN
    costs["line"] = _fit_cost(mesh, _repeat(lambda x: lax.psum(x, line)), LINE_BYTES)
    link_s = _measure_link_s(pod, mesh, costs)
    return Probe(
        pod.rows, pod.cols, **costs, xla=_sample_sums(mesh), slices=pod.slices, per_chip=pod.cores, link_s=link_s
    )


def _sample_sums(mesh: Mesh) -> SampledCost:
    """Time the compiler's sum over the pod at several sizes."""
    repeat = _repeat(lambda x: lax.psum(x, ALL_AXES))

    def time_sum(size: int) -> float:
        times = SMALL_HOPS if size <= SMALL_BYTES else LARGE_HOPS
        return time_on_mesh(mesh, lambda x: repeat(x, times), size, SUM_REPEATS)[0] / times

    seconds = {size: time_sum(size) for size in SUM_BYTES}
    if seconds[SUM_BYTES[-1]] < MAX_LAST_S:  # latency may still be a part of it
        seconds[LAST_SUM_BYTES] = time_sum(LAST_SUM_BYTES)
    return SampledCost(tuple(seconds), tuple(seconds.values()))


def _measure_link_s(pod: Pod, mesh: Mesh, costs: Mapping[str, LinearCost]) -> float:
    """Return what each further link adds to a message that crosses several; 0 where rows and columns are short."""
    count, axes, near = max((pod.cols, ROW, "row"), (pod.slice_rows, COLUMN, "column"), key=lambda item: item[0])
    if count < MIN_FAR_CHIPS:
        return 0.0
    ahead = [(chip, (chip + FAR_LINKS) % count) for chip in range(count)]

    def send(x: jax.Array) -> jax.Array:
        for _ in range(SMALL_HOPS):
            x = lax.ppermute(x, axes, ahead)
        return x

    far_s = time_on_mesh(mesh, send, SMALL_BYTES)[0] / SMALL_HOPS
    return max(far_s - costs[near].hop_s, 0.0) / (FAR_LINKS - 1)


def _make_hops(cores: int, ways: Sequence[Route]) -> Callable[[jax.Array, int], Arrays]:
    """Return a function that sends a message of `x` along each of the routes, for a number of hops.

    The cores of a chip share the message.
    """

    def body(x: jax.Array, hops: int) -> list[jax.Array]:
        rings = [ring for (ring,) in make_rings([(way,) for way in ways], cores)]
        messages = len(rings) if rings[0].has_all_devices() else 1  # of a core in a hop
        share = -(-x.size * len(ways) // (messages * cores))
        xs = [x[:share] for _ in rings]
        for _ in range(hops):
            xs = [ring.hop(x, x.dtype) for ring, x in zip(rings, xs, strict=True)]
        return xs

    return body


def _repeat(body: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, int], Arrays]:
    """Return a function that applies `body` repeatedly, each time to the previous result so that none is skipped."""

    def run(x: jax.Array, times: int) -> jax.Array:
        for _ in range(times):
            x = body(x) / lax.axis_size(ALL_AXES)
        return x

    return run


def _sum_over_cores(x: jax.Array) -> jax.Array:
    padded = jnp.pad(x, (0, -x.size % lax.axis_size(CORE)))
    return lax.all_gather(lax.psum_scatter(padded, CORE, tiled=True), CORE, tiled=True)[: x.size]


def _fit_cost(
    mesh: Mesh, body: Callable[[jax.Array, int], Arrays], large: int = LARGE_BYTES, *, middle: bool = False
) -> LinearCost:
    def time_hop(size: int, hops: int) -> float:
        return time_on_mesh(mesh, lambda x: body(x, hops), size)[0] / hops

    hop_s, large_s = time_hop(SMALL_BYTES, SMALL_HOPS), time_hop(large, LARGE_HOPS)
    middle_s = time_hop(MIDDLE_BYTES, SMALL_HOPS) if middle else 0.0
    return LinearCost(hop_s, large / max(large_s - hop_s, 0.01 * large_s), middle_s)


def time_on_mesh(
    mesh: Mesh, body: Callable[[jax.Array], Arrays], size: int, repeats: int = REPEATS, limit_s: float = math.inf
) -> tuple[float, Arrays]:
    """Return the seconds that `body` takes on `size` bytes per device, by the main process's clock, and its result.

    The seconds are the median of `repeats` calls, or of as many as fit into `limit_s`, after one untimed call. All
    processes start each call together. Device i holds the number i + 1.
    """
    sharding = NamedSharding(mesh, P(ALL_AXES))
    shape = (mesh.size, max(1, size // 4))

    def make_numbers(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        first, last, _ = index[0].indices(mesh.size)
        return np.broadcast_to(np.arange(first + 1, last + 1, dtype=np.float32)[:, None], (last - first, shape[1]))

    x = jax.make_array_from_callback(shape, sharding, make_numbers)

    def call(x: jax.Array) -> Arrays:
        return jax.tree.map(lambda y: y[None], body(x[0]))

    program = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P(ALL_AXES), out_specs=P(ALL_AXES), check_vma=False))
    result = jax.block_until_ready(program(x))
    times: list[float] = []
    while len(times) < repeats:
        _synchronize()
        start = time.perf_counter()
        jax.block_until_ready(program(x))
        times.append(_broadcast_seconds(time.perf_counter() - start))
        if sum(times) > limit_s:
            break
    return statistics.median(times), result


def _synchronize() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("probe")


def _broadcast_seconds(seconds: float) -> float:
    """Return the main process's measurement in all processes."""
    return seconds if jax.process_count() == 1 else float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
