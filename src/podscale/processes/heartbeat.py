"""Monitor the other processes of a run, and end all of them together when one fails.

A process that fails leaves the others waiting in their next collective. JAX's runtime notices a dead process after a
while and aborts all, but it does not know why, and it does not notice a process that refused its input. So every
process publishes through JAX's key-value store that it is alive, and the main process reads those signs of life. A
process that must end writes the reason and the exit code; all processes read them, print them, and exit with the same
code.
"""

import atexit
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import jax

from podscale.errors import UserError

PEER_LOST = 69  # what sysexits.h calls unavailable: another process is gone; the run resumes from its last checkpoint
INTERRUPTED = 130
ALIVE, TROUBLE, END = "podscale/alive", "podscale/trouble", "podscale/end"  # keys of the store
BEAT_S = 1.0  # between two signs of life, or a tenth of the heartbeat
LOST_SHARE = 0.7  # of the heartbeat: then we report which process is gone
RUNTIME_HEARTBEATS = (
    3  # JAX's own heartbeat in ours: it may abort after half of it, without a name, so we must be first
)
SUSPECT_BEATS = 4  # missed beats after which a process counts as gone if others already report trouble,
SUSPECT_SHARE = 1 / 15  # or this share of a long heartbeat, where signs of life may come late
INQUIRY_LIMITS = 2  # times that limit, in which the main process finds out which process is gone
LINGER_BEATS = 3  # for which the main process stays, so that all can read how it ended
BARRIER_TIMEOUT_S = 3600.0  # for which a process waits for the others to reach the same point
MAX_REASON_CHARS = 300  # of an error's text that the other processes get
LEFT = "left"
STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL|FAILED_PRECONDITION): ")
KeyMissingError = jax.errors.JaxRuntimeError  # a key is missing, or the process that keeps the keys is


class CollectiveFailedError(Exception):
    """Something that all processes do together failed in this one: another one may be gone."""


class GroupExit(NamedTuple):
    """Why all processes end, and with which exit code."""

    code: int
    reason: str


class PeerMonitor:
    """Publishes this process's signs of life and, in the main process, checks those of all others."""

    def __init__(self, store: Any, process: int, processes: int, heartbeat_s: float) -> None:
        self._store, self._process, self._heartbeat_s = store, process, heartbeat_s
        self._barriers = 0
        self.beat_s = min(BEAT_S, heartbeat_s / 10)
        self._suspect_s = max(SUSPECT_BEATS * self.beat_s, SUSPECT_SHARE * heartbeat_s)
        self._last_signs = {number: ("", time.monotonic()) for number in range(processes)}
        self._stopped, self._is_ending, self._silent_beats = threading.Event(), False, 0
        self._thread = threading.Thread(target=self._run, name="podscale-peers", daemon=True)
        self._thread.start()
        if process:
            threading.Thread(target=self._watch_main_process, name="podscale-main-peer", daemon=True).start()

    def read_exit(self) -> GroupExit | None:
        """Return why all processes must end; None while none has asked for it."""
        try:
            return GroupExit(*json.loads(self._store.key_value_try_get(END)))
        except KeyMissingError:
            return None

    def request_exit(self, code: int, reason: str) -> GroupExit:
        """Make all processes end, and return why: the first request counts."""
        with suppress(KeyMissingError):
            self._store.key_value_set(END, json.dumps((code, reason)))
        return self.read_exit() or GroupExit(code, reason)

    def report_trouble(self, reason: str) -> None:
        """Report that a collective failed: a process may be gone, and the main process checks with a shorter limit."""
        with suppress(KeyMissingError):
            self._store.key_value_set(f"{TROUBLE}/{self._process}", reason, allow_overwrite=True)

    def await_exit(self, reason: str) -> GroupExit | None:
        """Report trouble and return why all end; None if the main process finds nobody missing."""
        self._is_ending = True
        self.report_trouble(reason)
        for _ in range(round(INQUIRY_LIMITS * self._suspect_s / self.beat_s)):
            if group_exit := self.read_exit():
                return group_exit
            time.sleep(self.beat_s)
        return None

    def wait_for_peers(self) -> None:
        """Wait until all processes have called this, each for the same time in the same order."""
        self._barriers += 1
        self._store.wait_at_barrier(f"podscale/meeting/{self._barriers}", round(1000 * BARRIER_TIMEOUT_S))

    def linger(self) -> None:
        """Wait before an exit that is not a success, so that the others can still read the main process's store."""
        self._is_ending = True
        if self._process == 0:
            time.sleep(LINGER_BEATS * self.beat_s)

    def stop(self) -> None:
        """Stop publishing, and tell the main process to expect no more signs of life from here."""
        self._stopped.set()
        self._thread.join()
        with suppress(KeyMissingError):
            self._store.key_value_set(f"{ALIVE}/{self._process}", LEFT, allow_overwrite=True)

    # --- in the thread ---

    def _run(self) -> None:
        number = 0
        while True:
            with suppress(KeyMissingError):  # no answer: JAX's runtime ends this process if that lasts
                sign = f"{number} {socket.gethostname()}"
                self._store.key_value_set(f"{ALIVE}/{self._process}", sign, allow_overwrite=True)
                if self._process == 0:
                    self._check_peers()
                group_exit = self.read_exit()
                self._silent_beats = 0
                if group_exit and not self._is_ending:
                    self._exit(group_exit)
            number += 1
            if self._stopped.wait(self.beat_s):
                return

    def _watch_main_process(self) -> None:
        """End this process if the main one, which keeps the store, does not answer; asking it waits without a limit.

        Beats are counted, not seconds, so that a process that was itself stopped for a while does not blame another.
        """
        while not self._stopped.wait(self.beat_s):
            self._silent_beats += 1
            if self._silent_beats * self.beat_s > self._heartbeat_s and not self._is_ending:
                seconds = f"{self._heartbeat_s:.0f} s"
                reason = f"process 0, through which all find each other, has not answered for {seconds}"
                self._exit(GroupExit(PEER_LOST, reason))

    def _check_peers(self) -> None:
        now = time.monotonic()
        for key, sign in self._store.key_value_dir_get(ALIVE):
            number = int(key.rpartition("/")[2])
            if sign == LEFT or sign != self._last_signs[number][0]:
                self._last_signs[number] = (sign, now)
        limit, trouble = LOST_SHARE * self._heartbeat_s, ""
        for key, reason in self._store.key_value_dir_get(TROUBLE):
            limit, trouble = min(limit, self._suspect_s), f" (process {key.rpartition('/')[2]}: {reason})"
        gone = {number: sign for number, (sign, at) in self._last_signs.items() if now - at > limit}
        if gone:
            names = " and ".join(f"process {number} on {sign.partition(' ')[2]}" for number, sign in gone.items())
            verb = "is" if len(gone) == 1 else "are"
            self.request_exit(PEER_LOST, f"{names} {verb} gone: no sign of life for {limit:.0f} s{trouble}")

    def _exit(self, group_exit: GroupExit) -> None:
        self.linger()
        print_exit(group_exit)
        os._exit(group_exit.code)


