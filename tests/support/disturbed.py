"""A training in a separate process that faults are injected into, and its state after each fault."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from podscale import pod
from podscale.runs.folder import Run
from podscale.storage.files import read_lines
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.setup import prepare

TIMEOUT_S = 600
PART = "*.part"
SESSION = "--- a session starts"

# The unchanged command, on a disk that is slow to flush, to rename and to delete, so that a signal can arrive in the
# middle. It creates a marker file when it starts to delete a checkpoint.
SLOW_DISK = """
import os, sys, time
from pathlib import Path
from podscale.cli import main as cli

marker = Path(sys.argv.pop(1))

def unlink(*args, work=os.unlink, **more):
    if "dir_fd" in more:  # as shutil.rmtree does
        marker.touch()
    time.sleep(0.01)
    return work(*args, **more)

def rename(*args, work=os.rename, **more):
    time.sleep(0.02)
    return work(*args, **more)

def fsync(*args, work=os.fsync):
    time.sleep(0.02)
    return work(*args)

os.unlink, os.rename, os.fsync = unlink, rename, fsync
cli.run()
"""

# The unchanged command, with a pause before each batch, so that it uses little of the machine; SIGUSR1 ends the pauses.
PAUSED = """
import signal, sys, time
from podscale.cli import main as cli
from podscale.data import prefetch

pause_s = [float(sys.argv.pop(1))]
signal.signal(signal.SIGUSR1, lambda *_: pause_s.__setitem__(0, 0.0))

def next_after_pause(self, take=prefetch.Batches.__next__):
    time.sleep(pause_s[0])
    return take(self)

prefetch.Batches.__next__ = next_after_pause
cli.run()
"""


@dataclass
class Training:
    """A run's folder and the command that trains in it; the same command resumes."""

    folder: Path
    cache: Path  # of compiled programs, so that a session starts sooner
    epochs: int
    save_steps: int
    shape: str = "1x2"
    slow_disk: bool = False
    more: tuple[str, ...] = ()
    niceness: int = 0
    pause_s: float = 0.0

    def start(self) -> subprocess.Popen:
        """Start a session; its output is appended to a file beside the run."""
        words = f"train digits --model.width 8 --train.epochs {self.epochs} --train.eval_epochs 10 --json"
        words += f" --pod.virtual {self.shape} --plan.save_steps {self.save_steps} --run {self.folder}"
        program = ["-c", SLOW_DISK, str(self.deletion_marker)] if self.slow_disk else ["-m", "podscale"]
        program = ["-c", PAUSED, str(self.pause_s)] if self.pause_s else program
        self.deletion_marker.unlink(missing_ok=True)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with self.log.open("a") as log:
            print(SESSION, file=log, flush=True)
            command = ["nice", "-n", str(self.niceness), sys.executable, *program, *words.split(), *self.more]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.txt")

    @property
    def deletion_marker(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.deleting")

    @property
    def partial_checkpoints(self) -> list[Path]:
        """Checkpoints that are being written."""
        return list((self.folder / "checkpoints").glob(PART))

    def newest_checkpoint(self) -> int:
        """Return the step of the newest whole checkpoint."""
        paths = (self.folder / "checkpoints").glob("*")
        return max((int(path.name) for path in paths if path.name.isdecimal()), default=0)

    def read_journal(self) -> list[dict]:
        return [json.loads(line) for line in read_lines(self.folder / "metrics.jsonl")]

    def last_step(self) -> int:
        """Return the step of the last update in the journal."""
        return max((line["step"] for line in self.read_journal()), default=0)

    def read_arrays(self):
        """Return all arrays of the newest checkpoint."""
        setup = prepare(Run.load(self.folder).recipe, pod.make_pod(jax.devices(), self.shape))
        with Checkpoints(self.folder / "checkpoints", read_only=True) as checkpoints:
            return jax.tree.leaves(jax.device_get(checkpoints.restore(checkpoints.newest(), setup.init_state())))

    def has_started_training(self) -> bool:
        """Whether the last session has done its first update."""
        return re.search(r"step [0-9,]+/", self._read_last_session()) is not None

    def find_resumed_step(self) -> int:
        """Return the step that the last session resumed from; call it after its first update."""
        steps = re.findall(r"resuming after step ([0-9,]+)", self._read_last_session())
        return int(steps[-1].replace(",", "")) if steps else 0

    def _read_last_session(self) -> str:
        return self.log.read_text().rpartition(SESSION)[2]

    def read_updates(self) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in self.read_journal() if line["event"] == "train"]


def wait_until(condition, process=None, every_s=0.002) -> bool:
    """Wait for a condition; return False if the process ends first."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if condition():
            return True
        if process is not None and process.poll() is not None:
            return False
        time.sleep(every_s)
    raise AssertionError("the condition never became true")


SPREAD_S = {
    "starting": 15.0,
    "training": 5.0,
    "saving": 0.1,
    "deleting": 0.1,
}  # the longest delay after such a moment starts


@dataclass
class Kill:
    """The state of a run after a kill, and the step that it resumed from."""

    moment: str
    last_step: int  # the last one in the journal
    newest_checkpoint: int  # the newest whole checkpoint
    saving: bool  # whether a checkpoint was partly written
    deleting: bool
    trained: bool  # whether the session had done its first update
    resumed_step: int | None = None  # of the next session, if it got that far


def kill(training: Training, process: subprocess.Popen, moment: str, draw: random.Random) -> Kill | None:
    """Kill the process at such a moment; return None if it ended first."""
    conditions = {
        "starting": lambda: True,
        "training": training.has_started_training,
        "saving": lambda: training.partial_checkpoints,
        "deleting": training.deletion_marker.exists,
    }
    reached = wait_until(conditions[moment], process)
    reached = reached and not _ends_within(process, draw.uniform(0, SPREAD_S[moment]))
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL or not reached:
        return None
    saving, deleting = bool(training.partial_checkpoints), training.deletion_marker.exists()
    trained = training.has_started_training()
    return Kill(moment, training.last_step(), training.newest_checkpoint(), saving, deleting, trained)


def _ends_within(process: subprocess.Popen, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
