"""The strategies of gradient summation by name, and how to add one.

Most strategies are an all-reduce along rings (`routes.py` lists their paths); `swing.py` has two of another kind. `xla`
is one `psum`, for which the compiler chooses the algorithm; on TPU that already is the two-dimensional one. On several
slices it is one reduce-scatter in each, a sum between them, and an all-gather in each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from podscale.config.fields import add_choice
from podscale.config.registry import Registry
from podscale.errors import UserError
from podscale.parallel.collectives import all_reduce
from podscale.parallel.routes import PATHS
from podscale.parallel.sharded import Sharded
from podscale.parallel.summation import Links, Replicated, Summation
from podscale.parallel.swing import HALVES, WHOLE
from podscale.pod import ALL_AXES, SLICE

_IN_SLICE = tuple(axis for axis in ALL_AXES if axis != SLICE)


def _reduce_by_compiler(x: Num[Array, " n"], wire: DTypeLike) -> Num[Array, " n"]:
    """Return the compiler's sum: of several slices within each, then of the parts of each device between them."""
    if lax.axis_size(SLICE) == 1:
        return lax.psum(x.astype(wire), ALL_AXES).astype(x.dtype)
    whole = jnp.pad(x.astype(wire), (0, -x.size % lax.axis_size(_IN_SLICE)))
    part = lax.psum(lax.psum_scatter(whole, _IN_SLICE, tiled=True), SLICE)
    return lax.all_gather(part, _IN_SLICE, tiled=True)[: x.size].astype(x.dtype)


def _make_ring_strategy(name: str) -> Replicated:
    return Replicated(name, partial(all_reduce, PATHS[name]), PATHS[name])


_RINGS = tuple(_make_ring_strategy(name) for name in ("ring", "ring2", "torus", "torus4"))
_BUILT_IN: tuple[Summation, ...] = (Replicated("xla", _reduce_by_compiler), *_RINGS, HALVES, WHOLE, Sharded())
STRATEGIES = Registry("gradient summation", {strategy.name: strategy for strategy in _BUILT_IN})


def register_summation(strategy: Summation) -> None:
    """Make a strategy available to `plan.summation` under its name.

    Raises:
        UserError: there is already one of this name.
    """
    STRATEGIES.add(strategy.name, strategy)
    add_choice("plan.summation", strategy.name)


# --- strategies by size ----------------------------------------------------------------------------------------------

Parts = tuple[tuple[float, Replicated], ...]  # in ascending order, the bytes of a sum below which a strategy is used


@dataclass(frozen=True)
class BySize(Replicated):
    """Strategies by the bytes of a sum, as they travel: of gradients in buckets, and of a few small arrays.

    Args:
        parts: strategies, each with the bytes from which on the next one is used; the last has no limit (infinity).
    """

    parts: Parts = ()

    def time_sum(self, links: Links, size: float) -> float:
        return _pick_by_size(self.parts, size).time_sum(links, size)

    def count_hops(self, rows: int, cols: int, slices: int = 1) -> int:
        """Return the hops of the largest sums."""
        return self.parts[-1][1].count_hops(rows, cols, slices)


def _pick_by_size(parts: Parts, size: float) -> Replicated:
    return next(strategy for limit, strategy in parts if size < limit)


def _reduce_by_size(parts: Parts, x: Num[Array, " n"], wire: DTypeLike) -> Num[Array, " n"]:
    return _pick_by_size(parts, x.size * jnp.dtype(wire).itemsize).reduce(x, wire)


def find_summation(text: str) -> Summation:
    """Return the strategy of this name, or strategies by size, as `format_by_size` writes them.

    Raises:
        UserError: there is no such strategy, or what is listed by size cannot be.

    >>> find_summation("swing_latency:4096,torus").count_hops(4, 4)
    12
    """
    if ":" not in text:
        return STRATEGIES[text]
    parts: list[tuple[float, Replicated]] = []
    for part in text.split(","):
        name, _, limit = part.partition(":")
        strategy = STRATEGIES[name]
        if not isinstance(strategy, Replicated) or not (limit or "0").isdecimal():
            raise UserError(
                f"gradient summation {text!r}: {part!r} is not NAME:BYTES of a strategy for whole gradients"
            )
        parts.append((int(limit) if limit else math.inf, strategy))
    limits = [limit for limit, _ in parts]
    if limits != sorted(set(limits)) or limits[-1] != math.inf:
        raise UserError(f"gradient summation {text!r}: bytes must rise, and the last strategy has none")
    return BySize(text, partial(_reduce_by_size, tuple(parts)), parts=tuple(parts))


def format_by_size(parts: Sequence[tuple[float, str]]) -> str:
    """Return names of strategies by size as `plan.summation` has them.

    >>> format_by_size([(4096, "swing_latency"), (math.inf, "torus")]), format_by_size([(math.inf, "xla")])
    ('swing_latency:4096,torus', 'xla')
    """
    return ",".join(name if math.isinf(limit) else f"{name}:{limit:.0f}" for limit, name in parts)


def describe_summation(text: str) -> str:
    """Return a summation for people.

    >>> describe_summation("swing_latency:4096,torus"), describe_summation("xla")
    ('swing_latency below 4,096 B, torus', 'xla')
    """
    parts = [part.partition(":") for part in text.split(",")]
    return ", ".join(f"{name} below {int(limit):,} B" if limit else name for name, _, limit in parts)


def list_replicated() -> list[str]:
    """Return the names of the strategies that every optimizer works with, because arrays stay whole."""
    return [name for name, strategy in STRATEGIES.items() if strategy.norms is None]
