"""Claim: after `kill -9` of any process at any moment, an elastic run trains again within seconds, and learns the same.

Starts `podscale launch --elastic` with four processes on this machine, and kills a random one at a random moment, again
and again: while it trains, evaluates, saves, compiles, or while a replacement joins. Then the same recipe is trained in
one process without disturbance. Printed are: seconds from each kill to the first step that is done again, steps that
had to be repeated, threads, descriptors and memory of the one process that is never killed, at the first and the last
generation, and the greatest relative difference of the losses at the same step, up to several steps.

    python benchmarks/elastic.py [--kills 100] [--processes 4] [--seed 0] [--steps 2000] [--folder DIR]
    python benchmarks/elastic.py --minutes 20 --join-leave --steps 50000  # up to three of four leave at once

The peer's figure is published, not run: MaxText recovers from a lost host in about 40 s.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

RECIPE = "digits --model.width 8 --model.precision float64 --train.eval_epochs 2".split()
STEPS_PER_EPOCH = 1437 / 128
SHOWN_S = 0.02
MAX_DELAY_S = 6.0  # after training again, in which the next kill comes
NOTICED_BEFORE_S = 0.005  # a process may be seen to be gone before `kill` has returned
PATIENCE_S = 300.0  # in which a step must be done, also on a busy machine


class Usage(NamedTuple):
    """What a process holds."""

    threads: int
    descriptors: int
    rss_mb: float


def measure(pid: int) -> Usage:
    """Return what a process holds now."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    rss_mb = int(fields["VmRSS"].split()[0]) / 1024
    return Usage(int(fields["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), rss_mb)


class ElasticRun:
    """An elastic run, and the record of what happens to it."""

    def __init__(self, folder: Path, processes: int, steps: int) -> None:
        self._record = folder / "logs" / "elastic.jsonl"
        epochs = ["--train.epochs", str(steps / STEPS_PER_EPOCH)]
        launch = ["launch", "-n", str(processes), "--elastic", f"1:{processes}", "--logs", str(folder / "logs")]
        command = [sys.executable, "-m", "podscale", *launch, "train", *RECIPE, *epochs, "--run", str(folder / "run")]
        self._output = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(command, env=make_environment(), stdout=self._output, stderr=self._output)

    def read(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        if not self._record.exists():
            return []
        return [json.loads(line) for line in self._record.read_text().splitlines() if line.endswith("}")]

    def list_pids(self) -> dict[int, int]:
        """Return the process that is alive in each slot."""
        pids = dict[int, int]()
        for event in self.read():
            if event["event"] == "start":
                pids[event["process"]] = event["pid"]
            elif event["event"] == "end":
                pids.pop(event["process"], None)
        return pids

    def await_training(self, since: float) -> dict[str, Any] | None:
        """Return the first event after a moment which says that training goes on; None if the run has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            for event in self.read():
                if event["event"] == "training" and event["time"] > since:
                    return event
            if time.monotonic() > deadline:
                raise SystemExit(f"no step was done for {PATIENCE_S:.0f} s; see {self._record}")
            time.sleep(0.02)
        return None


@dataclass
class Findings:
    """What was measured.

    Attributes:
        seconds: from each kill of processes that trained to training again.
        parts: where they went.
        idle: kills of processes that did not train.
        killed: processes.
        usages: of the one that is never killed.
    """

    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    idle: int = 0
    killed: int = 0
    usages: list[Usage] = field(default_factory=list)


def describe_recovery(events: list[dict[str, Any]], killed: float) -> dict[str, float]:
    """Return where the seconds from a kill to training again went.

    "notice" ends when the launcher knows, "leave" when the survivors that go on have left their generation; the others
    are what the main process of the next generation reports.
    """
    after = [event for event in events if event["time"] > killed - NOTICED_BEFORE_S]
    times = {name: [event["time"] for event in after if event["event"] == name] for name in ("broken", "generation")}
    trained = next(event for event in after if event["event"] == "training" and event["time"] > killed)
    reported = (e["parts"] for e in after if e["event"] == "parts" and e["generation"] == trained["generation"])
    parts = {part: seconds for part, seconds in next(reported, {}).items() if part not in ("leave", "join")}
    if times["broken"] and times["broken"][0] < trained["time"]:
        formed = [at for at in times["generation"] if at < trained["time"]][-1]
        parts = {"notice": times["broken"][0] - killed, "leave": formed - times["broken"][0]} | parts
        parts["join"] = trained["time"] - killed - sum(parts.values())
    return parts


def make_environment() -> dict[str, str]:
    """Return the environment of a process that trains."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}


def disturb(run: ElasticRun, rng: random.Random, stop: Callable[[int], bool], max_lost: int) -> Findings:
    """Kill random processes until `stop` says so: up to `max_lost` at once, which all are replaced and join again."""
    findings = Findings()
    run.await_training(0.0)
    kept = max(run.list_pids())  # lives through all generations
    findings.usages.append(measure(run.list_pids()[kept]))
    number = 0
    while not stop(number) and run.process.poll() is None:
        time.sleep(rng.uniform(0.0, MAX_DELAY_S))
        pids, number = run.list_pids(), number + 1
        others = [slot for slot in pids if slot != kept]
        victims = rng.sample(others, min(len(others), rng.randint(1, max_lost)))
        killed = time.time()
        for victim in victims:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pids[victim], signal.SIGKILL)
        findings.killed += len(victims)
        time.sleep(0.3)
        is_broken = any(event["event"] == "broken" and event["time"] > killed - 0.005 for event in run.read())
        last = [event["event"] for event in run.read() if event["event"] in ("training", "broken", "generation")][-1]
        if not is_broken and last == "training":
            findings.idle += 1
            continue
        event = run.await_training(killed)
        if event is None:
            break
        findings.seconds.append(event["time"] - killed)
        with suppress(KeyError, FileNotFoundError):  # it was lost in the fault; the count of lost processes says so
            findings.usages.append(measure(run.list_pids()[kept]))
        time.sleep(0.1)  # in which the timeline is written
        findings.parts.append(describe_recovery(run.read(), killed))
        where = ", ".join(f"{part} {s:.2f}" for part, s in findings.parts[-1].items() if s > SHOWN_S)
        print(f"{number:3}: {victims} killed, training after {findings.seconds[-1]:.2f} s: {where}")
        print(f"     {findings.usages[-1]}", flush=True)
    return findings


def read_losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["event"] == "train"}


def compare_losses(disturbed: Path, folder: Path, steps: int) -> dict[int, float]:
    """Train without disturbance; return the greatest relative difference up to several steps: it grows with them."""
    epochs = ["--train.epochs", str(steps / STEPS_PER_EPOCH), "--pod.virtual", "2x2"]
    command = [sys.executable, "-m", "podscale", "train", *RECIPE, *epochs, "--run", str(folder)]
    subprocess.run(command, env=make_environment(), check=True, capture_output=True)
    ours, reference = read_losses(disturbed), read_losses(folder)
    differences = {step: abs(ours[step] - reference[step]) / reference[step] for step in ours}
    ends = [step for step in (100, 200, 500, 1000, 2000) if step < max(ours)] + [max(ours)]
    return {end: max(value for step, value in differences.items() if step <= end) for end in ends}


def summarize(findings: Findings, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is printed in the end."""
    formed = [event for event in events if event["event"] == "generation"][1:]
    repeated = [max(0, event["step"] - event["snapshot"]) for event in formed if event["snapshot"] >= 0]
    lost = sum(event["event"] == "end" and event["status"] not in (0, 75) for event in events)
    seconds, parts = findings.seconds, {part for recovery in findings.parts for part in recovery}
    medians = {part: statistics.median(recovery.get(part, 0.0) for recovery in findings.parts) for part in parts}
    return {
        "recoveries": len(seconds),
        "kills of processes that did not train": findings.idle,
        "processes killed": findings.killed,
        "processes lost besides": lost - findings.killed,
        "generations": len(formed) + 1,
        "seconds to training again, median": round(statistics.median(seconds), 2),
        "seconds to training again, worst": round(max(seconds), 2),
        "where they went, medians": {part: round(s, 3) for part, s in medians.items() if s > SHOWN_S},
        "steps repeated, mean": round(statistics.mean(repeated), 1),
        "steps repeated, most": max(repeated),
        "the process never killed, first generation": findings.usages[0]._asdict(),
        "the process never killed, last generation": findings.usages[-1]._asdict(),
    }


def main() -> None:
    """Run it all, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=0.0, help="kill for so long, instead of a number of times")
    parser.add_argument("--join-leave", action="store_true", help="kill up to all but one process at once")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-comparison", action="store_true", help="do not train once more to compare losses")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="elastic-"))
    folder.mkdir(parents=True, exist_ok=True)
    run, deadline = ElasticRun(folder, arguments.processes, arguments.steps), time.monotonic() + 60 * arguments.minutes
    rng, most = random.Random(arguments.seed), arguments.processes - 1 if arguments.join_leave else 1

    def is_enough(number: int) -> bool:
        return time.monotonic() > deadline if arguments.minutes else number >= arguments.kills

    try:
        findings = disturb(run, rng, is_enough, most)
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        code = run.process.wait()
    results = summarize(findings, run.read()) | {"exit code": code}
    if not arguments.no_comparison:
        differences = compare_losses(folder / "run", folder / "reference", arguments.steps)
        results["greatest relative difference of the loss, up to a step"] = differences
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
