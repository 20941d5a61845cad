"""A training in a process of its own that faults are injected into, and what becomes of it."""

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
from podscale.training import setup
from podscale.training.checkpoint import Checkpoints

TIMEOUT_S = 600
PART = "*.orbax-checkpoint-tmp"
SESSION = "--- a session begins"

# The command as it is, on a disk that takes its time to rename and to delete, so that a signal can come in the middle.
# It leaves a file behind when it begins to delete a checkpoint.
SLOW_DISK = """
import os, sys, time
from pathlib import Path
from podscale.cli import main as cli

sign = Path(sys.argv.pop(1))

def unlink(*args, work=os.unlink, **more):
    if "dir_fd" in more:  # as shutil.rmtree does
        sign.touch()
    time.sleep(0.01)
    return work(*args, **more)

def rename(*args, work=os.rename, **more):
    time.sleep(0.02)
    return work(*args, **more)

os.unlink, os.rename = unlink, rename
cli.run()
"""

# The command as it is, with a pause before each batch, so that it takes little of the machine; SIGUSR1 ends the pauses.
PAUSED = """
import signal, sys, time
from podscale.cli import main as cli
from podscale.data import prefetch

pause_s = [float(sys.argv.pop(1))]
signal.signal(signal.SIGUSR1, lambda *_: pause_s.__setitem__(0, 0.0))

def paused(self, take=prefetch.Batches.__next__):
    time.sleep(pause_s[0])
    return take(self)

prefetch.Batches.__next__ = paused
cli.run()
"""


@dataclass
class Training:
    """A run's folder and the command that trains in it; the same command goes on."""

    folder: Path
    cache: Path  # of compiled programs, so that a session begins sooner
    epochs: int
    save_steps: int
    shape: str = "1x2"
    slow_disk: bool = False
    more: tuple[str, ...] = ()
    niceness: int = 0
    pause_s: float = 0.0

    def start(self) -> subprocess.Popen:
        """A session; what it says is appended to a file beside the run."""
        words = f"train digits --model.width 8 --train.epochs {self.epochs} --train.eval_epochs 10 --json"
        words += f" --pod.virtual {self.shape} --plan.save_steps {self.save_steps} --run {self.folder}"
        program = ["-c", SLOW_DISK, str(self.sign)] if self.slow_disk else ["-m", "podscale"]
        program = ["-c", PAUSED, str(self.pause_s)] if self.pause_s else program
        self.sign.unlink(missing_ok=True)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with self.said.open("a") as said:
            print(SESSION, file=said, flush=True)
            command = ["nice", "-n", str(self.niceness), sys.executable, *program, *words.split(), *self.more]
            return subprocess.Popen(command, env=environment, stdout=said, stderr=said)

    @property
    def said(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.txt")

    @property
    def sign(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.deleting")

    @property
    def parts(self) -> list[Path]:
        """Checkpoints in the making."""
        return list((self.folder / "checkpoints").glob(PART))

    def finished(self) -> int:
        """The step of the newest checkpoint that is done."""
        found = (self.folder / "checkpoints").glob("*")
        return max((int(path.name) for path in found if path.name.isdecimal()), default=0)

    def told(self) -> list[dict]:
        return [json.loads(line) for line in read_lines(self.folder / "metrics.jsonl")]

    def step(self) -> int:
        """The last update that the journal tells of."""
        return max((line["step"] for line in self.told()), default=0)

    def arrays(self):
        """All arrays of the newest checkpoint."""
        job = setup.prepare(Run.load(self.folder).recipe, pod.of(jax.devices(), self.shape))
        with Checkpoints(self.folder / "checkpoints", read_only=True) as checkpoints:
            return jax.tree.leaves(jax.device_get(checkpoints.restore(checkpoints.newest(), job.state)))

    def trains(self) -> bool:
        """Whether the last session has come to its first update."""
        return re.search(r"step [0-9,]+/", self._last_session()) is not None

    def resumed(self) -> int:
        """The step that the last session went on from, once it has come to its first update."""
        found = re.findall(r"resuming after step ([0-9,]+)", self._last_session())
        return int(found[-1].replace(",", "")) if found else 0

    def _last_session(self) -> str:
        return self.said.read_text().rpartition(SESSION)[2]

    def updates(self) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in self.told() if line["event"] == "train"]


def until(holds, process=None, every_s=0.002) -> bool:
    """Waits; False where the process ends before."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if holds():
            return True
        if process is not None and process.poll() is not None:
            return False
        time.sleep(every_s)
    raise AssertionError("it never came")


SPREAD_S = {"starting": 15.0, "training": 5.0, "saving": 0.1, "deleting": 0.1}  # after the sign of such a moment


@dataclass
class Kill:
    """What was found after a kill, and what came of it."""

    moment: str
    step: int  # that the journal had come to
    finished: int  # the newest whole checkpoint
    saving: bool  # whether there was a half one
    deleting: bool
    trained: bool  # whether the session had come to its first update
    resumed: int | None = None  # the step that the next session went on from, if it came that far


def kill(training: Training, process: subprocess.Popen, moment: str, draw: random.Random) -> Kill | None:
    """Kills the process at such a moment; None where it had ended before that came."""
    signs = {
        "starting": lambda: True,
        "training": training.trains,
        "saving": lambda: training.parts,
        "deleting": training.sign.exists,
    }
    came = until(signs[moment], process) and not _ended_within(process, draw.uniform(0, SPREAD_S[moment]))
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL or not came:
        return None
    half, deleting, trained = bool(training.parts), training.sign.exists(), training.trains()
    return Kill(moment, training.step(), training.finished(), half, deleting, trained)


def _ended_within(process: subprocess.Popen, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
