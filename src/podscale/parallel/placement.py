"""Place host arrays on the devices of a mesh, and gather them back."""

import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree
from numpy.typing import NDArray

from podscale.errors import UserError


def fill(shape: int | tuple[int, ...], value: int | float, dtype: DTypeLike) -> jax.Array:
    """Return an array of one value. Unlike `jnp.full`, it is made by the host, without a program for its shape.

    >>> fill(3, 0.5, "float32").tolist()
    [0.5, 0.5, 0.5]
    """
    return jax.device_put(np.full(shape, value, dtype))


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Place host arrays that every process holds on all devices of the mesh.

    Checksums show whether the processes hold the same arrays. `jax.device_put` would send the arrays of every process
    to every other one, only to compare them.

    Raises:
        UserError: the arrays of a process differ from those of process 0.
    """
    replicated, arrays = NamedSharding(mesh, PartitionSpec()), jax.tree.map(np.asarray, tree)
    if jax.process_count() == 1:
        return jax.device_put(arrays, replicated)
    checksums = np.array([zlib.crc32(array.tobytes()) for array in jax.tree.leaves(arrays)], np.uint32)
    gathered = multihost_utils.process_allgather(checksums)  # [processes, arrays]
    different = np.flatnonzero((gathered != gathered[0]).any(axis=1)).tolist()
    if different:
        raise UserError(
            f"process {different[0]} computed other numbers than the first; check that both have the same software"
        )
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, replicated, lambda index: a[index]), arrays)


def gather_to_host(array: jax.Array) -> NDArray:
    """Return a whole array, of which this process may hold only a part; every process must call this."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
