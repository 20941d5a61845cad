"""Place host arrays on the devices of a mesh, and gather them back."""

import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from podscale.errors import UserError


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Arrays that every process holds, the same on all devices of the mesh.

    Whether they are the same is seen by their checksums. `jax.device_put` would send every process's arrays to every
    other one, only to compare them.
    """
    everywhere, arrays = NamedSharding(mesh, PartitionSpec()), jax.tree.map(np.asarray, tree)
    if jax.process_count() == 1:
        return jax.device_put(arrays, everywhere)
    sums = np.array([zlib.crc32(array.tobytes()) for array in jax.tree.leaves(arrays)], np.uint32)
    found = multihost_utils.process_allgather(sums)  # [processes, arrays]
    odd = np.flatnonzero((found != found[0]).any(axis=1)).tolist()
    if odd:
        raise UserError(f"process {odd[0]} has come to other numbers than the first; do both have the same software?")
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, everywhere, lambda index: a[index]), arrays)


def gather_to_host(array: Any) -> NDArray:
    """All of an array, of which this process may hold but a part; every process must ask."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
