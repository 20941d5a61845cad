"""Sharded updates: every device updates its own part of each weight and keeps the optimizer state of that part.

An all-reduce is a reduce-scatter and an all-gather. Between the two, every device owns a finished part of the sum. Here
the device updates its own part of the weights by that part of the gradient, and the new weights are what is gathered:
the same bytes travel, the update is computed once instead of N times, and the optimizer state takes 1/N of the memory
(Xu et al. 2020, arXiv 2004.13336).

Each array is flattened and split by itself into as many even parts as there are devices, so a tree of parts has the
names of the tree of arrays, and an optimizer that identifies parameters by name works on either. What it must not do is
take a norm, because the norm of a part is not the norm of the array. `compute_norms` sums over the pod, in one message
for all arrays.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree, Shaped

from podscale.parallel.collectives import all_reduce, gather_parts, scatter_sum
from podscale.parallel.routes import PATHS, count_hops
from podscale.parallel.shared_matrices import SharedMap, map_parts
from podscale.parallel.summation import Links, Load, Transfer, make_buckets, sum_tree
from podscale.pod import ALL_AXES, COLUMN, CORE, ROW, SLICE

OWNERS = (CORE, *ROW, *COLUMN, SLICE)  # the order in which `scatter_sum` leaves parts on the devices
MARKER_SHAPE = (1_000_003,)  # a shape that no optimizer makes by itself
_PATHS = PATHS["sharded"]
_sum_whole = partial(all_reduce, _PATHS)  # of small arrays


# --- the strategy --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharded:
    """The strategy `sharded` of `plan.summation`; see `summation.Summation`."""

    name: str = "sharded"

    @property
    def norms(self) -> Callable[[PyTree], PyTree]:
        return compute_norms

    def sum_gradients(self, gradients: PyTree, transfer: Transfer) -> PyTree:
        return scatter_gradients(gradients, transfer)

    def sum_small(self, tree: PyTree) -> PyTree:
        return sum_tree(tree, _sum_whole)

    def select(self, params: PyTree) -> PyTree:
        return select_parts(params)

    def gather(self, own: PyTree, like: PyTree, transfer: Transfer) -> PyTree:
        return gather_parameters(own, like, transfer)

    def make_specs(self, optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
        """Return P(OWNERS) for the arrays that an optimizer has for each parameter, P() for its counters.

        Of a stack of such arrays, every array is partitioned by itself.
        """
        markers = jax.tree.map(lambda p: jax.ShapeDtypeStruct(MARKER_SHAPE, p.dtype), params)
        state = jax.eval_shape(optimizer.init, markers)
        return jax.tree.map(_make_spec, state)

    def share_matrices(self, axes: tuple[str, ...]) -> SharedMap:
        return partial(map_parts, axes=OWNERS)

    def count_state_bytes(self, whole: int, devices: int) -> int:
        return -(-whole // devices)

    def predict_s(self, links: Links, load: Load) -> float:
        """Return the torus's time; of the two halves of a sum, one carries gradients and one unrounded parameters."""
        small_s = sum(links.time_paths(_PATHS, size) for size in (load.moments, 2 * 4 * load.arrays) if size)
        size = (load.gradients + load.parameters) / 2
        return load.buckets * links.time_paths(_PATHS, size / load.buckets) + small_s

    def count_hops(self, rows: int, cols: int, slices: int = 1) -> int:
        return count_hops(_PATHS, rows, cols, slices)


def _make_spec(leaf: jax.ShapeDtypeStruct) -> P:
    """Return how an array lies on the devices, from its shape where parameters have the marker's."""
    return P(*[None] * (leaf.ndim - 1), OWNERS) if leaf.shape[-1:] == MARKER_SHAPE else P()


# --- inside the step -----------------------------------------------------------------------------------------------


def select_parts(tree: PyTree) -> PyTree:
    """Return this device's part of every array."""
    count, index = lax.axis_size(ALL_AXES), lax.axis_index(OWNERS)
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(partition(x, count), index, keepdims=False), tree)


def scatter_gradients(tree: PyTree, transfer: Transfer) -> PyTree:
    """Return this device's part of the sum of every array over the pod, in buckets from the last leaf to the first."""
    leaves, structure = jax.tree.flatten(tree)
    count = lax.axis_size(ALL_AXES)
    parts: dict[int, Array] = {}
    for bucket in make_buckets(leaves, transfer.bucket_bytes):
        rows = [partition(leaves[i], count) for i in bucket]
        fused = scatter_sum(jnp.concatenate(rows, axis=1), transfer.payload)
        ends = list(accumulate(part.shape[1] for part in rows))
        parts |= dict(zip(bucket, jnp.split(fused, ends)[: len(bucket)], strict=True))
    return jax.tree.unflatten(structure, [parts[i] for i in range(len(leaves))])


def gather_parameters(parts: PyTree, like: PyTree, transfer: Transfer) -> PyTree:
    """Return the whole arrays, with the shapes of `like`, from the parts of all devices; parts travel unrounded."""
    leaves, structure = jax.tree.flatten(parts)
    shapes = [leaf.shape for leaf in jax.tree.leaves(like)]
    count = lax.axis_size(ALL_AXES)
    arrays: dict[int, Array] = {}
    for bucket in make_buckets(leaves, transfer.bucket_bytes // count):
        fused = gather_parts(jnp.concatenate([leaves[i] for i in bucket]))  # [devices, part of the bucket]
        ends = list(accumulate(leaves[i].size for i in bucket))
        for i, rows in zip(bucket, jnp.split(fused, ends[:-1], axis=1), strict=True):
            arrays[i] = join_parts(rows, shapes[i])
    return jax.tree.unflatten(structure, [arrays[i] for i in range(len(leaves))])


def compute_norms(parts: PyTree) -> PyTree:
    """Return the norm of every array from this device's parts, in float32 or wider."""
    leaves, structure = jax.tree.flatten(parts)
    if not leaves:  # an optimizer may have a rule for a group of parameters that the model has none of
        return parts
    squares = [jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))) for x in leaves]
    total = sum_tree(jnp.stack(squares), _sum_whole)
    return jax.tree.unflatten(structure, list(jnp.sqrt(total)))


def partition(x: Shaped[Array, "..."], count: int) -> Shaped[Array, "devices part"]:
    """Return an array as even parts, the last of which are padded with zeros."""
    return jnp.pad(x.ravel(), (0, -x.size % count)).reshape(count, -1)


def join_parts(parts: Shaped[Array, "..."], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
    """Return the array of this shape that was partitioned."""
    return parts.ravel()[: math.prod(shape)].reshape(shape)
