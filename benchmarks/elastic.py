"""Claim: after `kill -9` of any process at any moment, an elastic run trains again within seconds, and learns the same.

Starts `podscale launch --elastic` with four processes on this machine, and kills a random one, again and again. Every
second kill comes at a random moment; the others wait, in turn, until the run evaluates, saves, forms a generation or
compiles. One kill in four is followed by another one before all train again; only the last one is timed. What the run
did is looked up right before and right after each kill, which counts for it if both say the same. Then the same recipe
is trained in one process without disturbance. Printed are: seconds from each kill to the first step that is done again,
kills in each state and how many hit the main process, steps that had to be repeated, threads, descriptors and memory of
the one process that is never killed, at the first and the last generation, and the greatest relative difference of the
losses at the same step, up to several steps. The exit code is 1 if no more than a fifth of 100 killed processes or more
was the main one.

No program is compiled when it starts (`--cache fresh`), as in the first run of a recipe; with `--cache user` programs
of earlier runs are loaded, as in every later one. What is compiled ahead, and when, is printed.

    python benchmarks/elastic.py [--kills 100] [--processes 4] [--seed 0] [--steps 2000] [--folder DIR]
    python benchmarks/elastic.py --minutes 20 --join-leave --steps 50000  # up to three of four leave at once
    python benchmarks/elastic.py --kills 20 --signal STOP  # processes that do not answer, instead of dead ones

The peer's figure is published, not run: MaxText recovers from a lost host in about 40 s.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

RECIPE = "digits --model.width 8 --model.precision float64 --train.eval_epochs 2".split()
IMAGES, BATCH, EVAL_EPOCHS = 1437, 128, 2
STEPS_PER_EPOCH = IMAGES / BATCH
SHOWN_S = 0.02
MAX_DELAY_S = 6.0  # after training again, in which the next kill comes
AGAIN_SHARE, MAX_AGAIN_S = 0.25, 1.5  # of the kills that come so soon after another one, before all train again
TRAINING, EVALUATION, SAVE = "training", "evaluation", "save"
LEAVING, FORMING, COMPILATION = "leaving a broken generation", "forming a generation", "compilation"
TARGETS = (EVALUATION, SAVE, FORMING, COMPILATION)  # that every second kill waits for, in turn
TARGET_S, TARGET_POLL_S = 15.0, 0.001  # for which it waits at most: then it comes in whatever state the run is
MAX_INTO_S = 0.2  # after the target has come; the kill waits again if it is then over
TAIL_BYTES = 4096  # of the journal, which have its last lines
MAIN_SHARE, MAIN_KILLS = 0.2, 100  # of the killed processes, more must be main ones, if there are so many
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

    def __init__(self, folder: Path, processes: int, steps: int, environment: dict[str, str]) -> None:
        self._record, self._folder = folder / "logs" / "elastic.jsonl", folder / "run"
        epochs = ["--train.epochs", str(steps / STEPS_PER_EPOCH)]
        launch = ["launch", "-n", str(processes), "--elastic", f"1:{processes}", "--logs", str(folder / "logs")]
        command = [sys.executable, "-m", "podscale", *launch, "train", *RECIPE, *epochs, "--run", str(folder / "run")]
        self._output = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(command, env=environment, stdout=self._output, stderr=self._output)
        self.started = time.time()

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

    def find_state(self) -> str:
        """Return what the run does now, by what its launcher and its main process have written."""
        last = self._find_last_change()
        if last["event"] == "broken":
            return LEAVING
        journal = self._read_last_lines()
        if last["event"] == "generation":
            is_compiled = (
                journal and journal[-1]["event"] == "start" and self._find_time("metrics.jsonl") > last["time"]
            )
            is_open = self._find_time("sample.png") > last["time"]  # the main process writes it right before
            return COMPILATION if is_open and not is_compiled else FORMING
        if journal and journal[-1]["event"] == "eval":
            checkpoint = self._folder / "checkpoints" / str(journal[-1]["step"])
            return TRAINING if checkpoint.exists() else SAVE
        is_due = journal and journal[-1]["event"] == "train" and is_evaluated_after(journal[-1]["step"])
        return EVALUATION if is_due else TRAINING

    def is_training(self) -> bool:
        """Return whether the newest generation trains, and none of it is known to be lost."""
        return bool(self._find_last_change()["event"] == "training")

    def _find_last_change(self) -> dict[str, Any]:
        events = [event for event in self.read() if event["event"] in ("training", "broken", "generation")]
        return events[-1] if events else {"event": "generation", "time": self.started}

    def find_main(self) -> int | None:
        """Return the slot of rank 0 of the newest generation."""
        generations = [event for event in self.read() if event["event"] == "generation"]
        return int(generations[-1]["slots"][0]) if generations else None

    def _find_time(self, name: str) -> float:
        """Return when a file of the run was last written; 0: never."""
        try:
            return (self._folder / name).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _read_last_lines(self) -> list[dict[str, Any]]:
        """Return the last events of the journal that are whole."""
        try:
            with (self._folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read().split(b"\n")[1:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

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
        killed_at: when these kills were.
        states: how many kills came in each state of the run.
        parts: where the seconds went.
        idle: kills of processes that did not train.
        untimed: kills that were followed by another one before all trained again.
        killed: processes.
        main: processes killed that were rank 0 of the newest generation.
        usages: of the one that is never killed.
    """

    seconds: list[float] = field(default_factory=list)
    killed_at: list[float] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    parts: list[dict[str, float]] = field(default_factory=list)
    idle: int = 0
    untimed: int = 0
    killed: int = 0
    main: int = 0
    usages: list[Usage] = field(default_factory=list)


