"""Measure the cost of messages on the present pod, and predict the seconds of sums from it.

A hop costs a latency plus its bytes over a rate, and both depend on the other messages at the same time: two links of a
torus carry twice as much as one, two streams through the same port do not. So each pattern of hops that a strategy
consists of is timed separately, and the closed forms of `network` combine them. The compiler's own sum is a pattern
too.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podscale.forecast import network
from podscale.forecast.network import Axis
from podscale.parallel.collectives import Route, follow_columns, follow_rows, lay_rings, reverse_route, visit_all_chips
from podscale.pod import ALL_AXES, CORE, Pod

SMALL_BYTES, LARGE_BYTES = 64, 256 << 10  # bytes of the messages
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

    def predict_summation_s(self, strategy: str, size: float) -> float:
        """Return the seconds to sum `size` bytes by a strategy of `parallel.summation`."""
        if strategy == "xla":
            return self.xla.predict_s(size)
        chips = self.rows * self.cols
        if chips == 1:
            return self.cores.predict_s(size)
        rings = {"ring": (self.ring, network.time_ring), "ring2": (self.ring2, network.time_bidirectional_ring)}
        if strategy in rings:
            cost, form = rings[strategy]
            seconds = form([Axis(chips, cost.rate, cost.hop_s)], size)
        elif strategy == "torus4":
            seconds = network.time_all_links(self._make_axes(self.four, self.four), size)
        else:
            seconds = network.time_torus(self._make_axes(self.row, self.column), size)
        return self.cores.predict_s(size) + seconds

    def _make_axes(self, row: LinearCost, column: LinearCost) -> tuple[Axis, Axis]:
        return Axis(self.cols, row.rate, row.hop_s), Axis(self.rows, column.rate, column.hop_s)

    @property
    def chip_rate(self) -> float:
        """The best measured bytes per second that a chip sends over all of its links at once."""
        return max(self.row.rate, self.column.rate, self.ring.rate, 2 * self.ring2.rate, 4 * self.four.rate)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


ROW_ROUTES, COLUMN_ROUTES, RING_ROUTES = (follow_rows,), (follow_columns,), (visit_all_chips,)
RING2_ROUTES = (visit_all_chips, reverse_route(visit_all_chips))
TORUS4_ROUTES = (follow_rows, reverse_route(follow_rows), follow_columns, reverse_route(follow_columns))


def measure_links(pod: Pod) -> Probe:
    """Time messages over the pod. All processes must call it, and all get the same figures."""
    mesh = pod.mesh()
    make_hops = partial(_make_hops, pod.cores)
    costs = {
        "row": _fit_cost(mesh, make_hops(ROW_ROUTES)),
        "column": _fit_cost(mesh, make_hops(COLUMN_ROUTES)),
        "ring": _fit_cost(mesh, make_hops(RING_ROUTES)),
        "ring2": _fit_cost(mesh, make_hops(RING2_ROUTES)),
        "four": _fit_cost(mesh, make_hops(TORUS4_ROUTES)),
        "cores": _fit_cost(mesh, _repeat(_sum_over_cores), ON_CHIP_BYTES)
        if pod.cores > 1
        else LinearCost(0.0, math.inf),
        "xla": _fit_cost(mesh, _repeat(lambda x: lax.psum(x, ALL_AXES)), SUM_BYTES),
    }
    return Probe(pod.rows, pod.cols, **costs)


def _make_hops(cores: int, ways: Sequence[Route]) -> Callable[[jax.Array, int], Any]:
    """Return a function that sends a message of `x` along each of the routes, for a number of hops.

    The cores of a chip share the message.
    """

    def body(x: jax.Array, hops: int) -> Any:
        rings = [ring for (ring,) in lay_rings([(way,) for way in ways], cores)]
        share = -(-x.size * len(ways) // (len(rings) * cores))
        xs = [x[:share] for _ in rings]
        for _ in range(hops):
            xs = [ring.hop(x, x.dtype) for ring, x in zip(rings, xs, strict=True)]
        return xs

    return body


def _repeat(body: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, int], Any]:
    """Return a function that applies `body` repeatedly, each time to the previous result so that none is skipped."""

    def run(x: jax.Array, times: int) -> jax.Array:
        for _ in range(times):
            x = body(x) / lax.axis_size(ALL_AXES)
        return x

    return run


def _sum_over_cores(x: jax.Array) -> jax.Array:
    padded = jnp.pad(x, (0, -x.size % lax.axis_size(CORE)))
    return lax.all_gather(lax.psum_scatter(padded, CORE, tiled=True), CORE, tiled=True)[: x.size]


def _fit_cost(mesh: Mesh, body: Callable[[jax.Array, int], Any], large: int = LARGE_BYTES) -> LinearCost:
    hop_s = time_on_mesh(mesh, lambda x: body(x, SMALL_HOPS), SMALL_BYTES)[0] / SMALL_HOPS
    large_s = time_on_mesh(mesh, lambda x: body(x, LARGE_HOPS), large)[0] / LARGE_HOPS
    return LinearCost(hop_s, large / max(large_s - hop_s, 0.01 * large_s))


def time_on_mesh(
    mesh: Mesh, body: Callable[[jax.Array], Any], size: int, repeats: int = REPEATS, limit_s: float = math.inf
) -> tuple[float, Any]:
    """Return the seconds that `body` takes on `size` bytes per device, by the main process's clock, and its result.

    The seconds are the median of `repeats` calls, or of as many as fit into `limit_s`, after one untimed call. All
    processes start each call together. Device i holds the number i + 1.
    """
    sharding = NamedSharding(mesh, P(ALL_AXES))
    shape = (mesh.size, max(1, size // 4))

    def make_numbers(index: Any) -> Any:
        first, last, _ = index[0].indices(mesh.size)
        return np.broadcast_to(np.arange(first + 1, last + 1, dtype=np.float32)[:, None], (last - first, shape[1]))

    x = jax.make_array_from_callback(shape, sharding, make_numbers)

    def call(x: jax.Array) -> Any:
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
