"""The strategies of gradient summation by name, and how to add one.

Every strategy but `xla` is an all-reduce along rings (`routes.py` lists their paths). `xla` is one `psum`, for which
the compiler chooses the algorithm; on TPU that already is the two-dimensional one. On several slices it is one
reduce-scatter in each, a sum between them, and an all-gather in each.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from podscale.config.fields import add_choice
from podscale.config.registry import Registry
from podscale.parallel.collectives import all_reduce
from podscale.parallel.routes import PATHS
from podscale.parallel.sharded import Sharded
from podscale.parallel.summation import Replicated, Summation
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
_BUILT_IN: tuple[Summation, ...] = (Replicated("xla", _reduce_by_compiler), *_RINGS, Sharded())
STRATEGIES = Registry("gradient summation", {strategy.name: strategy for strategy in _BUILT_IN})


def register_summation(strategy: Summation) -> None:
    """Make a strategy available to `plan.summation` under its name.

    Raises:
        UserError: there is already one of this name.
    """
    STRATEGIES.add(strategy.name, strategy)
    add_choice("plan.summation", strategy.name)


def list_replicated() -> list[str]:
    """Return the names of the strategies that every optimizer works with, because arrays stay whole."""
    return [name for name, strategy in STRATEGIES.items() if strategy.norms is None]
