"""Monitor the other processes of a run, and end all of them together when one fails.

A process that fails leaves the others waiting in their next collective. JAX's runtime notices a dead process after a
while and aborts all, but it does not know why, and it does not notice a process that refused its input. So every
process publishes through JAX's key-value store that it is alive, and the main process reads those signs of life. A
process that must end writes the reason and the exit code; all processes read them, print them, and exit with the same
code.
"""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import jax

from podscale.errors import UserError, get_first_line
from podscale.processes.elastic.membership import GenerationEndedError, get_membership
from podscale.processes.exit_codes import (
    FAILED,
    INTERRUPTED,
    PEER_LOST,
    RESUMABLE_CODES,
    RESUME_HINT,
    USER_ERROR,
)
from podscale.processes.key_value_store import KeyValueStore, StoreError
from podscale.processes.monitor import Monitor
from podscale.processes.process_end import LIMIT_S, end_within, flush_or_discard

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
PASSING = re.compile(  # failures of the network, after which the same may succeed; the rest may be a defect
    r"^(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): |Gloo [\w-]+ failed|[Cc]onnection (reset|closed|timed out)"
    r"|network error"
)


class CollectiveFailedError(Exception):
    """Something that all processes do together failed in this one: another one may be gone."""


class GroupExit(NamedTuple):
    """Why all processes end, and with which exit code."""

    code: int
    reason: str


class Heartbeat:
    """Publishes this process's signs of life and, in the main process, checks those of all others.

    Args:
        store: what the processes share.
        process: this process's number.
        processes: how many there are.
        heartbeat_s: seconds without a sign of life after which a process counts as dead.
    """

    def __init__(self, store: KeyValueStore, process: int, processes: int, heartbeat_s: float) -> None:
        self._store, self._process, self._heartbeat_s = store, process, heartbeat_s
        self._barriers = 0
        self.beat_s = min(BEAT_S, heartbeat_s / 10)
        self._suspect_s = max(SUSPECT_BEATS * self.beat_s, SUSPECT_SHARE * heartbeat_s)
        watched = range(processes if process == 0 else 0)  # the main process alone watches
        self._last_signs = {number: ("", time.monotonic()) for number in watched}
        self._beats = self._silent_beats = 0
        self._next_beat = time.monotonic()
        self._group_exit: GroupExit | None = None
        self._is_ending = False

    # --- called by the process itself ---

    def read_exit(self) -> GroupExit | None:
        """Return why all processes must end; None while none has asked for it."""
        text = self._store.get(END)
        return GroupExit(*json.loads(text)) if text is not None else None

    def request_exit(self, code: int, reason: str) -> GroupExit:
        """Make all processes end, and return why: the first request counts."""
        with suppress(StoreError):
            self._store.set_new(END, json.dumps((code, reason)))
        return self.read_exit() or GroupExit(code, reason)

    def report_trouble(self, reason: str) -> None:
        """Report that a collective failed: a process may be gone, and the main process checks with a shorter limit."""
        with suppress(StoreError):
            self._store.set(f"{TROUBLE}/{self._process}", reason)

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
        self._store.wait_at_barrier(f"podscale/meeting/{self._barriers}", BARRIER_TIMEOUT_S)

    def linger(self) -> None:
        """Wait before an exit that is not a success, so that the others can still read the main process's store."""
        self._is_ending = True
        if self._process == 0:
            time.sleep(LINGER_BEATS * self.beat_s)

    def leave(self) -> None:
        """Announce that no more signs of life follow; the monitor must have stopped polling."""
        with suppress(StoreError):
            self._store.set(f"{ALIVE}/{self._process}", LEFT)

    # --- called by the monitor ---

    def poll(self, now: float) -> bool:
        """End this process if all must end, or if the main one, which keeps the store, does not answer.

        Beats are counted, not seconds, so that a process that was itself stopped for a while does not blame another.
        """
        if self._is_ending:
            return self._is_next_beat(now)
        if self._group_exit:
            self._exit(self._group_exit)
        if not self._is_next_beat(now):
            return False
        self._silent_beats += 1
        if self._process and self._silent_beats * self.beat_s > self._heartbeat_s:
            seconds = f"{self._heartbeat_s:.0f} s"
            reason = f"process 0, through which all find each other, has not answered for {seconds}"
            self._exit(GroupExit(PEER_LOST, reason))
        return True

    def exchange(self, store: KeyValueStore) -> None:
        """Publish a sign of life and read whether all must end; the main process checks the others' signs."""
        store.set(f"{ALIVE}/{self._process}", f"{self._beats} {socket.gethostname()}")
        self._beats += 1
        if self._process == 0:
            self._check_peers()
        self._group_exit = self.read_exit()
        self._silent_beats = 0

    def _is_next_beat(self, now: float) -> bool:
        if now < self._next_beat:
            return False
        self._next_beat = now + self.beat_s
        return True

    def _check_peers(self) -> None:
        now = time.monotonic()
        for number, sign in self._store.list_by_process(ALIVE).items():
            if number not in self._last_signs:
                continue  # a stranger's
            if sign == LEFT or sign != self._last_signs[number][0]:
                self._last_signs[number] = (sign, now)
        limit, trouble = LOST_SHARE * self._heartbeat_s, ""
        for number, reason in self._store.list_by_process(TROUBLE).items():
            limit, trouble = min(limit, self._suspect_s), f" (process {number}: {reason})"
        gone = {number: sign for number, (sign, at) in self._last_signs.items() if now - at > limit}
        if gone:
            names = " and ".join(f"process {number} on {sign.partition(' ')[2]}" for number, sign in gone.items())
            verb = "is" if len(gone) == 1 else "are"
            self.request_exit(PEER_LOST, f"{names} {verb} gone: no sign of life for {limit:.0f} s{trouble}")

    def _exit(self, group_exit: GroupExit) -> None:
        end_within(group_exit.code, LIMIT_S + LINGER_BEATS * self.beat_s)
        self.linger()
        print_exit(group_exit)
        os._exit(group_exit.code)


