"""A randomized fault campaign: trainings of one and four processes, each with a few faults drawn from a seed.

Every trial must reach its end, in bounded time, with exit codes that its faults allow, without a traceback, and with
every loss and every array equal to those of an undisturbed run, bit for bit. A failing sequence is repeated with ever
fewer faults, and the shortest one that still fails is printed. Each trial is a line of the results file. A slice starts
where the last one of its seed ended, so that slices of any length add up.

With --bucket, data and run are in a bucket behind a proxy that fails (`support.chaos_bucket`); then also requests are
counted and bounded, and in the end the bucket holds nothing but what the run needs.

    make chaos SECONDS=600 SEED=1
    make chaos SECONDS=600 SEED=1 STORE=--bucket
    python tests/faults/chaos.py --table          # of all slices so far
    python tests/faults/chaos.py --trial 17 --seed 1
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, it does not find `support` otherwise
from support.chaos_bucket import KINDS as BUCKET_KINDS
from support.chaos_bucket import BucketTraining, ChaosStore
from support.chaos_faults import KINDS, Fault, Kind, draw_faults, wait_for_moment
from support.chaos_training import ChaosTraining, TrialError

from podscale.runs.folder import Run

ROOT = Path(__file__).parents[2]
RESULTS, BUCKET_RESULTS = (Path(__file__).with_name(name) for name in ("chaos.jsonl", "chaos_bucket.jsonl"))
FAILED = ROOT / "build" / "chaos"
DISK_MIB, LOG_TAIL = 96, 4000


class Campaign:
    """The undisturbed runs, and the trials that are compared with them."""

    kinds = KINDS

    def __init__(self, place: Path, disk: Path | None) -> None:
        self._place, self.disk, self._programs = place, disk, place / "programs"
        self._programs.mkdir()
        self._results: dict[int, tuple[list, list]] = {}
        self.counts: dict[str, int] = {}  # of the last trial

    def make_training(self, folder: Path, processes: int, **more: object) -> ChaosTraining:
        return ChaosTraining(folder, self._programs, processes, **more)

    def read_undisturbed(self, processes: int) -> tuple[list, list]:
        if processes not in self._results:
            whole = self.make_training(self._place / f"whole{processes}", processes)
            run_undisturbed(whole)
            self._results[processes] = whole.read_result()
        return self._results[processes]

    def prepare_trial(self, faults: list[Fault]) -> None:
        """Do what precedes the start of a trial's training."""

    def check_end(self, training: ChaosTraining) -> None:
        """Check what else must hold when a trial's training has come to its end."""

    def run_trial(self, processes: int, faults: list[Fault]) -> tuple[list[dict], str]:
        """Return a record of each fault, and why the run did not survive; empty if it did."""
        expected = self.read_undisturbed(processes)
        folder = (self.disk or self._place) / "run"
        training, records, problem = self.make_training(folder, processes), list[dict](), ""
        self.prepare_trial(faults)
        try:
            training.start()
            for fault in faults:
                record = disturb(training, fault, self.kinds[fault.kind])
                records.append(asdict(fault) | record)
            allowed = {code for fault in faults for code in self.kinds[fault.kind].codes}
            finish(training, allowed)
            check(training, expected)
            self.check_end(training)
        except TrialError as error:
            problem = str(error)
            self._keep_log(training, problem)
        finally:
            training.end()
            shutil.rmtree(folder, ignore_errors=True)
            training.log.unlink(missing_ok=True)
        return records, problem

    def _keep_log(self, training: ChaosTraining, problem: str) -> None:
        FAILED.mkdir(parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(prefix="failed-", dir=FAILED))
        (target / "problem.txt").write_text(problem)
        shutil.copy(training.log, target / "log.txt")
        pipes = shutil.ignore_patterns("pipe")  # of stray files: they cannot be copied
        shutil.copytree(training.folder, target / "run", dirs_exist_ok=True, symlinks=True, ignore=pipes)
        if training.processes > 1:
            shutil.copytree(training.log.with_suffix(".logs"), target / "logs", dirs_exist_ok=True)


