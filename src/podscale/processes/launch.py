"""Launch: a command as several processes on this machine, which find each other over loopback.

The first process speaks; what the others say goes to a file each, and is shown if they are why it failed. Signals are
passed on. If a process dies, the rest ends too, and the death is named. With restarts, the same command is then started
again, and goes on from its last checkpoint.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

from podscale.errors import UserError
from podscale.processes import schedulers

USER_ERROR, DIVERGED, GONE, PREEMPTED, INTERRUPTED = 2, 65, 69, 75, 130
FINAL = (0, USER_ERROR, DIVERGED, INTERRUPTED)  # exit codes after which the same command would end in the same way
GRACE_S = 6.0  # in which the others may say what they have to say, once one has ended
KILLED_GRACE_S = 1.0  # the same, if it was killed: they know no more than we do
FAREWELL_S = 60.0  # in which the others end, once one has ended well: they leave together
POLL_S = 0.05
SHOWN_LINES = 20
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


class Death(NamedTuple):
    """How a process ended."""

    process: int
    status: int  # as subprocess has it: an exit code, or the negative number of a signal

    @property
    def code(self) -> int:
        """The exit code that says the same."""
        return self.status if self.status >= 0 else GONE

    def told(self) -> str:
        """In words.

        >>> Death(2, -9).told(), Death(0, 70).told()
        ('process 2 was killed by SIGKILL', 'process 0 ended with exit code 70')
        """
        if self.status >= 0:
            return f"process {self.process} ended with exit code {self.status}"
        return f"process {self.process} was killed by {signal.Signals(-self.status).name}"


def launch(command: list[str], processes: int, restarts: int = 0, logs: str | None = None) -> int:
    """Runs `podscale COMMAND` as so many processes; returns the exit code of all.

    After a fault, the same command is started again, up to `restarts` times. Not so after success, after a mistake of
    the user's, or if this process was itself asked to stop.
    """
    if processes < 1:
        raise UserError(f"-n takes a number of processes from 1 up, not {processes}")
    if restarts < 0:
        raise UserError(f"--restarts takes a number from 0 up, not {restarts}")
    gpus = _gpus(command, processes)
    with _folder(logs) as folder, _Passing() as passing:
        for left in range(restarts, -1, -1):
            group = Group(command, processes, gpus, folder)
            passing.group = group
            death = group.wait()
            if death.code == 0:
                return 0
            again = left > 0 and death.code not in FINAL and not passing.asked
            _say(f"{death.told()}{f'; starting again ({restarts - left + 1} of {restarts})' if again else ''}")
            if not again:
                break
        if death.code != PREEMPTED and not group.told_by_first(death):
            group.show(death.process)
    return death.code


class Group:
    """The processes of one try."""

    def __init__(self, command: list[str], processes: int, gpus: list[str | None], folder: Path) -> None:
        self._folder = folder
        join = ["--coordinator", f"{schedulers.LOOPBACK}:{_free_port()}", "--processes", str(processes)]
        self._members: list[subprocess.Popen[bytes]] = []
        for number in range(processes):
            own = [sys.executable, "-P", "-m", "podscale", *command, *join, "--process", str(number)]
            self._members.append(self._started(number, own, gpus[number]))

    def _started(self, number: int, command: list[str], gpus: str | None) -> "subprocess.Popen[bytes]":
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus is not None else {})
        outputs: dict[str, Any] = {}
        if number:
            file: IO[bytes] = self._log(number).open("wb")
            outputs = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        # A session of its own: Ctrl-C reaches it once, through us. No thread is here for `preexec_fn` to harm.
        settings: dict[str, Any] = {"start_new_session": True, "preexec_fn": _die_with_parent}
        started = subprocess.Popen(command, env=environment, **settings, **outputs)
        if number:
            file.close()
        return started

    def wait(self) -> Death:
        """The first death that was not a success, after all have ended; or the last success."""
        first, deadline = None, None
        while True:
            ended = [Death(i, m.returncode) for i, m in enumerate(self._members) if m.poll() is not None]
            if len(ended) == len(self._members):
                return first or next((death for death in ended if death.status), ended[-1])
            if ended and deadline is None:
                deadline = time.monotonic() + FAREWELL_S
            failed = [death for death in ended if death.status]
            if failed and first is None:
                first = _cause(failed)
                deadline = time.monotonic() + (GRACE_S if first.status > 0 else KILLED_GRACE_S)
            if deadline is not None and time.monotonic() > deadline:
                self._kill()
            time.sleep(POLL_S)

    def pass_on(self, number: int) -> None:
        """Sends a signal to all that are alive."""
        for member in self._members:
            if member.poll() is None:
                member.send_signal(number)

    def told_by_first(self, death: Death) -> bool:
        """Whether the first process, which speaks, has said why: it is the one, or has met the same mistake."""
        return death.process == 0 or (death.code == USER_ERROR == self._members[0].returncode)

    def show(self, number: int) -> None:
        """The last lines that a process wrote."""
        lines = self._log(number).read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        for line in lines:
            print(f"[{number}] {line}", file=sys.stderr)

    def _log(self, number: int) -> Path:
        return self._folder / f"process-{number}.log"

    def _kill(self) -> None:
        self.pass_on(signal.SIGKILL)  # a stopped process hears nothing else


def _cause(failed: list[Death]) -> Death:
    """Of several deaths seen at once, the one that the others followed: a signal comes before an exit code."""
    return min(failed, key=lambda death: (death.status >= 0, death.code == GONE, death.process))


class _Passing:
    """Signals are passed on to the processes meanwhile."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.asked = False

    def __enter__(self) -> "_Passing":
        self._before = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.group:
            self.group.pass_on(signal.SIGTERM if number == signal.SIGHUP else number)


@contextmanager
def _folder(logs: str | None) -> Iterator[Path]:
    """Where the other processes' output goes: a folder that stays, or one that does not."""
    if logs:
        try:
            Path(logs).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {logs} for the logs: {error.strerror}") from None
        yield Path(logs)
        return
    with tempfile.TemporaryDirectory(prefix="podscale-") as folder:
        yield Path(folder)


def _gpus(command: list[str], processes: int) -> list[str | None]:
    """What each process shall see of the machine's GPUs; None: what there is."""
    simulated = any(word.partition("=")[0] == "--pod.virtual" for word in command)
    visible = 0 if simulated else schedulers.visible_gpus()
    if 0 < visible < processes:
        raise UserError(
            f"{processes} processes cannot share {visible} GPU{'s' * (visible > 1)}: "
            f"start {visible}, or simulate with --pod.virtual"
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(visible)))).split(",")
    shares = [schedulers.gpus_of(number, processes, visible) for number in range(processes)]
    return [None if share is None else ",".join(names[gpu] for gpu in share) for share in shares]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((schedulers.LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """Has the kernel ask this process to stop if the launcher is gone; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _say(text: str) -> None:
    print(f"podscale: {text}", file=sys.stderr, flush=True)
