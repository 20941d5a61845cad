"""Swing: sums in log2(n) steps along every row and column, in two variants (`exchanges.py` has who sends to whom).

`swing` sends half of what it holds in each step, until every chip owns a finished part, and gathers the parts on the
way back: 2 log2(N) messages, and as few bytes as a ring. `swing_latency` sends whole arrays: log2(N) messages, for sums
so small that only the number of messages counts. Between slices, `swing` is a ring as all other strategies are.

The cores of a chip first scatter the data among themselves. With `swing`, each of up to four cores then takes a path
of its own, and all four links of a chip carry data at the same time.

Reference:
    De Sensi et al. 2024, arXiv 2401.09356 (bandwidth-optimal and latency-optimal Swing). There, chips of a ring of
    eight or more add the same numbers in different orders in the latter. Here all chips add them in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from podscale.parallel.collectives import TORUS, all_reduce, compute_padding, round_to
from podscale.parallel.exchanges import MAX_PATHS, Message, list_messages, make_paths
from podscale.parallel.routes import count_hops
from podscale.parallel.summation import Links, Replicated
from podscale.pod import COLUMN, CORE, ROW, SLICE

Axes = str | tuple[str, ...]
DIMENSIONS: tuple[tuple[str, Axes], ...] = (("row", ROW), ("column", COLUMN), ("slice", SLICE))


@dataclass(frozen=True)
class Swing(Replicated):
    """A variant of Swing as a strategy; see `summation.Summation`.

    Args:
        name: what `plan.summation` says.
        reduce: sums a flat array over all devices.
        sends_whole: whether chips send whole arrays, not halves.
    """

    sends_whole: bool = False

    def time_sum(self, links: Links, size: float) -> float:
        return links.time_messages(size) if self.sends_whole else links.time_swing(size)

    def count_hops(self, rows: int, cols: int, slices: int = 1) -> int:
        if self.sends_whole:
            return sum(len(list_messages("row", count)) for count in (cols, rows, slices))
        return count_hops(make_paths(rows, cols), rows, cols, slices)


# --- halves ----------------------------------------------------------------------------------------------------------


def sum_by_halves(x: Num[Array, " n"], wire: DTypeLike) -> Num[Array, " n"]:
    """Sum `x` over all devices; the same bits on every device, rounded to `wire` if it traveled."""
    count = min(lax.axis_size(CORE), MAX_PATHS)
    return all_reduce(make_paths(lax.axis_size(COLUMN), lax.axis_size(ROW), count), x, wire, synchronizes=False)


# --- whole arrays ----------------------------------------------------------------------------------------------------


def sum_whole(x: Num[Array, " n"], wire: DTypeLike) -> Num[Array, " n"]:
    """Sum `x` over all devices; the same bits on every device, rounded to `wire` if it traveled."""
    cores, size = lax.axis_size(CORE), x.size
    if lax.axis_size(TORUS) == 1:
        return lax.psum(x, CORE)
    if cores > 1:
        x = lax.psum_scatter(jnp.pad(x, (0, compute_padding(size, cores))), CORE, tiled=True)
    for along, axes in DIMENSIONS:
        x = sum_along(x, axes, wire, list_messages(along, lax.axis_size(axes)))
    x = round_to(x, wire)
    return lax.all_gather(x.astype(wire), CORE, tiled=True).astype(x.dtype)[:size] if cores > 1 else x


def sum_along(x: Num[Array, " n"], axes: Axes, wire: DTypeLike, messages: Sequence[Message]) -> Num[Array, " n"]:
    """Sum `x` over the devices along mesh axes by these messages, in the same order on all of them."""
    position = lax.axis_index(axes)
    held = round_to(x, wire)[None]
    for message in messages:
        links = [(source, target) for target, source in enumerate(message.sources)]
        received = lax.ppermute(held[: message.copies].astype(wire), axes, links).astype(x.dtype)
        held = jnp.concatenate([held, received])
        if message.orders:
            ordered = held if len(held) == 2 else held[jnp.asarray(message.orders)[position]]  # a + b is b + a
            held = round_to(reduce(add, ordered), wire)[None]
    return held[0]


def sum_over_chips(x: Num[Array, "..."]) -> Num[Array, "..."]:
    """Sum `x` over the chips of a batch-norm tile by exchanges of whole arrays; the same bits on all of them."""
    flat = x.ravel()
    for along, axis, tiles in (("row", "x", "tile_x"), ("column", "y", "tile_y")):
        is_ring = lax.axis_size(tiles) == 1  # a tile that is not the whole torus has ends
        flat = sum_along(flat, axis, x.dtype, list_messages(along, lax.axis_size(axis), is_ring=is_ring))
    return flat.reshape(x.shape)


HALVES = Swing("swing", sum_by_halves)
WHOLE = Swing("swing_latency", sum_whole, sends_whole=True)
