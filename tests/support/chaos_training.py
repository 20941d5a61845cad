"""A training of one or four processes that a fault campaign disturbs: its command, its processes, its progress."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
from support.slow_disk import write_slow_site

from podscale import pod
from podscale.runs.folder import Run
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.setup import prepare

EPOCHS, STEPS, SAVE_STEPS, SHAPES = 12, 135, 20, {1: "1x2", 4: "2x2"}
RESTARTS, NICENESS = 20, 10  # the latter in all: a campaign that is nice itself must not starve its trainings
SESSION = "--- a session starts"
TRAINED = re.compile(r'"event": "train", "step": ([0-9]+)')
NOTHING: Mapping[str, str] = MappingProxyType({})
RESUMED = re.compile(r"resuming after step ([0-9,]+)")
POLL_S = 0.02
LIMIT_S = 300  # in which a run must have done something new, or it counts as hanging
EARLY_END = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)  # before a process handles signals


class TrialError(Exception):
    """A run did not live through its faults: the sentence says how."""


@dataclass
class ChaosTraining:
    """A run's folder and its command; each start of the command is a session, by hand or by the launcher."""

    folder: Path
    programs: Path  # the cache of compiled programs
    processes: int
    process: subprocess.Popen | None = None
    last_step, eval_steps = STEPS, (45, 90)

    @property
    def location(self) -> str | Path:
        """Where the run is."""
        return self.folder

    @property
    def log(self) -> Path:
        return self.programs.with_name(f"{self.folder.name}.txt")  # not on the run's disk, which may be full

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def start(self, under: Sequence[str] = (), environment: Mapping[str, str] = NOTHING) -> None:
        """Start the command, under another one and with more variables if given."""
        words = self.make_words()
        if self.processes > 1:
            words = f"launch -n {self.processes} --restarts {RESTARTS} --logs {self.log.with_suffix('.logs')} {words}"
        own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        own |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(self.programs)}
        own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | self.make_environment()
        with self.log.open("a") as log:
            print(SESSION, file=log, flush=True)
            niceness = str(max(NICENESS - os.nice(0), 0))
            command = ["nice", "-n", niceness, *under, sys.executable, "-m", "podscale", *words.split()]
            self.process = subprocess.Popen(
                command, env=own | environment, stdout=log, stderr=log, start_new_session=True
            )

    def make_words(self) -> str:
        """Return the command."""
        words = f"train digits --model.width 8 --train.epochs {EPOCHS} --train.eval_epochs 4 --json --run {self.folder}"
        words += f" --pod.virtual {SHAPES[self.processes]} --plan.save_steps {SAVE_STEPS} --plan.timeout_s 40"
        return words + " --pod.heartbeat_s 30 --plan.check_steps 20"

    def make_environment(self) -> dict[str, str]:
        """Return the variables of the command, beside those of JAX."""
        return {"PYTHONPATH": str(write_slow_site(self.programs.with_name("slow-disk")))}

    def list_members(self) -> list[int]:
        """Return the training processes in the order of their numbers; fewer while they are being started."""
        if self.processes == 1:
            return [self.process.pid]
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [int(child) for child in children]

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def read_session(self) -> str:
        """Return the log of the last session, by hand or by the launcher."""
        return re.split(rf"{SESSION}|starting again", self.read_log())[-1]

    def count_sessions(self) -> int:
        return len(re.findall(rf"{SESSION}|starting again", self.read_log()))

    def has_trained(self) -> bool:
        """Return whether the last session has done an update."""
        return re.search(r"step [0-9,]+/", self.read_session()) is not None

    def find_resumed_step(self) -> int:
        steps = RESUMED.findall(self.read_session())
        return int(steps[-1].replace(",", "")) if steps else 0

    def read_journal(self) -> str:
        """Return the text of metrics.jsonl; empty if there is none."""
        try:
            return (self.folder / "metrics.jsonl").read_text()
        except OSError:
            return ""

    def find_last_step(self) -> int:
        """Return the last step in the journal."""
        steps = TRAINED.findall(self.read_journal())
        return int(steps[-1]) if steps else 0

    def is_evaluating(self) -> bool:
        """Return whether the last line of the journal is that of an update after which the run evaluates."""
        *_, line = ["", *self.read_journal().splitlines()]
        trained = TRAINED.search(line)
        return trained is not None and int(trained[1]) in self.eval_steps

    def is_saving(self) -> bool:
        return any(self.checkpoints.glob("*.part"))

    def list_steps(self) -> list[int]:
        """Return the steps of whole checkpoints."""
        return sorted(int(path.name) for path in self.checkpoints.glob("*") if path.name.isdecimal())

    def wait_until(self, condition, limit_s: float = LIMIT_S) -> bool:
        """Wait for a condition; return False if the command ends first.

        Raises:
            TrialError: neither happened in time.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if condition():
                return True
            if self.process.poll() is not None:
                return condition()
            time.sleep(POLL_S)
        raise TrialError(f"nothing happened for {limit_s:.0f} s")

    def kill(self) -> None:
        """Kill the launcher and all processes at once, as when the power fails."""
        members = self.list_members()
        for process in [self.process.pid, *members]:
            send_signal(process, signal.SIGKILL)
        self.process.wait()
        self.wait_for_members(members)

    def wait_for_members(self, members: list[int]) -> None:
        """Wait until these processes have ended.

        Raises:
            TrialError: they have not in time.
        """
        deadline = time.monotonic() + 120
        while not all(map(has_ended, members)):
            if time.monotonic() > deadline:
                raise TrialError("the processes outlive their launcher")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Kill everything that is left."""
        if self.process is None:
            return
        for member in [*self.list_members(), self.process.pid]:
            send_signal(member, signal.SIGKILL)
        self.process.wait()

    def read_result(self) -> tuple[list, list]:
        """Return every loss, and all arrays of the newest checkpoint."""
        run = Run.load(self.location)
        updates = [(line["step"], line["loss"]) for line in run.metrics() if line["event"] == "train"]
        program = prepare(run.recipe, pod.make_pod(jax.devices()[:1], "1x1"))
        with Checkpoints(run.folder / "checkpoints", read_only=True) as checkpoints:
            state = checkpoints.restore(checkpoints.newest(), program.init_state())
        return updates, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def send_signal(process: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def has_ended(process: int) -> bool:
    """Return whether a process is gone, or waits for its parent to ask for its exit code."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
