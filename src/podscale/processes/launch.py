"""Launch a command as several processes on this machine, which find each other over loopback.

The main process prints; the output of each other process goes to a file, whose end is printed if that process is why
the command failed. Signals are forwarded, whenever they arrive. If a process dies, the others are ended too, and the
message names it. With restarts, the same command is then started again, and resumes from its last checkpoint.
"""

import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

from podscale.errors import UserError
from podscale.processes import job_secret, schedulers
from podscale.processes.exit_codes import FINAL_CODES, INTERRUPTED, PEER_LOST, PREEMPTED, RESUME_HINT, USER_ERROR
from podscale.storage.paths import require_local

GRACE_S = 6.0  # in which the others may report what they know, once one has failed
KILLED_GRACE_S = 1.0  # the same, if it was killed: they know no more than the launcher
SUCCESS_GRACE_S = 60.0  # in which the others end, once one has succeeded: they leave together
POLL_S = 0.05
SHOWN_LINES = 20
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


class ProcessExit(NamedTuple):
    """How a process ended."""

    process: int
    status: int  # as in subprocess: an exit code, or the negative number of a signal

    @property
    def code(self) -> int:
        """The launcher's exit code for it."""
        return self.status if self.status >= 0 else PEER_LOST

    def describe(self) -> str:
        """Return it as a clause of a message.

        >>> ProcessExit(2, -9).describe(), ProcessExit(0, 70).describe()
        ('process 2 was killed by SIGKILL', 'process 0 ended with exit code 70')
        """
        if self.status >= 0:
            return f"process {self.process} ended with exit code {self.status}"
        return f"process {self.process} was killed by {signal.Signals(-self.status).name}"


def launch_processes(command: list[str], processes: int, restarts: int = 0, logs: str | None = None) -> int:
    """Run `podscale COMMAND` as several processes.

    Args:
        command: the arguments of `podscale`.
        processes: how many to start.
        restarts: how often the same command is started again after a fault. It is not started again after success,
            after a mistake of the user's, or if this process was itself asked to stop.
        logs: folder for the output of all processes but the main one; None: a temporary one.

    Returns:
        The exit code of the first process that failed; 0 if none did.

    Raises:
        UserError: the number of processes or of restarts is not valid, or there are too few GPUs.
    """
    if processes < 1:
        raise UserError(f"-n takes a number of processes from 1 up, not {processes}")
    if restarts < 0:
        raise UserError(f"--restarts takes a number from 0 up, not {restarts}")
    gpus = assign_gpus(command, processes)
    with open_log_folder(logs) as folder, StopSignals() as signals:
        for left in range(restarts, -1, -1):
            group = ProcessGroup(command, processes, gpus, folder, signals)
            ending = group.wait()
            if ending.code == 0:
                return 0
            if signals.received and ending.code in (PREEMPTED, INTERRUPTED):
                return signals.code  # the main process has said so
            if signals.explain(ending):
                advice = f"; {RESUME_HINT}"
                report(f"stopped as requested{advice if command[0] == 'train' else ''}")
                return signals.code
            again = left > 0 and ending.code not in FINAL_CODES and not signals.received
            report(f"{ending.describe()}{f'; starting again ({restarts - left + 1} of {restarts})' if again else ''}")
            if not again:
                break
        if ending.code != PREEMPTED and not group.is_reported_by_main(ending):
            group.print_log_tail(ending.process)
    return ending.code


class StopSignals:
    """The signals that asked this process to stop, inside a `with` block.

    They are only noted when they arrive, which may be before the processes that they are forwarded to have started, or
    between two attempts. The attempt that starts next forwards all of them.
    """

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def code(self) -> int:
        """The exit code of a command that was stopped."""
        return INTERRUPTED if signal.SIGINT in self.received else PREEMPTED

    def explain(self, ending: ProcessExit) -> bool:
        """Return whether a process ended like this because it was asked to stop before it could handle the signal."""
        was_starting = ending.status == 1 and signal.SIGINT in self.received  # Python's own start, which has no handler
        return bool(self.received) and (ending.status < 0 or was_starting)

    @property
    def is_urgent(self) -> bool:
        """Whether Ctrl-C was pressed a second time: nothing is waited for any more."""
        return self.received.count(signal.SIGINT) > 1

    def __enter__(self) -> "StopSignals":
        handled = [number for number in FORWARDED_SIGNALS if not _is_ignored_hangup(number)]
        self._previous = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.SIGTERM if number == signal.SIGHUP else number)


