"""Compare the replicas: every device holds the same parameters, statistics and optimizer state, to the last bit.

A bit that flips in the memory of one device would be averaged into all of them, unnoticed. So the checksums of the
replicas are compared every `plan.check_steps` steps and before each checkpoint. The error names the device that
differs, and the run rolls back to its last checkpoint.
"""

from collections import Counter

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from podscale.parallel import checksum


class ReplicaMismatchError(Exception):
    """A device holds other parameters than the others."""


class ReplicaCheck:
    """Compares the replicas of a state on a mesh; costs one message of a few bytes per array."""

    def __init__(self, mesh: Mesh, every: int) -> None:
        """Compare every `every` steps; 0 is never."""
        self._mesh, self._every, self._last_step = mesh, every, 0
        self._compute_checksums = checksum.make_replica_checksum(mesh)

    def check(self, step: int, state: PyTree, *, now: bool = False) -> None:
        """Compare the replicas if a comparison is due; `now` makes it due, so that only sound states are saved.

        Raises:
            ReplicaMismatchError: a device holds other values than most devices do. All processes raise the same.
        """
        due = self._every and (now or step - self._last_step >= self._every)
        if not due or self._mesh.size == 1:
            return
        self._last_step = step
        replicated = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.is_fully_replicated]  # not partitioned
        checksums = np.asarray(self._compute_checksums(replicated).addressable_data(0))  # [devices, arrays]
        rows = [tuple(row) for row in checksums.tolist()]
        common, count = Counter(rows).most_common(1)[0]
        odd = [device for device, row in zip(self._mesh.devices.flat, rows, strict=True) if row != common]
        if odd:
            has_majority = 2 * count > len(rows)
            names = ", ".join(map(str, odd if has_majority else self._mesh.devices.flat))
            raise ReplicaMismatchError(f"at step {step:,} the state of {names} differs from the other devices")
