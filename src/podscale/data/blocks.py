"""Blocks: the parts of a global array that this process has devices for, and the way there."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from podscale.data.staging import Staging


def _cuts(sharding: NamedSharding, axis: int) -> int:
    """Into how many pieces a sharding cuts an axis."""
    names = sharding.spec[axis] if axis < len(sharding.spec) else None
    names = (names,) if isinstance(names, str) else names or ()
    return int(np.prod([sharding.mesh.shape[name] for name in names], dtype=int))


def eval_blocks(sharding: NamedSharding, images_per_device: int) -> "Blocks":
    return Blocks(sharding, (_cuts(sharding, axis=0) * images_per_device,), axis=0)


class Blocks:
    """The blocks of a global array, cut along one axis, that this process has devices for."""

    def __init__(self, sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> None:
        self.sharding, self.shape = sharding, shape
        if sharding.shard_shape(shape) != (*shape[:axis], shape[axis] // _cuts(sharding, axis), *shape[axis + 1 :]):
            raise ValueError(f"{sharding.spec} must cut axis {axis} alone")
        self.extent = shape[axis] // _cuts(sharding, axis)
        places = sharding.addressable_devices_indices_map(shape)
        first = {device: place[axis].start or 0 for device, place in places.items() if place is not None}
        self.starts = sorted(set(first.values()))
        self.devices = [(device, self.starts.index(start)) for device, start in first.items()]
        self.block = (*shape[:axis], self.extent, *shape[axis + 1 :])

    def assemble(self, blocks: NDArray[Any], staging: Staging | None = None) -> jax.Array:
        """The global array made of blocks[k] at starts[k]. The blocks are given away, or go back to their staging."""
        shape = self.shape + blocks.shape[1 + len(self.shape) :]
        pieces = [jax.device_put(blocks[k], device) for device, k in self.devices]
        array = jax.make_array_from_single_device_arrays(shape, self.sharding, pieces)
        if staging is not None:
            staging.sent(blocks, array)
        return array
