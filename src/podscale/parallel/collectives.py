"""Collectives on the pod's torus: reduce-scatter, all-gather and all-reduce along rings of chips.

All functions here run inside `jax.shard_map(..., check_vma=False)` over the pod's mesh.

An all-reduce sends the data along one or more *paths* (`routes.py`). A path is a sequence of rings. The data is
reduce-scattered along each ring in turn, after which every device owns one finished chunk of the sum, and then
all-gathered along the same rings in reverse.

The cores of a chip first scatter the data among themselves, on the chip. Each core then sends its part along paths of
its own, as far as there are several: one message of the program moves the parts of all cores, each along its own path.

The owner of a finished chunk rounds it to the payload's dtype before it travels and keeps the rounded chunk itself, so
all replicas end with the same bits.
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
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Num

from podscale.parallel.routes import CROSS_SLICES, FOLLOW_COLUMNS, FOLLOW_ROWS, Path, Route
from podscale.pod import ALL_AXES, COLUMN, CORE, ROW, SLICE

TORUS = (SLICE, *COLUMN, *ROW)  # in this order, the index along all of these axes is row * columns + column
MAX_UNROLLED_HOPS = 16  # longer rings become a loop, or compiling takes longer than training


# --- rings: cycles over devices ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Disjoint cycles of equal length through the pod: `cycles[c][i]` is the i-th device of cycle c."""

    cycles: tuple[tuple[int, ...], ...]

    @classmethod
    def from_routes(cls, routes: Sequence[Route | None]) -> "Ring":
        """Build the ring on which core i of every chip follows `routes[i]`, or takes no part if that is None."""
        slices, rows, cols = lax.axis_size(SLICE), lax.axis_size(COLUMN), lax.axis_size(ROW)
        devices = np.arange(slices * rows * cols * len(routes)).reshape(slices, rows, cols, len(routes))
        cycles = np.concatenate([route.list_cycles(devices[..., core]) for core, route in enumerate(routes) if route])
        return cls(tuple(map(tuple, cycles.tolist())))

    @property
    def size(self) -> int:
        """Devices on a cycle."""
        return len(self.cycles[0])

    def locate_device(self) -> Int[Array, ""]:
        """Return the position of this device on its cycle; 0 if it takes no part."""
        positions = np.zeros(lax.axis_size(ALL_AXES), np.int32)
        positions[np.array(self.cycles)] = np.arange(self.size)
        return jnp.asarray(positions)[lax.axis_index(ALL_AXES)]

    def has_device(self) -> Bool[Array, ""]:
        """Return whether this device takes part."""
        has_part = np.zeros(lax.axis_size(ALL_AXES), bool)
        has_part[np.array(self.cycles)] = True
        return jnp.asarray(has_part)[lax.axis_index(ALL_AXES)]

    def has_all_devices(self) -> bool:
        """Return whether every device of the pod takes part."""
        return len(self.cycles) * self.size == lax.axis_size(ALL_AXES)

    def hop(self, x: Num[Array, " n"], wire: DTypeLike) -> Num[Array, " n"]:
        """Send `x` to the next device of the cycle as dtype `wire`, and return what the previous device sent.

        A device that takes no part gets zeros.
        """
        links = [link for cycle in self.cycles for link in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
        return lax.ppermute(x.astype(wire), ALL_AXES, links).astype(x.dtype)


def make_rings(paths: Sequence[Path], cores: int) -> list[tuple[Ring, ...]]:
    """Return the rings of each part of a core's data, so that all paths carry the same amount.

    The cores of a chip divide the paths among themselves: of four paths, four cores take one each, two cores take two
    each, a single core takes all four. What moves in one message must have one shape: if rows and columns differ in
    length, the rows-first and the columns-first parts move in separate messages. With as many cores as paths, only the
    cores of a path send and wait in its messages, so that all links carry data at the same time. Of a single slice, no
    path leads out.
    """
    if lax.axis_size(SLICE) == 1:
        paths = [tuple(route for route in path if route.along != "slice") for path in paths]
    by_lengths: dict[tuple[int, ...], list[Path]] = {}
    for path in paths:
        by_lengths.setdefault(tuple(Ring.from_routes([route] * cores).size for route in path), []).append(path)
    if len(by_lengths) > 1 and cores % len(paths) == 0:
        return [_make_own_rings(paths, group, cores) for group in by_lengths.values()]
    ring_paths = []
    for group in by_lengths.values():
        for first in range(0, math.lcm(len(group), cores), cores):
            path_of_core = [group[(first + core) % len(group)] for core in range(cores)]
            ring_paths.append(tuple(Ring.from_routes(routes) for routes in zip(*path_of_core, strict=True)))
    return ring_paths


def _make_own_rings(paths: Sequence[Path], group: Sequence[Path], cores: int) -> tuple[Ring, ...]:
    """Return the rings of those cores whose path is in the group; core i takes the i-th path."""
    path_of_core = [paths[core % len(paths)] for core in range(cores)]
    stages = zip(*path_of_core, strict=True)
    takes_part = [path in group for path in path_of_core]
    return tuple(
        Ring.from_routes([route if part else None for route, part in zip(routes, takes_part, strict=True)])
        for routes in stages
    )


# --- one stage: all paths once round a ring each -------------------------------------------------------------------


def reduce_scatter(
    rings: Sequence[Ring], xs: Sequence[Num[Array, " _n"]], wire: DTypeLike
) -> list[Num[Array, " _chunk"]]:
    """Sum each x over its ring; the device at position p keeps the p-th of `ring.size` even chunks.

    Chunk p starts one position after p, and every device that it passes adds its own part: chunks travel as dtype
    `wire` and are added in the dtype of x.
    """
    positions = [ring.locate_device() for ring in rings]
    chunks = [x.reshape(ring.size, -1) for ring, x in zip(rings, xs, strict=True)]

    def select_chunk(path: int, behind: int | Array) -> jax.Array:
        return lax.dynamic_index_in_dim(chunks[path], (positions[path] - behind) % rings[path].size, keepdims=False)

    def step(path: int, i: int | Array, partial_sum: jax.Array) -> jax.Array:
        return rings[path].hop(partial_sum, wire) + select_chunk(path, i + 2)

    return _hop_together(rings, step, [select_chunk(path, 1) for path in range(len(rings))])


def all_gather(
    rings: Sequence[Ring], chunks: Sequence[Num[Array, " _chunk"]], wire: DTypeLike
) -> list[Num[Array, " _n"]]:
    """Return the chunks of all devices of each ring, concatenated in the order of their positions."""
    positions = [ring.locate_device() for ring in rings]

    def insert(path: int, whole: jax.Array, chunk: jax.Array, behind: int | Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(whole, chunk, (positions[path] - behind) % rings[path].size, 0)

    def step(path: int, i: int | Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunk = rings[path].hop(carry[1], wire)
        return insert(path, carry[0], chunk, i + 1), chunk

    empty = [jnp.zeros((ring.size, chunk.size), chunk.dtype) for ring, chunk in zip(rings, chunks, strict=True)]
    start = [(insert(path, empty[path], chunk, 0), chunk) for path, chunk in enumerate(chunks)]
    return [whole.reshape(-1) for whole, _ in _hop_together(rings, step, start)]


def _hop_together(rings: Sequence[Ring], step: Callable[[int, Any, Any], Any], carries: list[Any]) -> list[Any]:
    """Take every path once round its ring, all paths hop by hop together.

    Loops of a program run one after the other: paths that are to use their links at the same time must share one.
    """

    def advance(paths: Sequence[int], i: int | Array, carries: list[Any]) -> list[Any]:
        return [step(path, i, carry) if path in paths else carry for path, carry in enumerate(carries)]

    first = 0
    for last in sorted({ring.size - 1 for ring in rings}):
        paths = [path for path, ring in enumerate(rings) if ring.size - 1 >= last]
        if last - first > MAX_UNROLLED_HOPS:
            carries = lax.fori_loop(first, last, partial(advance, paths), carries)
        else:
            for i in range(first, last):
                carries = advance(paths, i, carries)
        first = last
    return carries


# --- all-reduce ----------------------------------------------------------------------------------------------------


def all_reduce(
    paths: Sequence[Path], x: Num[Array, " n"], wire: DTypeLike, *, synchronizes: bool = True
) -> Num[Array, " n"]:
    """Sum `x` over all devices, with an even part of it along each path.

    Args:
        paths: for each path, the routes of its stages in the order of the reduce-scatters.
        x: a flat array of any size.
        wire: the dtype that travels between chips; partial sums are added in the dtype of x.
        synchronizes: whether the cores of a chip wait for each other between stages, where they take different paths.

    Returns:
        the sum in the dtype of x, rounded to `wire` if it traveled; the same bits on every device.
    """
    cores, chips = lax.axis_size(CORE), lax.axis_size(TORUS)
    if chips == 1:
        return lax.psum(x, CORE)
    ring_paths = make_rings(paths, cores)
    shares = all(rings[0].has_all_devices() for rings in ring_paths)  # or each device has all of its part on one path
    whole = jnp.pad(x, (0, compute_padding(x.size, (len(ring_paths) if shares else 1) * chips * cores)))
    part = lax.psum_scatter(whole, CORE, tiled=True) if cores > 1 else whole
    parts = list(jnp.split(part, len(ring_paths))) if shares else [part] * len(ring_paths)
    stages = list(zip(*ring_paths, strict=True))
    synchronize = _synchronize_cores if synchronizes and cores > 1 and len(paths) > 1 else list
    for number, rings in enumerate(stages):
        parts = reduce_scatter(rings, synchronize(parts) if number else parts, wire)
    parts = [round_to(part, wire) for part in parts]
    for rings in reversed(stages):
        parts = all_gather(rings, synchronize(parts) if len(stages) > 1 else parts, wire)
    takes_part = [rings[0].has_device() for rings in ring_paths]
    part = jnp.concatenate(parts) if shares else jnp.select(takes_part, parts)
    whole = lax.all_gather(part.astype(wire), CORE, tiled=True).astype(x.dtype) if cores > 1 else part
    return whole[: x.size]


def _synchronize_cores(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the parts unchanged, once all cores of the chip have theirs.

    A core that turned from rows to columns before another one did would find that core's data still on the links there.
    To wait for a sum, a program must use it, so a zero that depends on the sum is added to the bits of every part; the
    compiler cannot see that it is zero.
    """
    bits = [lax.bitcast_convert_type(part, f"uint{8 * part.dtype.itemsize}") for part in parts]
    ones = sum(lax.population_count(b[:1]).astype(jnp.int32) for b in bits)  # at most 64 a part
    zero = lax.psum(ones // (64 * len(parts) + 1), CORE)
    return [lax.bitcast_convert_type(b + zero.astype(b.dtype), part.dtype) for b, part in zip(bits, parts, strict=True)]


def round_to(x: Num[Array, " n"], wire: DTypeLike) -> Num[Array, " n"]:
    """Round `x` to the values it will have on arrival.

    Not a cast there and back: the compiler may take such a pair for the identity.
    """
    if x.dtype == wire:
        return x
    info = jnp.finfo(wire)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def compute_padding(size: int, chunks: int) -> int:
    """Return how many elements to add so that `chunks` divides the size.

    Chunks are whole 8x128 tiles of a TPU where that adds little.
    """
    tiled = -size % (1024 * chunks)
    return tiled if tiled <= size / 32 else -size % chunks


# --- the two halves of an all-reduce, for sharded updates ------------------------------------------------------------


def scatter_sum(x: Num[Array, "devices n"], payload: str = "float32") -> Num[Array, " padded"]:
    """Return one row of the sum of x over the pod on each device.

    Args:
        x: [devices, n].
        payload: "bfloat16" halves the bytes of partial sums on the links; a finished row does not travel, so it is not
            rounded.

    Returns:
        row i on the i-th device by core, column, row and slice, in this order; padding may make it longer than n.
    """
    x = jnp.pad(x, ((0, 0), (0, compute_padding(x.size, x.shape[0]) // x.shape[0])))
    wire = jnp.bfloat16 if payload == "bfloat16" else x.dtype
    part = lax.psum_scatter(x.ravel(), CORE, tiled=True) if lax.axis_size(CORE) > 1 else x.ravel()
    for ring in _make_torus_rings():
        (part,) = reduce_scatter([ring], [part], wire)
    return part


def gather_parts(part: Num[Array, " n"]) -> Num[Array, "devices n"]:
    """Return the parts of all devices as [devices, n], by core, column, row and slice."""
    devices, size = lax.axis_size(ALL_AXES), part.size
    whole = jnp.pad(part, (0, compute_padding(size * devices, devices) // devices))
    for ring in reversed(_make_torus_rings()):
        (whole,) = all_gather([ring], [whole], whole.dtype)
    if lax.axis_size(CORE) > 1:
        whole = lax.all_gather(whole, CORE, tiled=True)
    return whole.reshape(devices, -1)[:, :size]


def _make_torus_rings() -> list[Ring]:
    """Return the rings along rows, along columns, and from slice to slice, the same for all cores."""
    routes = [FOLLOW_ROWS, FOLLOW_COLUMNS, *([CROSS_SLICES] if lax.axis_size(SLICE) > 1 else [])]
    return [Ring.from_routes([route] * lax.axis_size(CORE)) for route in routes]
