"""Faults that a run lives through, or ends by: being asked to stop; replicas that no longer agree.

A scheduler that wants its machines back sends SIGTERM to one or all processes of a run. Each finishes the same call of
the compiled step, the run is saved, and all exit with a code of their own, which tells the scheduler to start the same
command again.

All devices hold the same parameters, statistics and optimizer state, to the last bit. A bit that flips in the memory of
one device would be averaged into all of them, and nobody would know. So their digests are compared now and then; the
device that differs is named, and the run goes back to its last checkpoint.
"""

import signal
import threading
from collections import Counter
from types import FrameType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from podscale import digest


class Stop:
    """Whether this run shall stop; a context manager that listens.

    Several processes agree through JAX's own runtime, which hears SIGTERM itself: whoever gets it, all stop after the
    same call. A single process listens alone.
    """

    def __init__(self) -> None:
        self._asked = False
        self._alone = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def after(self, call: int) -> bool:
        """Whether to stop after this call; every process must ask after each of its calls."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(call))
        return self._asked

    def __enter__(self) -> Self:
        if self._alone:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


class OddReplicaError(Exception):
    """A device holds other parameters than the rest."""


class Replicas:
    """Compares what the devices of a mesh hold; one message of a few bytes an array."""

    def __init__(self, mesh: Mesh, every: int) -> None:
        self._mesh, self._every, self._checked = mesh, every, 0
        self._digests = digest.of_replicas(mesh)

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
            raise OddReplicaError(f"at step {step:,} what {named} holds differs from the rest")
