"""Gradient summation: the contract of its strategies, and sums of whole trees in buckets.

A strategy takes the gradients of every device's own images to new parameters on all devices, and decides what lies
where in between. `Replicated` strategies sum whole gradients, and every device computes the same update; they differ in
how one flat array is summed. `sharded.Sharded` gives every device its own part of the update. `strategies.py` has all
of them by name; the step, the plan, checkpoints and the forecast know this contract alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Num, PyTree

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.parallel.routes import Path, count_hops
from podscale.parallel.shared_matrices import SharedMap, map_replicated
from podscale.pod import ALL_AXES

BUCKET_BYTES = 32 * 2**20
PAYLOADS = MappingProxyType({"float32": 4, "bfloat16": 2})  # bytes of a number


@dataclass(frozen=True)
class Transfer:
    """How gradients travel.

    Args:
        payload: the dtype that travels. "float32" sends the data as it is; "bfloat16" halves the bytes of floats, which
            the rings still add at full width (`xla` sums bfloat16 buffers, at whatever width the compiler adds them).
        bucket_bytes: leaves are fused into buffers of about this size, from the last leaf to the first, the order in
            which the backward pass finishes them; 0: one buffer per dtype.

    Raises:
        UserError: there is no such payload.
    """

    payload: str = "float32"
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.payload not in PAYLOADS:
            raise UserError(f"gradients cannot travel as {self.payload!r}: {suggest_names(self.payload, PAYLOADS)}")


@dataclass(frozen=True)
class Load:
    """What one update sends, for predictions.

    Args:
        gradients: bytes of all gradients, as they travel.
        parameters: bytes of all parameters, which travel unrounded where they do.
        buckets: into which the gradients are divided.
        moments: bytes of the batch-norm moments.
        arrays: whose norms an optimizer may need.
    """

    gradients: float
    parameters: float = 0.0
    buckets: int = 1
    moments: float = 0.0
    arrays: int = 0


@runtime_checkable
class Links(Protocol):
    """A time model of a pod's links: published (`forecast.network`) or measured (`forecast.probe`)."""

    def time_paths(self, paths: Sequence[Path], size: float) -> float:
        """Return the seconds to sum `size` bytes, an equal part along each path."""

    def time_swing(self, size: float) -> float:
        """Return the seconds to sum `size` bytes by Swing's exchanges of halves (`swing.py`)."""

    def time_messages(self, size: float) -> float:
        """Return the seconds to sum `size` bytes by Swing's exchanges of whole arrays."""

    def time_compiler_sum(self, size: float) -> float:
        """Return the seconds of the compiler's own sum of `size` bytes."""