def print_exit(group_exit: GroupExit) -> None:
    """Print the sentence that all processes end with."""
    hint = f"; {RESUME_HINT}" if group_exit.code in RESUMABLE_CODES else ""
    flush_or_discard(sys.stdout)
    print(f"podscale: {group_exit.reason}{hint}", file=sys.stderr, flush=True)


_heartbeat: Heartbeat | None = None  # of the group that this process has joined


def start(monitor: Monitor, store: KeyValueStore, process: int, processes: int, heartbeat_s: float) -> None:
    """Start the heartbeat of a process that has just joined the others.

    Args:
        monitor: polls it.
        store: what the processes share.
        process: this process's number.
        processes: how many there are.
        heartbeat_s: seconds without a sign of life after which a process counts as dead.
    """
    global _heartbeat  # noqa: PLW0603  # as there is one JAX runtime in a process
    _heartbeat = Heartbeat(store, process, processes, heartbeat_s)
    monitor.add(_heartbeat)


def leave() -> None:
    """Leave the other processes, if there are any; they do not count this one as dead. Its monitor must have ended."""
    global _heartbeat  # noqa: PLW0603
    if _heartbeat:
        _heartbeat.leave()
        _heartbeat = None


def wait_for_peers() -> None:
    """Wait for the other processes, if there are any, for as long as they live.

    To be called before a collective that some processes may reach much later than others: between CPUs, a process that
    has waited half a minute for another one's message gives up.
    """
    if _heartbeat:
        _heartbeat.wait_for_peers()
    elif member := get_membership():
        member.wait_for_peers()


def check_generation() -> None:
    """Refuse to wait on in a generation of an elastic run that is broken; elsewhere, a lost peer ends this process.

    Raises:
        GenerationEndedError: it is.
    """
    if member := get_membership():
        member.check()


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
        if _heartbeat:
            _report_failure(_heartbeat, error)
        raise


def _report_failure(heartbeat: Heartbeat, error: BaseException) -> None:
    if is_collective_failure(error):
        heartbeat.report_trouble(get_first_line(error, MAX_REASON_CHARS))
    elif isinstance(error, KeyboardInterrupt):
        heartbeat.request_exit(INTERRUPTED, f"interrupted{f'; {error}' if str(error) else ''}")
    else:
        heartbeat.request_exit(*_make_exit(error))


def is_collective_failure(error: BaseException) -> bool:
    """Return whether a process that is gone may be the cause.

    What fails between processes, JAX raises as a JaxRuntimeError, but as a ValueError with the same text where a result
    is read with NumPy, as `multihost_utils` and the checkpoint library do.
    """
    if isinstance(error, ValueError):
        return STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError | CollectiveFailedError | GenerationEndedError)


def _make_exit(error: BaseException) -> GroupExit:
    if isinstance(error, UserError):
        return GroupExit(USER_ERROR, str(error))
    if is_collective_failure(error) and (isinstance(error, CollectiveFailedError) or PASSING.search(str(error))):
        reason = get_first_line(error, MAX_REASON_CHARS)
        return GroupExit(PEER_LOST, f"process {jax.process_index()} could not reach the others: {reason}")
    return GroupExit(
        FAILED,
        f"process {jax.process_index()} failed: {type(error).__name__}: {get_first_line(error, MAX_REASON_CHARS)}",
    )


def agree_on_exit(error: BaseException) -> GroupExit | None:
    """Return how all processes end after an error that is not the user's; None: by this error itself, or alone."""
    if not _heartbeat:
        return None
    group_exit = (
        _heartbeat.await_exit(get_first_line(error, MAX_REASON_CHARS)) if is_collective_failure(error) else None
    )
    if group_exit is None:
        from_error = _make_exit(error)
        group_exit = _heartbeat.request_exit(*from_error)
        group_exit = None if group_exit == from_error and group_exit.code == FAILED else group_exit
    return group_exit


def announce_exit(code: int, reason: str) -> int:
    """Return the exit code that all processes end with; the last call of a process that does not succeed."""
    if not _heartbeat:
        return code
    code = _heartbeat.request_exit(code, reason).code
    _heartbeat.linger()
    return code
