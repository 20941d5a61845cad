"""Claim: a run of several processes soon trains again after a fault, and loses only the steps since its last save.

Trains `digits` under `podscale launch --restarts 1` and injects one fault into one of the processes, after a number of
steps. Reports for each fault the time until the launcher has noticed and ended all processes, the time until the first
new step is done, the CPU seconds that all new processes took until then, which other work on the machine does not
change much, and the number of steps done twice; then where the start of the main process went, from the run's ledger.
There is no peer: this is what a user waits for.

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
    """A signal to one of the processes (the last is -1), and its description for people."""

    description: str
    signal: signal.Signals
    process: int


FAULTS = {
    "killed": Fault("one process killed (-9)", signal.SIGKILL, -1),
    "coordinator": Fault("the main process killed (-9)", signal.SIGKILL, 0),
    "stopped": Fault(f"one process stopped, plan.timeout_s {TIMEOUT_S}", signal.SIGSTOP, -1),
    "asked": Fault("SIGTERM to one process", signal.SIGTERM, -1),
}


class WatchedTraining:
    """A launched training, with the time of every line that it prints."""

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

    def list_processes(self) -> list[int]:
        pid = self.process.pid
        return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def read_last_step(self) -> int:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def find_line(self, pattern: str) -> tuple[float, re.Match[str]] | None:
        matches = ((at, re.search(pattern, line)) for at, line in list(self.lines))
        return next(((at, match) for at, match in matches if match), None)

    def wait_until(self, condition: "object") -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():  # type: ignore[operator]
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit("".join(line for _, line in self.lines[-20:]))
            time.sleep(0.02)


def measure_cpu_s(processes: list[int]) -> float:
    """Return the CPU seconds that processes have taken, user and system."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Recovery(NamedTuple):
    """What a fault cost."""

    notice_s: float
    recovery_s: float
    cpu_s: float
    repeated_steps: int
    phases: dict[str, float]

    def format_row(self, description: str) -> str:
        times = f"{self.notice_s:.1f} | {self.recovery_s:.1f} | {self.cpu_s:.1f}"
        return f"| {description} | {times} | {self.repeated_steps} |"


def measure_fault(fault: Fault, processes: int) -> Recovery:
    """Inject a fault into a new training, and return what it cost."""
    with tempfile.TemporaryDirectory() as folder:
        run = WatchedTraining(Path(folder) / "run", processes)
        run.wait_until(lambda: run.read_last_step() >= FAULT_STEP)
        os.kill(run.list_processes()[fault.process], fault.signal)
        fault_time = time.monotonic()
        run.wait_until(lambda: run.find_line("starting again"))
        last_before = run.read_last_step()
        run.wait_until(lambda: run.find_line(r"resuming after step (\d+)"))
        resumed_step = int(run.find_line(r"resuming after step (\d+)")[1][1])
        journal = run.folder / "metrics.jsonl"
        run.wait_until(lambda: journal.read_text().count('"start"') == 2 and run.read_last_step() > resumed_step)
        recovery_s, cpu_s = time.monotonic() - fault_time, measure_cpu_s(run.list_processes())
        notice_s = run.find_line("starting again")[0] - fault_time
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(LIMIT_S)
        session = json.loads((run.folder / "ledger.json").read_text())[-1]
        parts = session["notes"][0]["parts"]
        phases = session["start"] | {name: parts[name] for name in ("restore", "compile")}
        return Recovery(notice_s, recovery_s, cpu_s, last_before - resumed_step, phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--faults", default=",".join(FAULTS))
    arguments = parser.parse_args()
    print("| fault | noticed, s | training again, s | of CPU, s | steps done twice |")
    print("| --- | ---: | ---: | ---: | ---: |")
    recoveries = []
    for name in arguments.faults.split(","):
        recoveries.append(measure_fault(FAULTS[name], arguments.processes))
        print(recoveries[-1].format_row(FAULTS[name].description), flush=True)
    for recovery in recoveries:
        print(", ".join(f"{phase} {seconds:.2f}" for phase, seconds in recovery.phases.items()))


if __name__ == "__main__":
    main()
