"""Claim: a run of several processes is soon training again after a fault, and loses no more than since its last save.

Trains `digits` under `podscale launch --restarts 1` and injects one fault into one of the processes, after a number of
steps. Tells for each fault how long it took until the launcher had noticed and ended all processes, how long until the
first new step was done, and how many steps were done twice. There is no peer: this is what a user waits for.

    python benchmarks/recovery.py [--processes 4] [--faults killed,coordinator,stopped,asked]
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

RECIPE = "digits --model.width 8 --train.epochs 8 --train.eval_epochs 8 --json".split()
SAVE_STEPS, FAULT_STEP, TIMEOUT_S = 10, 24, 30
LIMIT_S = 900


class Fault(NamedTuple):
    """What happens to which process (the last is -1), in words for people."""

    told: str
    signal: signal.Signals
    process: int


FAULTS = {
    "killed": Fault("one process killed (-9)", signal.SIGKILL, -1),
    "coordinator": Fault("the first process killed (-9)", signal.SIGKILL, 0),
    "stopped": Fault(f"one process stopped, plan.timeout_s {TIMEOUT_S}", signal.SIGSTOP, -1),
    "asked": Fault("SIGTERM to one process", signal.SIGTERM, -1),
}


class Watched:
    """A launched training, with the time of every line that it says."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder, self.lines = folder, list[tuple[float, str]]()
        command = [
            sys.executable,
            "-m",
            "podscale",
            "launch",
            "-n",
            str(processes),
            "--restarts",
            "1",
            "train",
            *RECIPE,
        ]
        command += ["--pod.virtual", f"1x{processes}", "--plan.save_steps", str(SAVE_STEPS), "--run", str(folder)]
        command += ["--plan.timeout_s", str(TIMEOUT_S)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line))

    def members(self) -> list[int]:
        pid = self.process.pid
        return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def last_step(self) -> int:
        path = self.folder / "metrics.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return max((json.loads(line)["step"] for line in whole), default=0)

    def said(self, pattern: str) -> tuple[float, re.Match[str]] | None:
        found = ((at, re.search(pattern, line)) for at, line in list(self.lines))
        return next(((at, match) for at, match in found if match), None)

    def until(self, ready: "object") -> None:
        deadline = time.monotonic() + LIMIT_S
        while not ready():  # type: ignore[operator]
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit("".join(line for _, line in self.lines[-20:]))
            time.sleep(0.02)


def measure(fault: Fault, processes: int) -> tuple[float, float, int]:
    """Seconds until noticed, seconds until training again, and steps done twice."""
    with tempfile.TemporaryDirectory() as folder:
        run = Watched(Path(folder) / "run", processes)
        run.until(lambda: run.last_step() >= FAULT_STEP)
        os.kill(run.members()[fault.process], fault.signal)
        since = time.monotonic()
        run.until(lambda: run.said("starting again"))
        reached = run.last_step()
        run.until(lambda: run.said(r"resuming after step (\d+)"))
        resumed = int(run.said(r"resuming after step (\d+)")[1][1])
        journal = run.folder / "metrics.jsonl"
        run.until(lambda: journal.read_text().count('"start"') == 2 and run.last_step() > resumed)
        again = time.monotonic() - since
        noticed = run.said("starting again")[0] - since
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(LIMIT_S)
        return noticed, again, reached - resumed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--faults", default=",".join(FAULTS))
    arguments = parser.parse_args()
    print("| fault | noticed, s | training again, s | steps done twice |\n| --- | ---: | ---: | ---: |")
    for name in arguments.faults.split(","):
        noticed, again, lost = measure(FAULTS[name], arguments.processes)
        print(f"| {FAULTS[name].told} | {noticed:.1f} | {again:.1f} | {lost} |", flush=True)


if __name__ == "__main__":
    main()