def print_exit(group_exit: GroupExit) -> None:
    """Print the sentence that all processes end with."""
    hint = "" if group_exit.code in (2, INTERRUPTED) else "; the same command resumes from the last checkpoint"
    sys.stdout.flush()
    print(f"podscale: {group_exit.reason}{hint}", file=sys.stderr, flush=True)


_monitor: PeerMonitor | None = None


def start_monitor(store: Any, process: int, processes: int, heartbeat_s: float) -> None:
    """Start to monitor the processes that this one has just joined.

    Args:
        store: JAX's key-value store, which all processes share.
        process: this process's number.
        processes: how many there are.
        heartbeat_s: seconds without a sign of life after which a process counts as dead.
    """
    global _monitor  # noqa: PLW0603  # as there is one JAX runtime in a process
    _monitor = PeerMonitor(store, process, processes, heartbeat_s)
    atexit.register(stop_monitor)  # before JAX's own handler, so that nobody uses a store that is closed


def stop_monitor() -> None:
    """Leave the other processes, if there are any; they do not count this one as dead."""
    global _monitor  # noqa: PLW0603
    if _monitor:
        _monitor.stop()
        _monitor = None


def wait_for_peers() -> None:
    """Wait for the other processes, if there are any, for as long as they live.

    To be called before a collective that some processes may reach much later than others: between CPUs, a process that
    has waited half a minute for another one's message gives up.
    """
    if _monitor:
        _monitor.wait_for_peers()


@contextmanager
def fail_together(*shared: type[BaseException]) -> Iterator[None]:
    """End all processes if this one fails inside the block, even where it cannot get out of it.

    Args:
        *shared: exceptions that all processes raise alike; they end none of the others.
    """
    try:
        yield
    except shared:
        raise
    except BaseException as error:
        if _monitor:
            _report_failure(_monitor, error)
        raise


def _report_failure(monitor: PeerMonitor, error: BaseException) -> None:
    if _is_collective_failure(error):
        monitor.report_trouble(_get_first_line(error))
    elif isinstance(error, KeyboardInterrupt):
        monitor.request_exit(INTERRUPTED, f"interrupted{f'; {error}' if str(error) else ''}")
    else:
        monitor.request_exit(*_make_exit(error))


def _is_collective_failure(error: BaseException) -> bool:
    """Return whether a process that is gone may be the cause.

    What fails between processes, JAX raises as a JaxRuntimeError, but as a ValueError with the same text where a result
    is read with NumPy, as `multihost_utils` and the checkpoint library do.
    """
    if isinstance(error, ValueError):
        return STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError | CollectiveFailedError)


def _make_exit(error: BaseException) -> GroupExit:
    if isinstance(error, UserError):
        return GroupExit(2, str(error))
    return GroupExit(1, f"process {jax.process_index()} failed: {type(error).__name__}: {_get_first_line(error)}")


def _get_first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:MAX_REASON_CHARS]


def agree_on_exit(error: BaseException) -> GroupExit | None:
    """Return how all processes end after an error that is not the user's; None: by this error itself, or alone."""
    if not _monitor:
        return None
    group_exit = _monitor.await_exit(_get_first_line(error)) if _is_collective_failure(error) else None
    if group_exit is None:
        from_error = _make_exit(error)
        group_exit = _monitor.request_exit(*from_error)
        group_exit = None if group_exit == from_error else group_exit
    return group_exit


def announce_exit(code: int, reason: str) -> int:
    """Return the exit code that all processes end with; the last call of a process that does not succeed."""
    if not _monitor:
        return code
    code = _monitor.request_exit(code, reason).code
    _monitor.linger()
    return code
