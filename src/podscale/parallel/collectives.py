"""Gradient summation: rings laid over the pod's torus.

Called inside `jax.shard_map(..., check_vma=False)` over the pod's mesh. Every strategy but `xla` is an all-reduce along
one or more *paths*. A path is a tuple of rings: the data is reduce-scattered along each in turn, whereupon every device
owns one finished shard, and gathered back along the same rings in reverse:

    ring     one path, of one ring through all chips: 2(N-1) hops
    ring2    two paths, half of the data each: the same ring, either way round
    torus    one path, row then column: 2(R-1) + 2(C-1) hops (Ying et al. 2018, arXiv 1811.06992)
    torus4   four paths, a quarter of the data each: row or column first, either way round, so that all four links
             of a chip carry data at once
    xla      one `psum`; the compiler chooses. On TPU it already is the two-dimensional algorithm

The cores of a chip scatter the data among them first, on the chip. Each then takes its part along paths of its own, as
far as there are several: one message of the program moves all cores' parts, each the way of its path.

The owner of a finished shard rounds it to the payload before it travels, and keeps what it sent: all replicas end
with the same bits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from podscale.pod import ALL_AXES, COLUMN, CORE, ROW

TORUS = COLUMN + ROW  # in this order the index along all of them is row * columns + column
UNROLL = 16  # hops; longer rings become a loop, or compiling takes longer than training


# --- rings -------------------------------------------------------------------------------------------------------

Way = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # chips [rows, columns] -> closed walks over them [walks, chips]


@dataclass(frozen=True)
class Ring:
    """Closed walks that all devices of the pod are on, each on one: `walks[w][i]` is the i-th device of walk w."""

    walks: tuple[tuple[int, ...], ...]

    @classmethod
    def along(cls, ways: Sequence[Way]) -> "Ring":
        """Each core of every chip goes its own way; there are as many ways as cores."""
        rows, cols = lax.axis_size(COLUMN), lax.axis_size(ROW)
        devices = np.arange(rows * cols * len(ways)).reshape(rows, cols, len(ways))
        walks = np.concatenate([way(devices[:, :, core]) for core, way in enumerate(ways)])
        return cls(tuple(map(tuple, walks.tolist())))

    @property
    def size(self) -> int:
        """Devices on a walk."""
        return len(self.walks[0])

    def place(self) -> jax.Array:
        """Where on its walk this device is."""
        walks = np.array(self.walks)
        places = np.empty(walks.size, np.int32)
        places[walks] = np.arange(self.size)
        return jnp.asarray(places)[lax.axis_index(ALL_AXES)]

    def hop(self, x: jax.Array, wire: Any) -> jax.Array:
        """What the device before this one on its walk holds as `x`; it travels as `wire`."""
        links = [link for walk in self.walks for link in zip(walk, walk[1:] + walk[:1], strict=True)]
        return lax.ppermute(x.astype(wire), ALL_AXES, links).astype(x.dtype)


def along_rows(chips: NDArray[np.int64]) -> NDArray[np.int64]:
    return chips


def along_columns(chips: NDArray[np.int64]) -> NDArray[np.int64]:
    return chips.T


def through_all(chips: NDArray[np.int64]) -> NDArray[np.int64]:
    """One walk, link by link."""
    return np.array([[chips[place] for place in hamiltonian(*chips.shape)]])


def reverse(way: Way) -> Way:
    """The same walks, the other way round."""
    return lambda chips: way(chips)[:, ::-1]


def hamiltonian(rows: int, cols: int) -> list[tuple[int, int]]:
    """All chips of a torus as (row, column), each one link from the last and the last one link from the first.

    Every row is walked as a whole ring, so a row walked rightwards ends one column left of where it began, and the next
    begins there. With k rows rightwards and the others leftwards the walk ends rows - 2k columns from where it began,
    which must be 0 modulo `cols`. Such a k exists if there is an even number of rows (half of them), or if both numbers
    are odd and rows >= cols (k = (rows - cols) / 2); in all other cases it exists for the transpose.

    >>> hamiltonian(2, 3)
    [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]
    """
    rightwards = next((k for k in range(rows, -1, -1) if (rows - 2 * k) % cols == 0), None)
    if rightwards is None:
        return [(row, col) for col, row in hamiltonian(cols, rows)]
    walk, start = [], 0
    for row in range(rows):
        step = 1 if row < rightwards else -1
        walk += [(row, (start + step * i) % cols) for i in range(cols)]
        start -= step
    return walk


def reduce_scatter(rings: Sequence[Ring], xs: Sequence[jax.Array], wire: Any) -> list[jax.Array]:
    """Each x summed over its ring; the device at place p keeps the p-th of `ring.size` even shards.

    Shard p sets out one place after p, and every device it passes adds its own part: sent as `wire`, added as it is.
    """
    places = [ring.place() for ring in rings]
    shards = [x.reshape(ring.size, -1) for ring, x in zip(rings, xs, strict=True)]

    def own(lane: int, behind: Any) -> jax.Array:
        return lax.dynamic_index_in_dim(shards[lane], (places[lane] - behind) % rings[lane].size, keepdims=False)

    def step(lane: int, i: Any, partial_sum: jax.Array) -> jax.Array:
        return rings[lane].hop(partial_sum, wire) + own(lane, i + 2)

    return _in_step(rings, step, [own(lane, 1) for lane in range(len(rings))])


def all_gather(rings: Sequence[Ring], shards: Sequence[jax.Array], wire: Any) -> list[jax.Array]:
    """The shards of all devices of each ring, in the order of their places."""
    places = [ring.place() for ring in rings]

    def put(lane: int, whole: jax.Array, shard: jax.Array, behind: Any) -> jax.Array:
        return lax.dynamic_update_index_in_dim(whole, shard, (places[lane] - behind) % rings[lane].size, 0)

    def step(lane: int, i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        shard = rings[lane].hop(carry[1], wire)
        return put(lane, carry[0], shard, i + 1), shard

    empty = [jnp.zeros((ring.size, shard.size), shard.dtype) for ring, shard in zip(rings, shards, strict=True)]
    start = [(put(lane, empty[lane], shard, 0), shard) for lane, shard in enumerate(shards)]
    return [whole.reshape(-1) for whole, _ in _in_step(rings, step, start)]


def _in_step(rings: Sequence[Ring], step: Callable[[int, Any, Any], Any], carries: list[Any]) -> list[Any]:
    """Take every lane once round its ring, all lanes hop by hop together.

    Loops of a program run one after the other: lanes that are to use their links at the same time must share one.
    """

    def advance(lanes: Sequence[int], i: Any, carries: list[Any]) -> list[Any]:
        return [step(lane, i, carry) if lane in lanes else carry for lane, carry in enumerate(carries)]

    first = 0
    for last in sorted({ring.size - 1 for ring in rings}):
        lanes = [lane for lane, ring in enumerate(rings) if ring.size - 1 >= last]
        if last - first > UNROLL:
            carries = lax.fori_loop(first, last, partial(advance, lanes), carries)
        else:
            for i in range(first, last):
                carries = advance(lanes, i, carries)
        first = last
    return carries


def all_reduce(paths: Sequence[tuple[Way, ...]], x: jax.Array, wire: Any) -> jax.Array:
    """All-reduce, an even part of `x` along each path."""
    cores, chips = lax.axis_size(CORE), lax.axis_size(TORUS)
    if chips == 1:
        return lax.psum(x, CORE)
    lanes = lay_rings(paths, cores)
    whole = jnp.pad(x, (0, _padding(x.size, len(lanes) * chips * cores)))
    part = lax.psum_scatter(whole, CORE, tiled=True) if cores > 1 else whole
    parts = list(jnp.split(part, len(lanes)))
    stages = list(zip(*lanes, strict=True))
    turn = _together if cores > 1 and len(paths) > 1 else list
    for number, rings in enumerate(stages):
        parts = reduce_scatter(rings, turn(parts) if number else parts, wire)
    parts = [_rounded(part, wire) for part in parts]
    for rings in reversed(stages):
        parts = all_gather(rings, turn(parts) if len(stages) > 1 else parts, wire)
    part = jnp.concatenate(parts)
    whole = lax.all_gather(part.astype(wire), CORE, tiled=True).astype(x.dtype) if cores > 1 else part
    return whole[: x.size]


def _together(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """The parts as they are, once all cores of the chip have theirs.

    Whoever turned from rows to columns before another did would find that one's data still on the links there. To wait
    for a sum it must be used, so its zero is added; that it is zero only the sum's maker knows.
    """
    bits = [lax.bitcast_convert_type(part, f"uint{8 * part.dtype.itemsize}") for part in parts]
    ones = sum(lax.population_count(b[:1]).astype(jnp.int32) for b in bits)  # at most 64 a part
    zero = lax.psum(ones // (64 * len(parts) + 1), CORE)
    return [lax.bitcast_convert_type(b + zero.astype(b.dtype), part.dtype) for b, part in zip(bits, parts, strict=True)]


def lay_rings(paths: Sequence[tuple[Way, ...]], cores: int) -> list[tuple[Ring, ...]]:
    """The rings of each part of a core's data; all paths carry as much, and every core goes as many as it must.

    Four cores take one of four paths each, two cores two, a single core all four. What moves in one message must have
    one shape: if rows are not as long as columns, rows-first and columns-first parts move in messages of their own.
    """
    alike: dict[tuple[int, ...], list[tuple[Way, ...]]] = {}
    for path in paths:
        alike.setdefault(tuple(Ring.along([way] * cores).size for way in path), []).append(path)
    lanes = []
    for group in alike.values():
        for first in range(0, math.lcm(len(group), cores), cores):
            own = [group[(first + core) % len(group)] for core in range(cores)]
            lanes.append(tuple(Ring.along(ways) for ways in zip(*own, strict=True)))
    return lanes


def _padding(size: int, shards: int) -> int:
    """Elements to add so that `shards` divides the size; whole 8x128 tiles of a TPU each, where that adds little."""
    tiled = -size % (1024 * shards)
    return tiled if tiled <= size / 32 else -size % shards


def _rounded(x: jax.Array, wire: Any) -> jax.Array:
    """`x` as it will arrive. Not a cast there and back: the compiler may take such a pair for the identity."""
    if x.dtype == wire:
        return x
    kept = jnp.finfo(wire)
    return lax.reduce_precision(x, exponent_bits=kept.nexp, mantissa_bits=kept.nmant)


# --- the halves of a sum -------------------------------------------------------------------------------------------


def scatter_sum(x: jax.Array, payload: str = "float32") -> jax.Array:
    """Row i of the sum of x [devices, n] over the pod, on the i-th device by core, column and row; n may grow.

    What is finished does not travel: it is not rounded to the payload.
    """
    x = jnp.pad(x, ((0, 0), (0, _padding(x.size, x.shape[0]) // x.shape[0])))
    wire = jnp.bfloat16 if payload == "bfloat16" else x.dtype
    part = lax.psum_scatter(x.ravel(), CORE, tiled=True) if lax.axis_size(CORE) > 1 else x.ravel()
    for ring in _rows_then_columns():
        (part,) = reduce_scatter([ring], [part], wire)
    return part


def gather_parts(part: jax.Array) -> jax.Array:
    """[devices, n]: the parts of all devices, by core, column and row."""
    devices, size = lax.axis_size(ALL_AXES), part.size
    whole = jnp.pad(part, (0, _padding(size * devices, devices) // devices))
    for ring in reversed(_rows_then_columns()):
        (whole,) = all_gather([ring], [whole], whole.dtype)
    if lax.axis_size(CORE) > 1:
        whole = lax.all_gather(whole, CORE, tiled=True)
    return whole.reshape(devices, -1)[:, :size]


def _rows_then_columns() -> list[Ring]:
    return [Ring.along([way] * lax.axis_size(CORE)) for way in (along_rows, along_columns)]
