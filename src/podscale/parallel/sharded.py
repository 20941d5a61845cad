"""Sharded updates: every device updates its own part of each weight, and keeps the optimizer's state of that part.

An all-reduce is a reduce-scatter and an all-gather. Between the two, every device owns a finished part of the sum. Here
it updates its own part of the weights by that, and what is gathered is the new weights: the same bytes travel, the
update is computed once and not N times, and its state takes 1/N of the memory (Xu et al. 2020, arXiv 2004.13336).

Each array is cut by itself, flat, into as many even parts as there are devices, so a tree of parts has the names of the
tree of arrays, and an optimizer that knows parameters by name works on either. What it may not do is take a norm: a
part's is not the array's. `norms` sums over the pod, in one message for all.
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
OWNERS = (CORE, *ROW, *COLUMN)  # in the order of the parts that `scattered` leaves with the devices
Tree = Any


# --- inside the step -----------------------------------------------------------------------------------------------


def own(tree: Tree) -> Tree:
    """This device's part of every array."""
    count, place = lax.axis_size(ALL_AXES), lax.axis_index(OWNERS)
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(_cut(x, count), place, keepdims=False), tree)


def scatter(tree: Tree, payload: str, bucket_bytes: int) -> Tree:
    """This device's part of the sum of every array over the pod, in buckets from the last leaf to the first."""
    leaves, structure = jax.tree.flatten(tree)
    count = lax.axis_size(ALL_AXES)
    parts: dict[int, jax.Array] = {}
    for bucket in make_buckets(leaves, bucket_bytes):
        cut = [_cut(leaves[i], count) for i in bucket]
        fused = scatter_sum(jnp.concatenate(cut, axis=1), payload)
        ends = list(accumulate(part.shape[1] for part in cut))
        parts |= dict(zip(bucket, jnp.split(fused, ends)[: len(bucket)], strict=True))
    return jax.tree.unflatten(structure, [parts[i] for i in range(len(leaves))])


def gather(parts: Tree, like: Tree, bucket_bytes: int) -> Tree:
    """The whole arrays, shaped as in `like`, from all devices' parts; they travel as they are."""
    shards, structure = jax.tree.flatten(parts)
    shapes = [leaf.shape for leaf in jax.tree.leaves(like)]
    count = lax.axis_size(ALL_AXES)
    wholes: dict[int, jax.Array] = {}
    for bucket in make_buckets(shards, bucket_bytes // count):
        fused = gather_parts(jnp.concatenate([shards[i] for i in bucket]))  # [devices, part of the bucket]
        ends = list(accumulate(shards[i].size for i in bucket))
        for i, cut in zip(bucket, jnp.split(fused, ends[:-1], axis=1), strict=True):
            wholes[i] = _whole(cut, shapes[i])
    return jax.tree.unflatten(structure, [wholes[i] for i in range(len(shards))])


def norms(parts: Tree) -> Tree:
    """The norm of every array that these are parts of."""
    leaves, structure = jax.tree.flatten(parts)
    if not leaves:  # an optimizer may have a rule for a kind of parameters that the model has none of
        return parts
    squares = [jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))) for x in leaves]
    total = sum_tree(jnp.stack(squares), strategy="torus")
    return jax.tree.unflatten(structure, list(jnp.sqrt(total)))


def _cut(x: jax.Array, count: int) -> jax.Array:
    """[...] -> [devices, elements of a part]; the last parts are filled up with zeros."""
    return jnp.pad(x.ravel(), (0, -x.size % count)).reshape(count, -1)


def _whole(cut: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return cut.ravel()[: int(np.prod(shape))].reshape(shape)


# --- between steps -------------------------------------------------------------------------------------------------

MARK = (1_000_003,)  # a shape that no optimizer makes by itself


def cut_leaves(optimizer: optax.GradientTransformation, params: Tree) -> Tree:
    """A tree like the optimizer's state: True where an array belongs to a parameter, and is cut like it."""
    marked = jax.tree.map(lambda p: jax.ShapeDtypeStruct(MARK, p.dtype), params)
    return jax.tree.map(lambda leaf: leaf.shape == MARK, jax.eval_shape(optimizer.init, marked))


def specs(optimizer: optax.GradientTransformation, params: Tree) -> Tree:
    """Where the optimizer's state lies: cut over the pod, or the same everywhere."""
    return jax.tree.map(lambda cut: P(OWNERS) if cut else P(), cut_leaves(optimizer, params))


class Cutter:
    """Brings an optimizer's state from its ordinary form, which checkpoints hold, to parts on a mesh, and back."""

    def __init__(self, mesh: Mesh, optimizer: optax.GradientTransformation, params: Tree) -> None:
        self._mesh, self._devices = mesh, mesh.size
        self._everywhere, self._spread = NamedSharding(mesh, P()), NamedSharding(mesh, P(OWNERS))
        self._ordinary = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
        self._is_cut = jax.tree.leaves(cut_leaves(optimizer, params))

    def parts(self, state: Tree) -> Tree:
        """From arrays on the host."""
        return self._each(state, self._part, lambda x, _: replicate(x, self._mesh))

    def _part(self, x: Any, _: Any) -> jax.Array:
        flat = np.pad(np.ravel(x), (0, -np.size(x) % self._devices))
        return jax.make_array_from_callback(flat.shape, self._spread, lambda index: flat[index])

    def from_whole(self, state: Tree) -> Tree:
        """From arrays that all devices hold."""
        cut = jax.jit(lambda x: _cut(x, self._devices).ravel(), out_shardings=self._spread)
        return self._each(state, lambda x, _: cut(x), lambda x, _: x)

    def whole(self, state: Tree) -> Tree:
        """The ordinary form of the parts, the same on all devices."""
        whole = jax.jit(_whole, static_argnums=1, out_shardings=self._everywhere)
        return self._each(state, lambda x, like: whole(x, like.shape), lambda x, _: x)

    def like_parts(self, state: Tree) -> Tree:
        """What `parts` would give, as shapes."""

        def cut(_: Any, like: Any) -> Any:
            size = -(-int(np.prod(like.shape)) // self._devices) * self._devices
            return jax.ShapeDtypeStruct((size,), like.dtype, sharding=self._spread)

        return self._each(state, cut, self._shaped)

    def like_whole(self, state: Tree) -> Tree:
        """What `whole` would give, as shapes."""
        return self._each(state, self._shaped, self._shaped)

    def _shaped(self, _: Any, like: Any) -> Any:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=self._everywhere)

    def _each(self, state: Tree, cut: Callable[[Any, Any], Any], other: Callable[[Any, Any], Any]) -> Tree:
        leaves, structure = jax.tree.flatten(state)
        todo = zip(self._is_cut, leaves, self._ordinary, strict=True)
        return jax.tree.unflatten(structure, [(cut if is_cut else other)(x, like) for is_cut, x, like in todo])
