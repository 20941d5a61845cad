"""How an optimizer's state lies on the devices, and its way there and back.

Checkpoints hold the ordinary form: whole arrays. On the devices every array is replicated, or flattened, padded and
partitioned over the mesh axes that its PartitionSpec names; the strategy of gradient summation decides which. Leading
axes for which the spec has None stay as they are: those of a stack whose arrays are partitioned one by one.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from podscale.parallel.placement import replicate
from podscale.parallel.summation import Summation

Abstract = jax.ShapeDtypeStruct


class StateLayout:
    """Converts an optimizer's state between its ordinary form and what lies on the devices of a mesh.

    Args:
        summation: says how each array lies.
        mesh: the devices.
        optimizer: whose state it is.
        params: the parameters, as arrays or abstract.

    Attributes:
        specs: a PartitionSpec for each array of the state.
    """

    def __init__(
        self, summation: Summation, mesh: Mesh, optimizer: optax.GradientTransformation, params: PyTree
    ) -> None:
        self.specs = summation.make_specs(optimizer, params)
        self._whole = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
        self._mesh, self._replicated = mesh, NamedSharding(mesh, P())
        specs = jax.tree.leaves(self.specs, is_leaf=lambda leaf: isinstance(leaf, P))
        self._shardings = [NamedSharding(mesh, spec) for spec in specs]

    def place(self, state: PyTree) -> PyTree:
        """Return a state whose arrays are on the host, laid out on the devices."""
        leaves, structure = jax.tree.flatten(state)
        is_replicated = [sharding == self._replicated for sharding in self._shardings]
        replicated = iter(replicate([x for x, whole in zip(leaves, is_replicated, strict=True) if whole], self._mesh))
        placed = [
            next(replicated) if whole else _place_parts(x, sharding, self._count_parts(sharding))
            for x, whole, sharding in zip(leaves, is_replicated, self._shardings, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    def gather(self, state: PyTree) -> PyTree:
        """Return the ordinary form of a state on the devices, replicated on all of them."""
        join = jax.jit(_join_rows, static_argnums=(1, 2), out_shardings=self._replicated)
        return self._map_partitioned(state, lambda x, whole, sharding: join(x, whole.shape, _count_kept_axes(sharding)))

    def scatter(self, state: PyTree) -> PyTree:
        """Return an ordinary state that all devices hold, laid out as `place` does."""

        def scatter(x: Array, _: Abstract, sharding: NamedSharding) -> Array:
            count, kept = self._count_parts(sharding), _count_kept_axes(sharding)
            return jax.jit(lambda x: _flatten_rows(jnp.asarray(x), kept, count), out_shardings=sharding)(x)

        return self._map_partitioned(state, scatter)

    def describe(self, state: PyTree) -> PyTree:
        """Return shapes, dtypes and shardings of a state on the devices."""

        def describe(_: Array | Abstract, whole: Abstract, sharding: NamedSharding) -> Abstract:
            count, kept = self._count_parts(sharding), _count_kept_axes(sharding)
            size = -(-math.prod(whole.shape[kept:]) // count) * count
            return Abstract((*whole.shape[:kept], size), whole.dtype, sharding=sharding)

        return self._map_partitioned(self.describe_whole(state), describe)

    def describe_whole(self, state: PyTree) -> PyTree:
        """Return shapes, dtypes and shardings of the ordinary form, replicated on the devices."""
        described = [Abstract(whole.shape, whole.dtype, sharding=self._replicated) for whole in self._whole]
        return jax.tree.unflatten(jax.tree.structure(state), described)

    def _count_parts(self, sharding: NamedSharding) -> int:
        """Return into how many parts a flat array is divided."""
        axes = sharding.spec[-1]
        return math.prod(self._mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))

    def _map_partitioned(
        self, state: PyTree, convert: Callable[[Array, Abstract, NamedSharding], Array | Abstract]
    ) -> PyTree:
        """Convert the arrays that are partitioned; the function takes array, ordinary form and sharding."""
        leaves, structure = jax.tree.flatten(state)
        rows = zip(leaves, self._whole, self._shardings, strict=True)
        converted = [x if sharding == self._replicated else convert(x, whole, sharding) for x, whole, sharding in rows]
        return jax.tree.unflatten(structure, converted)


def _count_kept_axes(sharding: NamedSharding) -> int:
    """Return how many leading axes of an array stay as they are."""
    return len(sharding.spec) - 1


def _place_parts(x: np.ndarray, sharding: NamedSharding, count: int) -> Array:
    flat = _flatten_rows(x, _count_kept_axes(sharding), count)
    return jax.make_array_from_callback(flat.shape, sharding, lambda index: flat[index])


def _flatten_rows(x: Any, kept: int, count: int) -> Any:
    """Return an array with all axes but the first `kept` flattened, and padded so that `count` divides them."""
    rows = x.reshape(*x.shape[:kept], -1)
    pad = jnp.pad if isinstance(x, Array) else np.pad
    return pad(rows, [(0, 0)] * kept + [(0, -rows.shape[-1] % count)])


def _join_rows(rows: Array, shape: tuple[int, ...], kept: int) -> Array:
    """Return the array of this shape that was flattened."""
    return rows[..., : math.prod(shape[kept:])].reshape(shape)
