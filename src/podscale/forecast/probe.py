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
from types import MappingProxyType
from typing import TypeAlias

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
from podscale.parallel.collectives import lay_rings
from podscale.parallel.routes import FOLLOW_COLUMNS, FOLLOW_ROWS, VISIT_ALL_CHIPS, Path, Route
from podscale.pod import ALL_AXES, CORE, Pod

SMALL_BYTES, LARGE_BYTES = 64, 256 << 10  # bytes of the messages
Arrays: TypeAlias = PyTree  # an array, or one for each ring
SUM_BYTES = 1 << 20  # of the compiler's sum, which may use another algorithm for small sums than for large ones
ON_CHIP_BYTES = 4 << 20  # between the cores of a chip, where latency dominates smaller messages
SMALL_HOPS, LARGE_HOPS = 8, 2  # in sequence, so that different start times of the processes matter less
REPEATS = 5


@dataclass(frozen=True)
class LinearCost:
    """A cost in seconds that is linear in the bytes: a latency and a rate."""

    hop_s: float
    rate: float  # bytes per second

    def predict_s(self, size: float) -> float:
        return self.hop_s + size / self.rate


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
    xla: LinearCost  # the compiler's sum over the pod
    slices: int = 1  # messages between which cost what all links at once cost

    def time_paths(self, paths: Sequence[Path], size: float) -> float:
        """Return the seconds to sum `size` bytes over all devices, an equal part along each path."""
        if self.rows * self.cols == 1:
            return self.cores.predict_s(size)
        stages = [
            [self._make_axis(route, self._find_cost(stage)) for route in stage] for stage in zip(*paths, strict=True)
        ]
        return self.cores.predict_s(size) + network.time_paths(list(zip(*stages, strict=True)), size)

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
    costs = {name: _fit_cost(mesh, _make_hops(pod.cores, routes)) for name, routes in PATTERNS.items()}
    costs["cores"] = _fit_cost(mesh, _repeat(_sum_over_cores), ON_CHIP_BYTES) if pod.cores > 1 else free
    costs["xla"] = _fit_cost(mesh, _repeat(lambda x: lax.psum(x, ALL_AXES)), SUM_BYTES)
    return Probe(pod.rows, pod.cols, **costs, slices=pod.slices)


def _make_hops(cores: int, ways: Sequence[Route]) -> Callable[[jax.Array, int], Arrays]:
    """Return a function that sends a message of `x` along each of the routes, for a number of hops.

    The cores of a chip share the message.
    """

    def body(x: jax.Array, hops: int) -> list[jax.Array]:
        rings = [ring for (ring,) in lay_rings([(way,) for way in ways], cores)]
        share = -(-x.size * len(ways) // (len(rings) * cores))
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


def _fit_cost(mesh: Mesh, body: Callable[[jax.Array, int], Arrays], large: int = LARGE_BYTES) -> LinearCost:
    hop_s = time_on_mesh(mesh, lambda x: body(x, SMALL_HOPS), SMALL_BYTES)[0] / SMALL_HOPS
    large_s = time_on_mesh(mesh, lambda x: body(x, LARGE_HOPS), large)[0] / LARGE_HOPS
    return LinearCost(hop_s, large / max(large_s - hop_s, 0.01 * large_s))


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
