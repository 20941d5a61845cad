"""Stop a run on request: SIGTERM from a scheduler that wants its machines back, Ctrl-C, or a terminal that is gone.

Once an update is done, a request lets the current call finish and the run save its state. Before that there is nothing
to save, and the run ends at once. A second Ctrl-C always ends it at once. SIGHUP counts as SIGTERM, unless it is
ignored, as under nohup.

Python runs its signal handlers only between two of its own instructions, and a compilation or a large batch may take
minutes. So a thread reads every signal as it arrives and ends the process if the main thread does not. In a notebook,
which has to survive, there is no such thread.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

from podscale.errors import PreemptedError, SavedInterruptError, describe_start
from podscale.processes.elastic.membership import SAVE, get_membership
from podscale.processes.exit_codes import INTERRUPTED, PREEMPTED, RESUME_HINT
from podscale.processes.process_end import end_within
from podscale.report.notebook import is_notebook

GRACE_S = 3.0  # in which the main thread may end by itself before the first update
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """Whether this run is asked to stop; a context manager that handles SIGTERM, SIGHUP and Ctrl-C.

    Several processes agree through JAX's own runtime, which handles SIGTERM itself: whichever process gets the signal,
    all stop after the same call. Each of them turns the other two signals into SIGTERM.

    Args:
        step: updates done before this session.
    """

    def __init__(self, step: int = 0) -> None:
        self._step, self._signal, self._has_progress = step, 0, False
        self._raised: BaseException | None = None  # by the handler
        self._is_alone, self._member = jax.process_count() == 1, get_membership()
        self._handled: tuple[int, ...] = ()  # none in an elastic run, whose launcher handles signals
        if not self._member and threading.current_thread() is threading.main_thread():
            self._handled = tuple(filter(self._is_ours, SIGNALS))
        if self._member:
            self._member.begin_session()
        self._watcher = _Watcher(self) if self._handled and not is_notebook() else None

    def _is_ours(self, number: int) -> bool:
        if number == signal.SIGTERM:
            return self._is_alone
        return number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN

    def is_requested(self, call: int) -> bool:
        """Whether to stop after this call; every process must ask after each of its calls."""
        self._has_progress = True
        if self._member:
            return self._member.find_stop(call) == SAVE
        if not self._is_alone:
            return bool(multihost_utils.reached_preemption_sync_point(call))
        return bool(self._signal)

    def make_error(self, step: int, saved_step: int) -> BaseException:
        """Return what ends a run that was asked to stop.

        Args:
            step: the last update of the run.
            saved_step: the update that the newest checkpoint was saved after; on a full disk, an earlier one.
        """
        if self._signal == signal.SIGINT:
            return SavedInterruptError(step, saved_step)
        return PreemptedError(step, saved_step)

    def describe_start(self) -> str:
        """Return what the same command will do, if this session has done nothing yet."""
        return f"no step was completed in this session; the same command {describe_start(self._step)}"

    @property
    def has_progress(self) -> bool:
        """Whether this session has done an update."""
        return self._has_progress

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in self._handled}
        if self._watcher:
            self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._watcher:
            self._watcher.stop()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        # Native code that a handler interrupted in one of its callbacks raises another exception in place of ours.
        if self._raised and isinstance(error, Exception) and error is not self._raised:
            raise self._raised from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._signal = self._signal == signal.SIGINT == number, number
        if self._has_progress and not again:
            if not self._is_alone:
                os.kill(os.getpid(), signal.SIGTERM)  # through JAX's runtime, all processes learn of it
            return
        if number == signal.SIGINT:
            self._raised = KeyboardInterrupt(self.describe_start() if not self._has_progress else "")
        else:
            self._raised = PreemptedError(self._step, nothing_new=True)
        raise self._raised


class _Watcher:
    """A thread that gets every signal when it arrives, whatever the main thread is doing."""

    def __init__(self, request: StopRequest) -> None:
        self._request, self._stopped = request, threading.Event()

    def start(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._writer, self._previous = writer, signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="podscale-signals", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        signal.set_wakeup_fd(self._previous)
        os.close(self._writer)  # the thread reads the end of the pipe, and ends
        self._thread.join()
        os.close(self._reader)

    def _watch(self) -> None:
        received: list[int] = []
        while data := os.read(self._reader, 1):
            if data[0] not in SIGNALS:
                continue
            received.append(data[0])
            if received.count(signal.SIGINT) > 1 and self._request.has_progress:
                self._end(f"ended at once; {RESUME_HINT}", INTERRUPTED)
            elif not self._request.has_progress:
                threading.Thread(target=self._end_unless_stopped, args=(data[0],), daemon=True).start()
            elif data[0] == signal.SIGINT:
                _print("stopping: this step will be saved; press Ctrl-C again to end at once")

    def _end_unless_stopped(self, number: int) -> None:
        if not self._stopped.wait(GRACE_S):
            code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
            self._end(f"stopped; {self._request.describe_start()}", code)

    def _end(self, text: str, code: int) -> None:
        end_within(code)
        _print(text)
        os._exit(code)


def _print(text: str) -> None:
    with suppress(OSError, ValueError):
        print(f"podscale: {text}", file=sys.stderr, flush=True)
