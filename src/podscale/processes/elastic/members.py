"""The processes of an elastic run, as its launcher sees them, and the generations that they train in."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from podscale.processes import job_secret
from podscale.processes.elastic.control import FD, Connection
from podscale.processes.launch import die_with_parent

SPAWN: Mapping[str, Any] = MappingProxyType({"start_new_session": True, "preexec_fn": die_with_parent})


@dataclass(eq=False)
class Member:
    """A process of an elastic run.

    Attributes:
        slot: its number among the processes that the launcher keeps up; a replacement takes over that of a lost one.
        process: the process.
        connection: to it.
        is_ready: whether it waits for a generation to join.
        snapshot: the step of the state that it holds; -1: none.
        step: the updates that it has seen done.
        last_ready: when it last became ready.
        last_sign: time of its last sign of life; None: none yet, while it starts.
        stopped_at: when it was first seen to be stopped by a signal; None: it is not.
        is_closed: whether it has closed its connection, and is about to end.
        has_trained: whether it was in a generation that did a step.
    """

    slot: int
    process: "subprocess.Popen[bytes]"
    connection: Connection
    is_ready: bool = False
    snapshot: int = -1
    step: int = 0
    last_ready: float = 0.0
    last_sign: float | None = None
    stopped_at: float | None = None
    is_closed: bool = False
    has_trained: bool = False

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process; only Linux says so."""
        with suppress(OSError):
            state = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
            return state.rpartition(")")[2].split()[0] == "T"
        return False

    def kill(self) -> None:
        """Kill the process; a stopped one reacts to no other signal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)


@dataclass
class Generation:
    """Processes that train together.

    Attributes:
        number: counted from 0.
        members: by rank.
        calls: that each rank has passed.
        barriers: that each rank has reached.
        stop: why it is asked to stop after a call; "": it is not.
        passed: the last call that each rank had passed when it was asked.
        deadline: by which all members must have left it; None: it continues.
        is_training: whether its first call is done.
        is_broken: whether a member is lost.
        is_held: whether a process that has left it is still connected to its service, which must not end then.
        lost: ranks that are.
    """

    number: int
    members: list[Member]
    calls: list[int] = field(init=False)
    barriers: list[int] = field(init=False)
    stop: str = ""
    passed: dict[int, int] = field(default_factory=dict)
    deadline: float | None = None
    is_training: bool = False
    is_broken: bool = False
    is_held: bool = False
    lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.calls, self.barriers = [-1] * len(self.members), [0] * len(self.members)

    def send(self, kind: str, **values: object) -> None:
        """Send a message to all members."""
        for member in self.members:
            member.connection.send(kind, generation=self.number, **values)

    def find_newly_lost(self) -> list[int]:
        """Return the ranks whose processes have ended since the last call."""
        ended = {rank for rank, member in enumerate(self.members) if member.process.poll() is not None}
        newly, self.lost = sorted(ended - self.lost), ended
        return newly

    def reach_barrier(self, rank: int, number: int) -> None:
        """Note that a rank waits at a barrier, and let all pass once all have come."""
        self.barriers[rank] = number
        if min(self.barriers) == number:
            self.send("barrier", number=number)

    def request_stop(self, purpose: str) -> None:
        """Ask all members for the last call that they have passed."""
        self.stop = purpose
        self.send("stop")

    def note_passed(self, rank: int, calls: int) -> bool:
        """Note a rank's answer; return whether that was the last one, and all know when to stop."""
        self.passed[rank] = calls
        if len(self.passed) < len(self.members):
            return False
        self.send("stop at", call=max(self.passed.values()) + 1, purpose=self.stop)
        return True


class Starter:
    """Starts the processes of an elastic run.

    Args:
        command: the arguments of `podscale`.
        gpus: CUDA_VISIBLE_DEVICES of each slot; None: unchanged.
        folder: for their output.
        spawn: options of `subprocess.Popen`.
    """

    def __init__(
        self, command: list[str], gpus: list[str | None], folder: Path, spawn: Mapping[str, Any] = SPAWN
    ) -> None:
        self.spawn = spawn
        self._command = [sys.executable, "-P", "-m", "podscale", *command]
        self._environment = os.environ | {job_secret.SECRET: secrets.token_hex(32)}
        self._gpus, self._folder = gpus, folder

    def start(self, slot: int) -> Member:
        """Start a process; what it prints as the main one is seen, and its errors go to a file."""
        here, there = socket.socketpair()
        environment = self._environment | {FD: str(there.fileno())}
        if (gpus := self._gpus[slot]) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        file: IO[bytes]
        with there, self.get_log_path(slot).open("ab") as file:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": file, "pass_fds": [there.fileno()]}
            process = subprocess.Popen(self._command, env=environment, **streams, **self.spawn)
        return Member(slot, process, Connection(here))

    def get_log_path(self, slot: int) -> Path:
        """Return the file with what the processes of a slot have written to stderr."""
        return self._folder / f"process-{slot}.log"


class Record:
    """Writes what happens to an elastic run, one line of JSON per event, with the seconds since 1970."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, event: str, **values: object) -> None:
        """Write one line."""
        print(json.dumps({"event": event, "time": round(time.time(), 3), **values}), file=self._file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def choose_size(ready: int, sizes: list[int], least: int, most: int) -> int | None:
    """Return how many of the processes that are ready train together; None: too few.

    Args:
        ready: how many there are.
        sizes: numbers of processes that the batch divides over.
        least: fewer do not train.
        most: more do not.

    >>> choose_size(3, [1, 2, 4], 1, 4), choose_size(3, [4], 1, 4)
    (2, None)
    """
    return max((size for size in sizes if least <= size <= min(ready, most)), default=None)


def choose_members(ready: Iterable[Member], size: int) -> list[Member]:
    """Return so many of the processes that are ready, by rank: those with the newest state first, then by slot.

    So a process that has replaced a lost one becomes the main one again if its slot is the first.
    """
    return sorted(ready, key=lambda member: (-member.snapshot, member.slot))[:size]
