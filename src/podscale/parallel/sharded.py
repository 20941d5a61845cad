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

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podscale.parallel.collectives import gather_parts, scatter_sum
from podscale.parallel.placement import replicate
from podscale.parallel.summation import make_buckets, sum_tree
from podscale.pod import ALL_AXES, COLUMN, CORE, ROW

NAME = "sharded"
OWNERS = (CORE, *ROW, *COLUMN)  # the order in which `scatter_sum` leaves parts on the devices
Tree = Any


# --- inside the step -----------------------------------------------------------------------------------------------


def select_parts(tree: Tree) -> Tree:
    """Return this device's part of every array."""
    count, index = lax.axis_size(ALL_AXES), lax.axis_index(OWNERS)
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(_partition(x, count), index, keepdims=False), tree)


def scatter_gradients(tree: Tree, payload: str, bucket_bytes: int) -> Tree:
    """Return this device's part of the sum of every array over the pod, in buckets from the last leaf to the first."""
    leaves, structure = jax.tree.flatten(tree)
    count = lax.axis_size(ALL_AXES)
    parts: dict[int, jax.Array] = {}
    for bucket in make_buckets(leaves, bucket_bytes):
        rows = [_partition(leaves[i], count) for i in bucket]
        fused = scatter_sum(jnp.concatenate(rows, axis=1), payload)
        ends = list(accumulate(part.shape[1] for part in rows))
        parts |= dict(zip(bucket, jnp.split(fused, ends)[: len(bucket)], strict=True))
    return jax.tree.unflatten(structure, [parts[i] for i in range(len(leaves))])


def gather_parameters(parts: Tree, like: Tree, bucket_bytes: int) -> Tree:
    """Return the whole arrays, with the shapes of `like`, from the parts of all devices; parts travel unrounded."""
    leaves, structure = jax.tree.flatten(parts)
    shapes = [leaf.shape for leaf in jax.tree.leaves(like)]
    count = lax.axis_size(ALL_AXES)
    arrays: dict[int, jax.Array] = {}
    for bucket in make_buckets(leaves, bucket_bytes // count):
        fused = gather_parts(jnp.concatenate([leaves[i] for i in bucket]))  # [devices, part of the bucket]
        ends = list(accumulate(leaves[i].size for i in bucket))
        for i, rows in zip(bucket, jnp.split(fused, ends[:-1], axis=1), strict=True):
            arrays[i] = _join_parts(rows, shapes[i])
    return jax.tree.unflatten(structure, [arrays[i] for i in range(len(leaves))])


def compute_norms(parts: Tree) -> Tree:
    """Return the norm of every array from this device's parts, in float32 or wider."""
    leaves, structure = jax.tree.flatten(parts)
    if not leaves:  # an optimizer may have a rule for a group of parameters that the model has none of
        return parts
    squares = [jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))) for x in leaves]
    total = sum_tree(jnp.stack(squares), strategy="torus")
    return jax.tree.unflatten(structure, list(jnp.sqrt(total)))


def _partition(x: jax.Array, count: int) -> jax.Array:
    """[...] -> [devices, elements of a part]; the last parts are padded with zeros."""
    return jnp.pad(x.ravel(), (0, -x.size % count)).reshape(count, -1)


def _join_parts(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[devices, elements of a part] -> shape"""
    return parts.ravel()[: int(np.prod(shape))].reshape(shape)


# --- between steps -------------------------------------------------------------------------------------------------

MARKER_SHAPE = (1_000_003,)  # a shape that no optimizer makes by itself


def mark_partitioned(optimizer: optax.GradientTransformation, params: Tree) -> Tree:
    """Return a tree like the optimizer's state: True where an array is that of a parameter, and partitioned like it."""
    markers = jax.tree.map(lambda p: jax.ShapeDtypeStruct(MARKER_SHAPE, p.dtype), params)
    return jax.tree.map(lambda leaf: leaf.shape == MARKER_SHAPE, jax.eval_shape(optimizer.init, markers))


def make_specs(optimizer: optax.GradientTransformation, params: Tree) -> Tree:
    """Return a PartitionSpec for every array of the optimizer's state: partitioned over the pod, or replicated."""
    marks = mark_partitioned(optimizer, params)
    return jax.tree.map(lambda is_partitioned: P(OWNERS) if is_partitioned else P(), marks)


class Partitioner:
    """Converts an optimizer's state between its ordinary form, which checkpoints hold, and parts on a mesh."""

    def __init__(self, mesh: Mesh, optimizer: optax.GradientTransformation, params: Tree) -> None:
        self._mesh, self._devices = mesh, mesh.size
        self._replicated, self._partitioned = NamedSharding(mesh, P()), NamedSharding(mesh, P(OWNERS))
        self._ordinary = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
        self._is_partitioned = jax.tree.leaves(mark_partitioned(optimizer, params))

    def partition_host_arrays(self, state: Tree) -> Tree:
        """Return the parts of a state whose arrays are on the host."""
        return self._map(state, self._partition_host_array, lambda x, _: replicate(x, self._mesh))

    def _partition_host_array(self, x: Any, _: Any) -> jax.Array:
        flat = np.pad(np.ravel(x), (0, -np.size(x) % self._devices))
        return jax.make_array_from_callback(flat.shape, self._partitioned, lambda index: flat[index])

    def partition_device_arrays(self, state: Tree) -> Tree:
        """Return the parts of a state that all devices hold."""
        partition = jax.jit(lambda x: _partition(x, self._devices).ravel(), out_shardings=self._partitioned)
        return self._map(state, lambda x, _: partition(x), lambda x, _: x)

    def gather(self, state: Tree) -> Tree:
        """Return the ordinary form of the parts, replicated on all devices."""
        join = jax.jit(_join_parts, static_argnums=1, out_shardings=self._replicated)
        return self._map(state, lambda x, like: join(x, like.shape), lambda x, _: x)

    def make_abstract_parts(self, state: Tree) -> Tree:
        """Return the shapes, dtypes and shardings of the parts."""

        def describe(_: Any, like: Any) -> Any:
            size = -(-int(np.prod(like.shape)) // self._devices) * self._devices
            return jax.ShapeDtypeStruct((size,), like.dtype, sharding=self._partitioned)

        return self._map(state, describe, self._describe_replicated)

    def make_abstract_whole(self, state: Tree) -> Tree:
        """Return the shapes, dtypes and shardings of the ordinary form on the devices."""
        return self._map(state, self._describe_replicated, self._describe_replicated)

    def _describe_replicated(self, _: Any, like: Any) -> Any:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=self._replicated)

    def _map(self, state: Tree, partitioned: Callable[[Any, Any], Any], other: Callable[[Any, Any], Any]) -> Tree:
        """Apply one function to the arrays that are partitioned and another to those that are not.

        Both take an array of `state` and the abstract array of its ordinary form.
        """
        leaves, structure = jax.tree.flatten(state)
        pairs = zip(self._is_partitioned, leaves, self._ordinary, strict=True)
        return jax.tree.unflatten(
            structure, [(partitioned if is_partitioned else other)(x, like) for is_partitioned, x, like in pairs]
        )