@runtime_checkable
class Summation(Protocol):
    """A strategy of gradient summation. Methods up to `gather` run inside the step's `shard_map`.

    One update of parameters p by gradients g of this device's own images is

        sums = sum_gradients(g)                    own = select(p)
        updates, state = optimizer.update(sums, state, own)
        new p = gather(own + updates)

    `norms` returns the norms of whole arrays from what `sum_gradients` and `select` return. It is None where these are
    whole arrays; every optimizer then works with the strategy, and `auto` may choose it.
    """

    @property
    def name(self) -> str: ...
    @property
    def norms(self) -> Callable[[PyTree], PyTree] | None: ...

    def sum_gradients(self, gradients: PyTree, transfer: Transfer) -> PyTree:
        """Return the sum over the pod of every array, or this device's part of it."""

    def sum_small(self, tree: PyTree) -> PyTree:
        """Return the sum over the pod of a few small arrays, whole and unrounded on every device."""

    def select(self, params: PyTree) -> PyTree:
        """Return what this device updates of every parameter."""

    def gather(self, own: PyTree, like: PyTree, transfer: Transfer) -> PyTree:
        """Return whole parameters, with the shapes of `like`, from what the devices have updated."""

    def make_specs(self, optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
        """Return how the optimizer's state lies on the devices, a PartitionSpec for each array; params are abstract.

        An array whose spec is not P() is flattened and partitioned (`state_layout.py`), from the axis on that the spec
        names.
        """

    def share_matrices(self, axes: tuple[str, ...]) -> SharedMap | None:
        """Return how devices share a function of whole matrices, given what `sum_gradients` returns of each.

        Args:
            axes: of the mesh; devices along them are to share the work, where every device holds whole arrays.

        Returns:
            None if every device computes all of it.
        """

    def count_state_bytes(self, whole: int, devices: int) -> int:
        """Return the bytes of the optimizer's state on each device, of so many in all."""

    def predict_s(self, links: Links, load: Load) -> float:
        """Return the seconds that one update's messages take."""

    def count_hops(self, rows: int, cols: int, slices: int = 1) -> int:
        """Return the hops from chip to chip of one sum; 0: they are the compiler's to choose."""


Reduce = Callable[[Array, DTypeLike], Array]  # a flat array, and the dtype that travels -> its sum over all devices


@dataclass(frozen=True)
class Replicated:
    """Every device gets the whole sum of the gradients and updates all parameters.

    Args:
        name: what `plan.summation` says.
        reduce: sums a flat array over all devices; it must return the same bits on every device.
        paths: along which `reduce` sends the data, for predictions; empty: as the compiler's sum.
    """

    name: str
    reduce: Reduce
    paths: tuple[Path, ...] = ()

    @property
    def norms(self) -> None:
        return None

    def sum_gradients(self, gradients: PyTree, transfer: Transfer) -> PyTree:
        return sum_tree(gradients, self.reduce, transfer)

    def sum_small(self, tree: PyTree) -> PyTree:
        return sum_tree(tree, self.reduce)

    def select(self, params: PyTree) -> PyTree:
        return params

    def gather(self, own: PyTree, like: PyTree, transfer: Transfer) -> PyTree:
        return own

    def make_specs(self, optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
        return jax.tree.map(lambda _: P(), jax.eval_shape(optimizer.init, params))

    def share_matrices(self, axes: tuple[str, ...]) -> SharedMap | None:
        return partial(map_replicated, axes=axes) if axes else None

    def count_state_bytes(self, whole: int, devices: int) -> int:
        return whole

    def predict_s(self, links: Links, load: Load) -> float:
        moments_s = self.time_sum(links, load.moments) if load.moments else 0.0
        return load.buckets * self.time_sum(links, load.gradients / load.buckets) + moments_s

    def time_sum(self, links: Links, size: float) -> float:
        """Return the seconds to sum one flat array of `size` bytes."""
        return links.time_paths(self.paths, size) if self.paths else links.time_compiler_sum(size)

    def count_hops(self, rows: int, cols: int, slices: int = 1) -> int:
        return count_hops(self.paths, rows, cols, slices)


# --- trees -------------------------------------------------------------------------------------------------------


def sum_tree(tree: PyTree, reduce: Reduce, transfer: Transfer = Transfer()) -> PyTree:
    """Sum every array of `tree` over all devices of the pod; every device gets the same bits.

    Args:
        tree: arrays; floats narrower than float32 are added in float32.
        reduce: sums one flat array.
        transfer: how the arrays travel.

    Returns:
        a tree of the same structure, shapes and dtypes.
    """
    if lax.axis_size(ALL_AXES) == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    for bucket in make_buckets(leaves, transfer.bucket_bytes):
        fused = jnp.concatenate([jnp.ravel(leaves[i]) for i in bucket])
        ends = list(accumulate(leaves[i].size for i in bucket))
        parts = jnp.split(_sum_array(fused, reduce, transfer.payload), ends[:-1])
        for i, part in zip(bucket, parts, strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def make_buckets(leaves: Sequence[jax.Array], bucket_bytes: int) -> list[list[int]]:
    """Return which leaves travel together, as lists of indices.

    Buckets run from the last leaf to the first and hold one dtype and at most `bucket_bytes` each. A leaf that is
    larger than a bucket travels alone.
    """
    limit = bucket_bytes or math.inf
    full, filling = [], dict[jnp.dtype, tuple[list[int], int]]()  # `filling`: by dtype, the open bucket and its bytes
    for i in reversed(range(len(leaves))):
        leaf = leaves[i]
        bucket, size = filling.get(leaf.dtype, ([], 0))
        if bucket and size + leaf.nbytes > limit:
            full.append(bucket)
            bucket, size = [], 0
        filling[leaf.dtype] = ([*bucket, i], size + leaf.nbytes)
    return full + [bucket for bucket, _ in filling.values()]


def _sum_array(x: Num[Array, " n"], reduce: Reduce, payload: str) -> Num[Array, " n"]:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, x.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return reduce(wide, jnp.bfloat16 if payload == "bfloat16" else wide.dtype).astype(x.dtype)
