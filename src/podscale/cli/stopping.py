"""Handle SIGTERM, SIGHUP and Ctrl-C from a command's first moment on; a training replaces these handlers by its own.

Each of them becomes an exception in the main thread. Python raises it only between two of its own instructions, and a
compilation or a device that does not answer may take minutes: then a thread ends the process. During an import it is
put off: numpy and jaxlib lose, replace or crash on an exception that is raised while their native modules are imported.
"""

import os
import select
import signal
import sys
import threading
from types import FrameType

from podscale.errors import TerminatedError
from podscale.processes.exit_codes import INTERRUPTED, PREEMPTED
from podscale.processes.process_end import end_within

GRACE_S = 3.0  # in which the main thread must have raised the exception
RETRY_S = 0.01  # after which a signal is sent again that came during an import
_raised = threading.Event()  # as there is one main thread
_postponed = threading.Event()  # a signal came during an import


def handle_stop_signals() -> None:
    """Turn SIGTERM and SIGHUP into `TerminatedError`, and end the process if its main thread cannot raise it.

    Ignored signals stay ignored, as under nohup. A process of an elastic run leaves them to its launcher. A launcher
    has no threads, since it forks.
    """
    from podscale.processes.elastic import control

    if os.environ.get(control.FD):
        return
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _raise)
    if sys.argv[1:2] != ["launch"]:
        _start_watching()


def _raise(number: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        _postponed.set()
        threading.Timer(RETRY_S, signal.pthread_kill, (threading.main_thread().ident, number)).start()
        return
    _raised.set()
    raise KeyboardInterrupt if number == signal.SIGINT else TerminatedError


def raise_postponed() -> None:
    """Raise the exception for a signal that came during an import, in case there was one."""
    if _postponed.is_set():
        _raised.wait(GRACE_S)  # until the signal comes again


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _start_watching() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="podscale-stop", daemon=True).start()


def _watch(reader: int) -> None:
    """End the process if it gets a signal that its main thread does not handle in time."""
    while data := os.read(reader, 1):
        if signal.getsignal(data[0]) is _raise and not _raised.wait(GRACE_S):
            is_interrupt = data[0] == signal.SIGINT
            code = INTERRUPTED if is_interrupt else PREEMPTED
            end_within(code)
            print(f"podscale: {'interrupted' if is_interrupt else 'stopped on request'}", file=sys.stderr, flush=True)
            os._exit(code)
        while select.select([reader], [], [], 0)[0]:
            os.read(reader, 1)  # the same signal, as often as it was sent again during an import
        _raised.clear()
