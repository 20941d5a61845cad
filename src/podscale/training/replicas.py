"""Compare the replicas: every device holds the same parameters, statistics and optimizer state, to the last bit.

A bit that flips in the memory of one device would be averaged into all of them, and nobody would know. So their
checksums are compared now and then; the device that differs is named, and the run returns to its last checkpoint."""

from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from podscale.parallel import checksum


class ReplicaMismatchError(Exception):
    """A device holds other parameters than the rest."""


class ReplicaCheck:
    """Compares what the devices of a mesh hold; one message of a few bytes an array."""

    def __init__(self, mesh: Mesh, every: int) -> None:
        self._mesh, self._every, self._checked = mesh, every, 0
        self._digests = checksum.make_replica_checksum(mesh)

    def check(self, step: int, state: Any, *, now: bool = False) -> None:
        """Raises `OddReplicaError` where a device holds something else than most do; all processes find the same.

        Does nothing while a comparison is not due; `now` makes it due, so that no checkpoint holds an odd one's state.
        """
        due = self._every and (now or step - self._checked >= self._every)
        if not due or self._mesh.size == 1:
            return
        self._checked = step
        copies = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.is_fully_replicated]  # not parts of one
        found = np.asarray(self._digests(copies).addressable_data(0))  # [devices, arrays]
        rows = [tuple(row) for row in found.tolist()]
        common, count = Counter(rows).most_common(1)[0]
        odd = [device for device, row in zip(self._mesh.devices.flat, rows, strict=True) if row != common]
        if odd:
            named = ", ".join(map(str, odd if 2 * count > len(rows) else self._mesh.devices.flat))
            raise ReplicaMismatchError(f"at step {step:,} what {named} holds differs from the rest")
