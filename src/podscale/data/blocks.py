"""Blocks: the parts of a global array that this process has devices for, and their transfer to these devices."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from podscale.data.staging import Staging


def _count_parts(sharding: NamedSharding, axis: int) -> int:
    """Return the number of parts into which a sharding partitions an axis."""
    names = sharding.spec[axis] if axis < len(sharding.spec) else None
    names = (names,) if isinstance(names, str) else names or ()
    return int(np.prod([sharding.mesh.shape[name] for name in names], dtype=int))


def make_eval_blocks(sharding: NamedSharding, images_per_device: int) -> "LocalBlocks":
    """Return the blocks of an evaluation batch, which `sharding` partitions along axis 0."""
    return LocalBlocks(sharding, (_count_parts(sharding, axis=0) * images_per_device,), axis=0)


class LocalBlocks:
    """The blocks of a global array, partitioned along one axis, that this process has devices for.

    Attributes:
        starts: first index along the axis of each block, ascending.
        extent: length of a block along the axis.
        block: shape of a block.
        devices: each device of this process, with the number of its block.
    """

    def __init__(self, sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> None:
        self.sharding, self.shape = sharding, shape
        self.extent = shape[axis] // _count_parts(sharding, axis)
        self.block = (*shape[:axis], self.extent, *shape[axis + 1 :])
        if sharding.shard_shape(shape) != self.block:
            raise ValueError(f"{sharding.spec} must partition axis {axis} alone")
        indices = sharding.addressable_devices_indices_map(shape)
        start_of = {device: index[axis].start or 0 for device, index in indices.items() if index is not None}
        self.starts = sorted(set(start_of.values()))
        self.devices = [(device, self.starts.index(start)) for device, start in start_of.items()]

    def assemble(self, blocks: NDArray, staging: Staging | None = None) -> jax.Array:
        """Return the global array with blocks[k] at starts[k].

        The caller must not write to `blocks` afterwards; with `staging`, their memory is reused after the transfer.
        """
        shape = self.shape + blocks.shape[1 + len(self.shape) :]
        parts = [jax.device_put(blocks[k], device) for device, k in self.devices]
        array = jax.make_array_from_single_device_arrays(shape, self.sharding, parts)
        if staging is not None:
            staging.reuse_after(blocks, array)
        return array
