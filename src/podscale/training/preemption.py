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
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils


class StopRequest:
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