def is_evaluated_after(step: int) -> bool:
    """Return whether the model is evaluated after a step, and then saved."""
    number = step * BATCH // (EVAL_EPOCHS * IMAGES)
    return number > 0 and step == math.ceil(number * EVAL_EPOCHS * STEPS_PER_EPOCH)


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


def make_environment(cache: Path | None) -> dict[str, str]:
    """Return the environment of a process that trains; with a folder for compiled programs, if not the user's own."""
    own = {"XDG_CACHE_HOME": str(cache)} if cache else {}
    given = {name: value for name, value in os.environ.items() if not (cache and name == "JAX_COMPILATION_CACHE_DIR")}
    return given | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"} | own


def await_target(run: ElasticRun, target: str, rng: random.Random) -> None:
    """Wait until the run is in a state, and a random moment into it; or some seconds, if it does not come there."""
    deadline = time.monotonic() + TARGET_S
    while time.monotonic() < deadline and run.process.poll() is None:
        if run.find_state() == target:
            time.sleep(rng.uniform(0.0, MAX_INTO_S if target in (FORMING, COMPILATION) else 0.0))
            if run.find_state() == target:
                return
        time.sleep(TARGET_POLL_S)


def kill(run: ElasticRun, findings: Findings, victims: dict[int, int], number_of_signal: int) -> float:
    """Send a signal to the processes of these slots, count what that hits, and return when it was."""
    main, before, killed = run.find_main(), run.find_state(), time.time()
    for pid in victims.values():
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number_of_signal)
    after = run.find_state()
    findings.states[before if before == after else f"{before} or {after}"] += 1
    findings.killed += len(victims)
    findings.main += main in victims
    return killed


def disturb(
    run: ElasticRun, rng: random.Random, stop: Callable[[int], bool], max_lost: int, number_of_signal: int
) -> Findings:
    """Kill random processes until `stop` says so: up to `max_lost` at once, which all are replaced and join again."""
    findings, is_again, targets = Findings(), False, cycle(TARGETS)
    run.await_training(0.0)
    kept = max(run.list_pids())  # lives through all generations
    findings.usages.append(measure(run.list_pids()[kept]))
    number = 0
    while not stop(number) and run.process.poll() is None:
        time.sleep(rng.uniform(0.0, MAX_AGAIN_S if is_again else MAX_DELAY_S))
        number += 1
        if number % 2 == 0 and not is_again:
            await_target(run, next(targets), rng)
        is_again = rng.random() < AGAIN_SHARE
        pids = run.list_pids()
        others = [slot for slot in pids if slot != kept]
        victims = rng.sample(others, min(len(others), rng.randint(1, max_lost)))
        killed = kill(run, findings, {slot: pids[slot] for slot in victims}, number_of_signal)
        time.sleep(0.3)
        is_broken = any(event["event"] == "broken" and event["time"] > killed - 0.005 for event in run.read())
        if not is_broken and number_of_signal == signal.SIGKILL and run.is_training():
            findings.idle += 1
            continue
        if is_again:
            findings.untimed += 1
            continue  # the next kill comes before all train again, and the time counts from there
        event = run.await_training(killed)
        if event is None:
            break
        findings.seconds.append(event["time"] - killed)
        findings.killed_at.append(killed)
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
    text = (folder / "metrics.jsonl").read_text()
    lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())  # the last line may not be whole yet
    return {line["step"]: line["loss"] for line in lines if line["event"] == "train"}


