"""This process as a member of an elastic run: it joins and leaves generations, as the launcher says.

A generation is a set of processes that train together, with a coordination service of its own. It ends when one of
them is lost, or at a step boundary when others want to join. A thread exchanges messages with the launcher: signs of
life from here, and from there which generation to join, that it is broken, or after which call to stop.

A process that is lost leaves others waiting for its messages. So once a generation is broken, the thread breaks the
connections between its processes, until this process has left it; what waits then fails.
"""

import faulthandler
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from podscale.config.json_types import JsonObject
from podscale.processes.connections import break_connections, has_connection_to
from podscale.processes.elastic.control import Connection, open_inherited
from podscale.processes.exit_codes import PEER_LOST
from podscale.processes.process_end import end_within

BEAT_S = 0.2  # between two signs of life
BREAK_S = 0.05  # between two attempts to break connections: new ones may be made meanwhile
DRAIN_S = 0.03  # before it, in which what is under way between survivors arrives: Gloo waits half a minute for the rest
# of a message whose connection has ended, but fails at once where no message is under way
STUCK_S = 2.0  # in a broken generation, after which the log says where
CLOSE_S, CLOSE_POLL_S = 0.5, 0.01  # in which a client that was dropped closes its connection
DATA_ADDRESS = "127.107.31.5"  # a loopback address that nothing but these connections uses
SAVE, REGROUP = "save", "regroup"  # why a generation stops


class GenerationEndedError(Exception):
    """The processes that trained together are no longer all there, or others want to join: join the next generation."""


class Assignment(NamedTuple):
    """A process's place in a generation."""

    generation: int
    rank: int
    size: int
    address: str