class BucketCampaign(Campaign):
    """Trainings whose data and run are in a bucket behind a proxy that fails."""

    kinds = BUCKET_KINDS

    def __init__(self, place: Path) -> None:
        super().__init__(place, None)
        self.store, self._requests = ChaosStore(place), dict[int, int]()
        os.environ.update(self.store.direct)

    def make_training(self, folder: Path, processes: int, **more: object) -> ChaosTraining:
        return BucketTraining(folder, self._programs, processes, store=self.store, **more)

    def read_undisturbed(self, processes: int) -> tuple[list, list]:
        """Return the result on disk, which that in the bucket must equal; count the requests of the latter."""
        if processes not in self._results:
            on_disk, in_bucket = (
                self.make_training(self._place / f"whole{processes}-{on_disk}", processes, on_disk=on_disk)
                for on_disk in (True, False)
            )
            run_undisturbed(on_disk)
            self._results[processes] = on_disk.read_result()
            in_bucket.start_count()
            run_undisturbed(in_bucket)
            self._requests[processes] = in_bucket.count_requests()
            check(in_bucket, self._results[processes])
            in_bucket.check_bucket()
        return self._results[processes]

    def prepare_trial(self, faults: list[Fault]) -> None:
        self.store.proxy.clear()
        self.store.proxy.disturb_always(random.Random(faults[0].seed))

    def check_end(self, training: ChaosTraining) -> None:
        hits = self.store.proxy.count_hits()
        self.counts = {"requests": training.count_requests(), "failed": sum(hits.values())}
        self.counts |= {"undisturbed": self._requests[training.processes], "sessions": training.count_sessions()}
        training.check_requests(self._requests[training.processes], sum(hits.values()))
        self.store.proxy.clear()
        training.check_bucket()
        training.delete_run()


def run_undisturbed(training: ChaosTraining) -> None:
    training.start()
    if training.process.wait() != 0:
        raise SystemExit(f"the undisturbed run failed:\n{training.read_log()[-LOG_TAIL:]}")


def disturb(training: ChaosTraining, fault: Fault, kind: Kind) -> dict:
    """Inject a fault and wait until training goes on; return what it cost."""
    if not wait_for_moment(training, fault):
        check_code(training, ())
        return {"hit": False}
    last_step, began = training.find_last_step(), time.monotonic()
    sessions = training.count_sessions()
    notice_s = kind.inject(training, random.Random(fault.seed))

    def has_gone_on() -> bool:
        if training.count_sessions() == sessions:
            return training.find_last_step() > last_step
        return training.has_trained()

    while True:  # what a fault ends may end only some seconds later
        training.wait_until(has_gone_on)
        if training.process.poll() in (None, 0):
            break
        check_code(training, kind.codes)
        training.start()
    has_ended = training.count_sessions() > sessions
    lost = max(last_step - training.find_resumed_step(), 0) if has_ended else 0
    return {"hit": True, "lost": lost, "notice_s": notice_s, "again_s": time.monotonic() - began}


def finish(training: ChaosTraining, allowed: set[int]) -> None:
    """Start the command until it has come to its end."""
    for _ in range(5):
        training.wait_until(lambda: False)
        if training.process.returncode == 0:
            return
        check_code(training, tuple(allowed))
        training.start()
    raise TrialError("the run does not come to its end")


def check_code(training: ChaosTraining, codes: tuple[int, ...]) -> None:
    code = training.process.poll()
    if code not in (None, 0, *codes):
        raise TrialError(f"exit code {code}")


def check(training: ChaosTraining, expected: tuple[list, list]) -> None:
    """Compare a run that has ended with the undisturbed one."""
    if "Traceback" in training.read_log():
        raise TrialError("a traceback in the log")
    updates, arrays = training.read_result()
    if updates != expected[0]:
        raise TrialError("losses differ from those of the undisturbed run")
    if not all(np.array_equal(one, two) for one, two in zip(arrays, expected[1], strict=True)):
        raise TrialError("arrays differ from those of the undisturbed run")
    summary = Run.load(training.location).summary()
    if not summary:
        raise TrialError("the run has ended without a summary")
    if not 0 <= summary["goodput"] <= 1:
        raise TrialError(f"goodput is {summary['goodput']}")


def shrink(campaign: Campaign, processes: int, faults: list[Fault]) -> tuple[list[Fault], str]:
    """Return the shortest sequence of these faults that fails, and how; all of them if none fails again."""
    _, problem = campaign.run_trial(processes, faults)
    if not problem:
        return faults, "it did not fail again"
    position = 0
    while position < len(faults) > 1:
        fewer = faults[:position] + faults[position + 1 :]
        _, smaller_problem = campaign.run_trial(processes, fewer)
        if smaller_problem:
            faults, problem = fewer, smaller_problem
        else:
            position += 1
    return faults, problem