def compare_losses(disturbed: Path, folder: Path, steps: int, environment: dict[str, str]) -> dict[int, float]:
    """Train as far without disturbance; return the greatest relative difference up to several steps: it grows."""
    epochs = ["--train.epochs", str(steps / STEPS_PER_EPOCH), "--pod.virtual", "2x2"]
    command = [sys.executable, "-m", "podscale", "train", *RECIPE, *epochs, "--run", str(folder)]
    ours, metrics = read_losses(disturbed), folder / "metrics.jsonl"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (metrics.exists() and max(read_losses(folder), default=0) > max(ours)):
            time.sleep(1.0)
        process.terminate()  # it saves, and ends
    reference = read_losses(folder)
    differences = {step: abs(ours[step] - reference[step]) / reference[step] for step in ours if step in reference}
    ends = [step for step in (100, 200, 500, 1000, 2000) if step < max(differences)] + [max(differences)]
    return {end: max(value for step, value in differences.items() if step <= end) for end in ends}


def list_programs(run: ElasticRun, events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """Return what was compiled ahead, with seconds since the start of the run, and when the last of it was there."""
    ahead = [event for event in events if event["event"] == "compiled ahead"]
    ready = max((event["time"] for event in ahead if event["status"] == 0), default=run.started)
    kept = ("size", "seconds", "status")
    return [{"at": round(e["time"] - run.started, 1)} | {name: e[name] for name in kept} for e in ahead], ready


def summarize(findings: Findings, run: ElasticRun) -> dict[str, Any]:
    """Return what is printed in the end."""
    events = run.read()
    programs, ready = list_programs(run, events)
    formed = [event for event in events if event["event"] == "generation"][1:]
    repeated = [max(0, event["step"] - event["snapshot"]) for event in formed if event["snapshot"] >= 0]
    lost = sum(event["event"] == "end" and event["status"] not in (0, 75) for event in events)
    seconds, parts = findings.seconds, {part for recovery in findings.parts for part in recovery}
    medians = {part: statistics.median(recovery.get(part, 0.0) for recovery in findings.parts) for part in parts}
    later = [s for s, killed in zip(seconds, findings.killed_at, strict=True) if killed > ready]
    return {
        "programs compiled ahead": programs,
        "kills in each state": dict(findings.states),
        "recoveries timed": len(seconds),
        "kills followed by another one before all trained again, not timed": findings.untimed,
        "kills of processes that did not train": findings.idle,
        "processes killed": findings.killed,
        "of these, the main process": findings.main,
        "processes lost besides": lost - findings.killed,
        "generations": len(formed) + 1,
        "seconds to training again, median": round(statistics.median(seconds), 2),
        "seconds to training again, worst": round(max(seconds), 2),
        "the same once no more was compiled ahead: recoveries, median, worst": [
            len(later),
            *([round(statistics.median(later), 2), round(max(later), 2)] if later else []),
        ],
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
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL", help="what the victims get")
    parser.add_argument("--cache", choices=["fresh", "user"], default="fresh", help="programs there at the start")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="elastic-"))
    folder.mkdir(parents=True, exist_ok=True)
    environment = make_environment(folder / "cache" if arguments.cache == "fresh" else None)
    run = ElasticRun(folder, arguments.processes, arguments.steps, environment)
    deadline = time.monotonic() + 60 * arguments.minutes
    rng, most = random.Random(arguments.seed), arguments.processes - 1 if arguments.join_leave else 1

    def is_enough(number: int) -> bool:
        return time.monotonic() > deadline if arguments.minutes else number >= arguments.kills

    try:
        findings = disturb(run, rng, is_enough, most, getattr(signal, f"SIG{arguments.signal}"))
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        code = run.process.wait()
    results = summarize(findings, run) | {"exit code": code}
    if not arguments.no_comparison:
        differences = compare_losses(folder / "run", folder / "reference", arguments.steps, environment)
        results["greatest relative difference of the loss, up to a step"] = differences
    print(json.dumps(results, indent=1))
    if findings.killed >= MAIN_KILLS and findings.main <= MAIN_SHARE * findings.killed:
        raise SystemExit(f"only {findings.main} of {findings.killed} killed processes were the main one")


if __name__ == "__main__":
    main()
