"""Preemption: stop a run when a scheduler asks for its machines back.

A scheduler that wants its machines back sends SIGTERM to one or all processes of a run. Each process finishes the same
call of the compiled step, the run is saved, and all exit with an exit code of their own, which tells the scheduler to
start the same command again.
"""

import signal
import threading
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Whether this run is asked to stop; a context manager that handles SIGTERM.

    Several processes agree through JAX's own runtime, which handles SIGTERM itself: whichever process gets the signal,
    all stop after the same call. A single process installs a handler of its own.
    """

    def __init__(self) -> None:
        self._requested = False
        self._handles_signal = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def is_requested(self, call: int) -> bool:
        """Whether to stop after this call; every process must ask after each of its calls."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(call))
        return self._requested

    def __enter__(self) -> Self:
        if self._handles_signal:
            self._previous_handler = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles_signal:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