def draw_trial(seed: int, number: int, campaign: Campaign) -> tuple[int, list[Fault]]:
    """Return how many processes a trial has, and its faults."""
    draw = random.Random(f"{seed} {number}")
    processes = draw.choice([1, 4])
    return processes, draw_faults(draw, processes, campaign.disk is not None, campaign.kinds)


def run_slice(campaign: Campaign, seed: int, seconds: float, results: Path) -> bool:
    """Run trials until the time is over; return whether all survived."""
    began, survived = time.monotonic(), True
    done = [line["trial"] for line in read_results(results) if line["seed"] == seed]
    number = max(done, default=-1) + 1
    while time.monotonic() - began < seconds:
        start = time.monotonic()
        processes, faults = draw_trial(seed, number, campaign)
        records, problem = campaign.run_trial(processes, faults)
        line = {"seed": seed, "trial": number, "processes": processes, "faults": records, "problem": problem}
        line |= campaign.counts | {"seconds": round(time.monotonic() - start, 1), "date": time.strftime("%Y-%m-%d")}
        kinds = ", ".join(f"{fault.kind} ({fault.moment})" for fault in faults)
        print(f"seed {seed}, trial {number}, {processes} processes: {kinds}: {problem or 'survived'}", flush=True)
        if problem:
            survived = False
            shortest, again = shrink(campaign, processes, faults)
            line |= {"shortest": [asdict(fault) for fault in shortest], "again": again}
            print(f"  shortest that fails: {shortest}: {again}", flush=True)
        with results.open("a") as file:
            print(json.dumps(line), file=file)
        number += 1
    return survived


def read_results(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def make_table(lines: list[dict], kinds: dict[str, Kind]) -> str:
    rows = ["| fault | drawn | survived | updates lost, mean and most | s to notice | s to be training again |"]
    rows.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    faults = [record | {"ok": not line["problem"]} for line in lines for record in line["faults"]]
    faults = [record for record in faults if record["hit"] and record["kind"] in kinds]
    for kind in sorted({record["kind"] for record in faults}):
        records = [record for record in faults if record["kind"] == kind]
        lost = [record["lost"] for record in records]
        noticed = [record["notice_s"] for record in records if record["notice_s"]]
        again = np.median([record["again_s"] for record in records])
        cells = [kind.replace("_", " "), len(records), sum(record["ok"] for record in records)]
        cells += [f"{np.mean(lost):.0f}, {max(lost)}", f"{np.median(noticed):.1f}" if noticed else "", f"{again:.1f}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    hours = sum(line["seconds"] for line in lines) / 3600
    failed = sum(bool(line["problem"]) for line in lines)
    seeds = ", ".join(map(str, sorted({line["seed"] for line in lines})))
    rows.append(f"\n{len(lines)} trainings, {hours:.2f} hours, {failed} not survived; seeds {seeds}.")
    if requests := [line for line in lines if "requests" in line]:
        total, failed = (sum(line[name] for line in requests) for name in ("requests", "failed"))
        most = max(line["requests"] / (line["undisturbed"] * line["sessions"]) for line in requests)
        rows.append(
            f"{total:,} requests, of which {failed:,} were made to fail; at most {most:.2f} times as many as the "
            "undisturbed run makes, for each session."
        )
    return "\n".join(rows)


@contextmanager
def small_disk(place: Path) -> Iterator[Path | None]:
    """Mount a small disk that can be filled; yield None where that is not allowed."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)]
    mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="no further trial is started after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket", action="store_true", help="data and run are in a bucket behind a proxy that fails")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--trial", type=int, help="run this trial of the seed alone, and record nothing")
    parser.add_argument("--table", action="store_true", help="print the table of all results, and run nothing")
    arguments = parser.parse_args()
    results = arguments.results or (BUCKET_RESULTS if arguments.bucket else RESULTS)
    kinds = BUCKET_KINDS if arguments.bucket else KINDS
    if arguments.table:
        print(make_table(read_results(results), kinds))
        return
    jax.config.update("jax_platforms", "cpu")
    survived = True
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "disk") as disk:
        campaign = BucketCampaign(Path(name)) if arguments.bucket else Campaign(Path(name), disk)
        if arguments.trial is not None:
            processes, faults = draw_trial(arguments.seed, arguments.trial, campaign)
            records, problem = campaign.run_trial(processes, faults)
            print(processes, *records, problem or "survived", sep="\n")
            sys.exit(bool(problem))
        survived = run_slice(campaign, arguments.seed, arguments.seconds, results)
    print(make_table(read_results(results), kinds))
    sys.exit(not survived)


if __name__ == "__main__":
    main()