class ProcessGroup:
    """The processes of one attempt; no more are started once a signal has asked to stop."""

    def __init__(
        self, command: list[str], processes: int, gpus: list[str | None], folder: Path, signals: StopSignals
    ) -> None:
        self._folder, self._signals, self._saves = folder, signals, command[0] == "train"
        self._environment = os.environ | {job_secret.SECRET: secrets.token_hex(32)}
        join = ["--coordinator", f"{schedulers.LOOPBACK}:{find_free_port()}", "--processes", str(processes)]
        self._members: list[subprocess.Popen[bytes]] = []
        for number in range(processes):
            member = [sys.executable, "-P", "-m", "podscale", *command, *join, "--process", str(number)]
            self._members.append(self._start(number, member, gpus[number]))
            if signals.received:
                self._kill()  # they have not joined each other, so that there is nothing to save
                break

    def _start(self, number: int, command: list[str], gpus: str | None) -> "subprocess.Popen[bytes]":
        environment = self._environment | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus is not None else {})
        outputs: dict[str, Any] = {}
        if number:
            file: IO[bytes] = self._get_log_path(number).open("ab")
            outputs = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        # A session of its own: Ctrl-C reaches it once, through the launcher, which has no threads that `preexec_fn`
        # could harm.
        settings: dict[str, Any] = {"start_new_session": True, "preexec_fn": die_with_parent}
        process = subprocess.Popen(command, env=environment, **settings, **outputs)
        if number:
            file.close()
        return process

    def wait(self) -> ProcessExit:
        """Wait for all processes, and return the first exit that was not a success, or else the last success."""
        first, deadline, forwarded = None, None, 0
        while True:
            for number in self._signals.received[forwarded:]:
                self._send_signal(number)
                forwarded += 1
                if not self._saves:  # JAX's runtime ignores SIGTERM for the sake of commands that save first
                    deadline = deadline or time.monotonic() + GRACE_S
                if self._signals.is_urgent:
                    deadline = min(deadline or math.inf, time.monotonic() + KILLED_GRACE_S)
            ended = [ProcessExit(i, m.returncode) for i, m in enumerate(self._members) if m.poll() is not None]
            if len(ended) == len(self._members):
                return first or next((ending for ending in ended if ending.status), ended[-1])
            if ended and deadline is None:
                deadline = time.monotonic() + SUCCESS_GRACE_S
            failed = [ending for ending in ended if ending.status]
            if failed and first is None:
                first = _find_cause(failed)
                deadline = time.monotonic() + (GRACE_S if first.status > 0 else KILLED_GRACE_S)
            if deadline is not None and time.monotonic() > deadline:
                self._kill()
            time.sleep(POLL_S)

    def is_reported_by_main(self, ending: ProcessExit) -> bool:
        """Return whether the main process has printed why: it failed itself, or met the same mistake of the user's."""
        return ending.process == 0 or (ending.code == USER_ERROR == self._members[0].returncode)

    def print_log_tail(self, number: int) -> None:
        """Print the last lines that a process wrote."""
        lines = self._get_log_path(number).read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        print_lines(number, lines)

    def _get_log_path(self, number: int) -> Path:
        return self._folder / f"process-{number}.log"

    def _send_signal(self, number: int) -> None:
        for member in self._members:
            if member.poll() is None:
                member.send_signal(number)

    def _kill(self) -> None:
        self._send_signal(signal.SIGKILL)  # a stopped process reacts to no other signal


def _find_cause(failed: list[ProcessExit]) -> ProcessExit:
    """Of several failures seen at once, return the one that caused the others: a signal comes before an exit code."""
    return min(failed, key=lambda ending: (ending.status >= 0, ending.code == PEER_LOST, ending.process))


@contextmanager
def open_log_folder(logs: str | None) -> Iterator[Path]:
    """Yield the folder for the other processes' output: `logs`, or a temporary one."""
    if logs:
        require_local(logs, "--logs")
        try:
            Path(logs).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {logs} for the logs: {error.strerror}") from None
        yield Path(logs)
        return
    with tempfile.TemporaryDirectory(prefix="podscale-") as folder:
        yield Path(folder)


def assign_gpus(command: list[str], processes: int) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each process; None: unchanged."""
    is_simulated = any(argument.partition("=")[0] == "--pod.virtual" for argument in command)
    visible = 0 if is_simulated else schedulers.count_visible_gpus()
    if 0 < visible < processes:
        raise UserError(
            f"{processes} processes cannot share {visible} GPU{'s' * (visible > 1)}: "
            f"start {visible}, or simulate with --pod.virtual"
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(visible)))).split(",")
    shares = [schedulers.assign_gpus(number, processes, visible) for number in range(processes)]
    return [None if share is None else ",".join(names[gpu] for gpu in share) for share in shares]


def find_free_port() -> int:
    """Return a port of this machine that nobody listens on, and that the system gives to no connection meanwhile."""
    start = secrets.randbelow(schedulers.PORTS)
    for number in range(schedulers.PORTS):
        port = schedulers.FIRST_PORT + (start + number) % schedulers.PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind((schedulers.LOOPBACK, port))
            return port
    raise UserError(f"no port from {schedulers.FIRST_PORT} up is free on this machine")


def _is_ignored_hangup(number: int) -> bool:
    """Return whether this is the signal of a terminal that is gone, and nohup has asked to ignore it."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def die_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when the launcher is gone; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def print_lines(number: int, lines: list[str]) -> None:
    """Print lines that a process wrote, with its number."""
    for line in lines:
        print(f"[{number}] {line}", file=sys.stderr)


def report(text: str) -> None:
    """Print what the launcher has to say."""
    print(f"podscale: {text}", file=sys.stderr, flush=True)