class Membership:
    """A member of an elastic run.

    Args:
        connection: to the launcher.
        on_loss: called in the thread, which then ends, when the launcher is gone.
    """

    def __init__(self, connection: Connection, on_loss: Callable[[], None]) -> None:
        self._connection, self._on_loss, self._changed = connection, on_loss, threading.Condition()
        self._assignment: Assignment | None = None
        self._is_broken = self._is_frozen = False
        self._stop: tuple[int, str] | None = None  # after which call, and why
        self._barriers = self._open_barriers = 0
        self._calls, self.step = -1, 0  # what has been done in this generation, and in all
        self._broken_at, self._is_logged = math.inf, False
        self._earlier_calls = 0  # of the generation, before this session
        threading.Thread(target=self._run, name="podscale-member", daemon=True).start()

    # --- generations ---

    def await_assignment(self, snapshot: int) -> Assignment:
        """Report that this process has left its generation, if it was in one, and wait for a place in another.

        Args:
            snapshot: the step of the state that this process holds; -1: none.
        """
        is_connected = self._is_connected()
        with self._changed:
            self._assignment, self._is_broken, self._is_frozen, self._stop = None, False, False, None
            self._barriers = self._open_barriers = 0
            self._calls, self._earlier_calls = -1, 0
            self._connection.send("ready", snapshot=snapshot, step=self.step, is_connected=is_connected)
            self._changed.wait_for(lambda: self._assignment is not None)
            assert self._assignment is not None
            return self._assignment

    def _is_connected(self) -> bool:
        """Return whether something in this process still holds a client of the service of the generation it has left.

        Such a client aborts this process when its service ends.
        """
        place, deadline = self._assignment, time.monotonic() + CLOSE_S
        while place and place.size > 1 and has_connection_to(place.address):
            if time.monotonic() > deadline:
                return True
            time.sleep(CLOSE_POLL_S)
        return False

    @property
    def is_broken(self) -> bool:
        """Whether a process of this generation is lost."""
        return self._is_broken

    def check(self) -> None:
        """Refuse to go on in a generation that is broken.

        Raises:
            GenerationEndedError: it is.
        """
        if self._is_broken:
            raise GenerationEndedError("another process of this generation is lost")

    def await_break(self, timeout_s: float) -> bool:
        """Return whether the generation is broken now or soon."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_broken, timeout_s)

    def report_trouble(self, reason: str) -> None:
        """Report that something failed between the processes of this generation, which ends it for all."""
        if self._assignment:
            self._connection.send("trouble", generation=self._assignment.generation, reason=reason)

    def report_sizes(self, sizes: list[int]) -> None:
        """Report which numbers of processes this run can be divided over."""
        self._connection.send("sizes", sizes=sizes)

    def report_parts(self, parts: Mapping[str, float]) -> None:
        """Report where the seconds until the first step went, from the end of the generation before."""
        assert self._assignment
        rounded = {part: round(seconds, 3) for part, seconds in parts.items()}
        self._connection.send("parts", generation=self._assignment.generation, parts=rounded)

    def wait_for_peers(self) -> None:
        """Wait until all processes of the generation have called this as often as this one.

        Raises:
            GenerationEndedError: one of them is lost.
        """
        with self._changed:
            assert self._assignment
            self._barriers += 1
            self._connection.send("barrier", generation=self._assignment.generation, number=self._barriers)
            self._changed.wait_for(lambda: self._open_barriers >= self._barriers or self._is_broken)
        self.check()

    def begin_session(self) -> None:
        """Count calls from 0 again: the run has rolled back, in all processes after the same call."""
        with self._changed:
            self._earlier_calls = self._calls + 1

    def find_stop(self, call: int) -> str:
        """Return why to stop after this call, SAVE or REGROUP, or ""; all processes get the same answer.

        The launcher asks all for the last call that they have passed, and lets them stop after the next one that none
        has. A process that has answered passes no further call before it knows which one that is.

        Args:
            call: counted from the start of the session.

        Raises:
            GenerationEndedError: a process of the generation is lost.
        """
        call += self._earlier_calls
        with self._changed:
            self._changed.wait_for(lambda: not self._is_frozen or self._stop is not None or self._is_broken)
            self.check()
            self._calls = max(call, self._calls)
            if call == 1:  # the first call is done
                self._send_beat()
            last, purpose = self._stop or (call + 1, "")
            return purpose if call >= last else ""

    # --- in the thread ---

    def _run(self) -> None:
        while True:
            readable, _, _ = select.select([self._connection], [], [], BREAK_S if self._is_broken else BEAT_S)
            self._log_if_stuck()
            with self._changed:
                if self._is_broken and time.monotonic() > self._broken_at + DRAIN_S:
                    break_connections(DATA_ADDRESS)
                self._send_beat()
            if not readable:
                continue
            messages = self._connection.receive()
            if messages is None:
                self._connection.close()
                self._on_loss()
                return
            with self._changed:
                for message in messages:
                    self._handle(message)
                self._changed.notify_all()

    def _log_if_stuck(self) -> None:
        """Write to the log where all threads are, once, if this process does not get out of a broken generation."""
        if not self._is_broken:
            self._is_logged = False
        elif time.monotonic() > self._broken_at + STUCK_S and not self._is_logged:
            self._is_logged = True
            print("podscale: this process does not leave its generation; its threads are at", file=sys.stderr)
            faulthandler.dump_traceback(file=sys.stderr)

    def _send_beat(self) -> None:
        generation = self._assignment.generation if self._assignment else -1
        self._connection.send("beat", generation=generation, calls=self._calls, step=self.step)

    def _handle(self, message: JsonObject) -> None:
        kind, generation = message.pop("kind"), message["generation"]
        if kind == "assign":
            self._assignment = Assignment(**message)
            return
        if self._assignment is None or generation != self._assignment.generation:
            return  # of a generation that this process has left
        if kind == "broken":
            self._is_broken, self._broken_at = True, time.monotonic()
        elif kind == "stop":
            self._is_frozen = True
            self._connection.send("passed", generation=generation, calls=self._calls)
        elif kind == "stop at":
            self._stop = int(message["call"]), str(message["purpose"])
        elif kind == "barrier":
            self._open_barriers = int(message["number"])


_membership: Membership | None = None  # of this process, which joins one run


def join_launcher() -> Membership | None:
    """Return this process's membership, made at the first call; None if it is no process of an elastic run."""
    global _membership  # noqa: PLW0603  # as there is one JAX runtime in a process
    if _membership is None and (connection := open_inherited()):
        _membership = Membership(connection, _exit_without_launcher)
    return _membership


def _exit_without_launcher() -> None:
    end_within(PEER_LOST)
    print("podscale: the launcher is gone", file=sys.stderr, flush=True)
    os._exit(PEER_LOST)


def get_membership() -> Membership | None:
    """Return this process's membership of an elastic run; None if it has none."""
    return _membership
