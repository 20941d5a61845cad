"""Probe: what a message costs on the pod that is here, measured by sending some, and what sums over it should take.

A hop costs a latency and its bytes over a rate, and both depend on what else hops at the same time: two links of a
torus carry twice as much as one, two streams through the same port do not. So each pattern of hops that a strategy is
made of is timed by itself, and the closed forms of `network` do the rest. The compiler's own sum is a pattern too.
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
from podscale.parallel.collectives import Way, along_columns, along_rows, lay_rings, reverse, through_all
from podscale.pod import ALL_AXES, CORE, Pod

SMALL, LARGE = 64, 256 << 10  # bytes of the messages
SUMMED = 1 << 20  # of the compiler's sum: it may send a small one by other means than a large one
ON_CHIP = 4 << 20  # inside a chip, where latency hides the rate of smaller ones
SMALL_HOPS, LARGE_HOPS = 8, 2  # in a row, so that it weighs less that processes do not begin at the same instant
REPEATS = 5


@dataclass(frozen=True)
class Line:
    """Seconds for so many bytes: a latency and a rate."""

    hop_s: float
    rate: float  # bytes a second

    def seconds(self, size: float) -> float:
        return self.hop_s + size / self.rate


@dataclass(frozen=True)
class Probe:
    """What was measured on a pod of rows x columns; the bytes are those of one path's message."""

    rows: int
    cols: int
    row: Line  # one message along the row
    column: Line
    ring: Line  # one along the walk through all chips
    ring2: Line  # one either way along it
    four: Line  # one along the row and one along the column, either way
    cores: Line  # the sum over the cores of a chip
    xla: Line  # the compiler's sum over the pod

    def summation_s(self, strategy: str, size: float) -> float:
        """Seconds to sum `size` bytes by a strategy of `collectives`."""
        if strategy == "xla":
            return self.xla.seconds(size)
        chips = self.rows * self.cols
        if chips == 1:
            return self.cores.seconds(size)
        whole = {"ring": (self.ring, network.ring), "ring2": (self.ring2, network.ring_both_ways)}
        if strategy in whole:
            line, form = whole[strategy]
            seconds = form([Axis(chips, line.rate, line.hop_s)], size)
        elif strategy == "torus4":
            seconds = network.all_links(self._axes(self.four, self.four), size)
        else:
            seconds = network.torus(self._axes(self.row, self.column), size)
        return self.cores.seconds(size) + seconds

    def _axes(self, row: Line, column: Line) -> tuple[Axis, Axis]:
        return Axis(self.cols, row.rate, row.hop_s), Axis(self.rows, column.rate, column.hop_s)

    @property
    def chip_rate(self) -> float:
        """Bytes a second that a chip sends over all of its links at once, at the best that was seen."""
        return max(self.row.rate, self.column.rate, self.ring.rate, 2 * self.ring2.rate, 4 * self.four.rate)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


ONE_ROW, ONE_COLUMN, ONE_WALK = (along_rows,), (along_columns,), (through_all,)
BOTH_WAYS = (through_all, reverse(through_all))
FOUR_WAYS = (along_rows, reverse(along_rows), along_columns, reverse(along_columns))


def measured(pod: Pod) -> Probe:
    """Sends messages over the pod; all processes take part and come to the same figures."""
    mesh = pod.mesh()
    hopping = partial(_hops, pod.cores)
    found = {
        "row": _line(mesh, hopping(ONE_ROW)),
        "column": _line(mesh, hopping(ONE_COLUMN)),
        "ring": _line(mesh, hopping(ONE_WALK)),
        "ring2": _line(mesh, hopping(BOTH_WAYS)),
        "four": _line(mesh, hopping(FOUR_WAYS)),
        "cores": _line(mesh, _in_a_row(_over_cores), ON_CHIP) if pod.cores > 1 else Line(0.0, math.inf),
        "xla": _line(mesh, _in_a_row(lambda x: lax.psum(x, ALL_AXES)), SUMMED),
    }
    return Probe(pod.rows, pod.cols, **found)


def _hops(cores: int, ways: Sequence[Way]) -> Callable[[jax.Array, int], Any]:
    """A message of `x` along each of the ways, some hops in a row; the cores of a chip share it."""

    def body(x: jax.Array, hops: int) -> Any:
        rings = [ring for (ring,) in lay_rings([(way,) for way in ways], cores)]
        share = -(-x.size * len(ways) // (len(rings) * cores))
        xs = [x[:share] for _ in rings]
        for _ in range(hops):
            xs = [ring.hop(x, x.dtype) for ring, x in zip(rings, xs, strict=True)]
        return xs

    return body


def _in_a_row(body: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, int], Any]:
    """The same some times in a row, none of which may be left out."""

    def repeated(x: jax.Array, times: int) -> jax.Array:
        for _ in range(times):
            x = body(x) / lax.axis_size(ALL_AXES)
        return x

    return repeated


def _over_cores(x: jax.Array) -> jax.Array:
    whole = jnp.pad(x, (0, -x.size % lax.axis_size(CORE)))
    return lax.all_gather(lax.psum_scatter(whole, CORE, tiled=True), CORE, tiled=True)[: x.size]


def _line(mesh: Mesh, body: Callable[[jax.Array, int], Any], large: int = LARGE) -> Line:
    hop_s = timed(mesh, lambda x: body(x, SMALL_HOPS), SMALL)[0] / SMALL_HOPS
    large_s = timed(mesh, lambda x: body(x, LARGE_HOPS), large)[0] / LARGE_HOPS
    return Line(hop_s, large / max(large_s - hop_s, 0.01 * large_s))


def timed(
    mesh: Mesh, body: Callable[[jax.Array], Any], size: int, repeats: int = REPEATS, limit_s: float = math.inf
) -> tuple[float, Any]:
    """Seconds that `body` takes on `size` bytes of each device, and its result; the first process's clock counts.

    The median of `repeats`, or of as many as fit in `limit_s`, after one that nobody counts; all processes begin each
    together. Device i holds the number i + 1.
    """
    sharding = NamedSharding(mesh, P(ALL_AXES))
    shape = (mesh.size, max(1, size // 4))

    def numbers(index: Any) -> Any:
        first, last, _ = index[0].indices(mesh.size)
        return np.broadcast_to(np.arange(first + 1, last + 1, dtype=np.float32)[:, None], (last - first, shape[1]))

    x = jax.make_array_from_callback(shape, sharding, numbers)

    def call(x: jax.Array) -> Any:
        return jax.tree.map(lambda y: y[None], body(x[0]))

    program = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P(ALL_AXES), out_specs=P(ALL_AXES), check_vma=False))
    result = jax.block_until_ready(program(x))
    times: list[float] = []
    while len(times) < repeats:
        _together()
        began = time.perf_counter()
        jax.block_until_ready(program(x))
        times.append(_first_ones(time.perf_counter() - began))
        if sum(times) > limit_s:
            break
    return statistics.median(times), result


def _together() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("probe")


def _first_ones(seconds: float) -> float:
    """What the first process measured, in all of them."""
    return seconds if jax.process_count() == 1 else float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
