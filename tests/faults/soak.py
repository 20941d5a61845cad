"""Disturb a training for half an hour with faults that must not change its result; compare it with an undisturbed one.

Every 60 to 120 seconds a fault is injected: SIGTERM, kill -9, SIGSTOP for a while, a flipped bit in the newest
checkpoint, a full disk. The same command is started again each time. In the end parameters, statistics, optimizer and
every loss must equal those of the undisturbed run. Prints one line per fault, then a table, and exits with 1 if
anything differs. The seed of the faults is printed; programs are compiled once and cached. As root, the run is on a
disk of its own, which can be filled; otherwise that fault is skipped.

    python tests/faults/soak.py --seconds 1800 --seed 7
"""

import argparse
import itertools
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, it does not find `support` otherwise
from support.disturbed import Training, wait_until

PREEMPTED, DISK_MIB, BETWEEN_S = 75, 96, (60.0, 120.0)
SAVE_STEPS = 50


@dataclass
class Fault:
    """A fault, and its cost."""

    kind: str
    lost: int = 0  # updates that had to be repeated
    notice_s: float = 0.0  # until the process had ended or reported it
    again_s: float = 0.0  # until the next update after it


class Soak:
    """The disturbed training."""

    def __init__(self, training: Training, disk: Path | None, draw: random.Random) -> None:
        self.training, self.disk, self.draw = training, disk, draw
        self.process = training.start()

    def disturb(self, kind: str) -> Fault | None:
        """Inject one fault; return None if the training ended first."""
        if self.process.poll() is not None:
            return None
        last_step, began = self.training.last_step(), time.monotonic()
        fault = getattr(self, f"_{kind}")()
        if self.process.poll() is None:
            trains = wait_until(lambda: self.training.last_step() > last_step, self.process, every_s=0.05)
        else:
            if self.process.returncode == 0:
                return None
            self.process = self.training.start()
            trains = wait_until(self.training.has_started_training, self.process, every_s=0.05)
            fault.lost = max(last_step - self.training.find_resumed_step(), 0)
        fault.again_s = time.monotonic() - began
        return fault if trains else None

    def wait_for_training(self) -> None:
        """Wait until training has started: before that, the signal that ends the pauses would end the process."""
        wait_until(self.training.has_started_training, self.process, every_s=0.05)

    def _end(self, number: signal.Signals, *expected: int) -> float:
        began = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait()
        if code not in (0, *expected):
            raise SystemExit(f"exit code {code} after {number.name}: {self.training.log.read_text()[-3000:]}")
        return time.monotonic() - began

    def _sigterm(self) -> Fault:
        return Fault("SIGTERM", notice_s=self._end(signal.SIGTERM, PREEMPTED, -signal.SIGTERM))

    def _kill(self) -> Fault:
        return Fault("kill -9", notice_s=self._end(signal.SIGKILL, -signal.SIGKILL))

    def _stop(self) -> Fault:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(self.draw.uniform(5, 20))
        self.process.send_signal(signal.SIGCONT)
        return Fault("SIGSTOP for 5 to 20 s")

    def _damage(self) -> Fault:
        """Kill it, and flip a bit of the newest checkpoint, unless that is the only one."""
        notice_s = self._end(signal.SIGKILL, -signal.SIGKILL)
        checkpoints = self.training.folder / "checkpoints"
        steps = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal())
        if len(steps) > 1:
            files = [path for path in (checkpoints / str(steps[-1])).rglob("*") if path.is_file()]
            path = max(files, key=lambda path: path.stat().st_size)
            data = bytearray(path.read_bytes())
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
            path.write_bytes(data)
        return Fault("kill -9 and a flipped bit", notice_s=notice_s)

    def _fill(self) -> Fault:
        """Fill the disk for 20 to 40 seconds, in which at least one checkpoint is due."""
        assert self.disk is not None
        filler = self.disk / "filler"
        began, warnings = time.monotonic(), self.training.log.read_text().count("takes no more")
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(2**20))
                    file.flush()
            except OSError:
                pass
        warned = wait_until(
            lambda: self.training.log.read_text().count("takes no more") > warnings, self.process, every_s=0.05
        )
        notice_s = time.monotonic() - began
        if warned:
            time.sleep(self.draw.uniform(20, 40))
        filler.unlink()
        return Fault("full disk for 20 to 40 s", notice_s=notice_s)


@contextmanager
def small_disk(place: Path) -> Iterator[Path | None]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)]
    mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)


def soak(training: Training, whole: Training, seconds: float, seed: int, disk: Path | None) -> tuple[list[Fault], int]:
    """Inject faults for so many seconds, over as many trainings as that takes; each must end as `whole` did."""
    draw, faults, began = random.Random(seed), list[Fault](), time.monotonic()
    kinds, bag = ["sigterm", "kill", "stop", "damage", *(["fill"] if disk else [])], list[str]()
    for number in itertools.count():
        current = replace(training, folder=training.folder.with_name(f"soak{number}"))
        running = Soak(current, disk, draw)
        while time.monotonic() - began < seconds:
            _wait(running.process, min(draw.uniform(*BETWEEN_S), began + seconds - time.monotonic()))
            if time.monotonic() - began >= seconds:
                break
            bag = bag or draw.sample(kinds, len(kinds))  # each kind comes once before any comes again
            fault = running.disturb(bag.pop())
            if fault is None:
                break
            faults.append(fault)
            at = f"{time.monotonic() - began:6.0f} s  step {current.last_step():5}"
            times = f"noticed after {fault.notice_s:.1f} s, training again after {fault.again_s:.1f} s"
            print(f"{at}  {fault.kind}: {fault.lost} updates lost, {times}", flush=True)
        running.wait_for_training()
        running.process.send_signal(signal.SIGUSR1)  # no more pauses
        if running.process.wait() != 0:
            raise SystemExit(f"the training failed: {current.log.read_text()[-3000:]}")
        compare(current, whole)
        print(f"{time.monotonic() - began:6.0f} s  a training has ended, with the same bits", flush=True)
        shutil.rmtree(current.folder)
        if time.monotonic() - began >= seconds:
            return faults, number + 1


def _wait(process: subprocess.Popen, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(seconds, 0))


def compare(training: Training, whole: Training) -> None:
    if training.read_updates() != whole.read_updates():
        raise SystemExit("losses differ")
    for a, b in zip(training.read_arrays(), whole.read_arrays(), strict=True):
        np.testing.assert_array_equal(a, b)


def table(faults: list[Fault]) -> str:
    lines = ["| fault | tried | survived | updates lost, mean and most | s to notice | s to be training again |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kind in sorted({fault.kind for fault in faults}):
        of_kind = [fault for fault in faults if fault.kind == kind]
        lost = [fault.lost for fault in of_kind]
        notice, again = (np.median([getattr(f, name) for f in of_kind]) for name in ("notice_s", "again_s"))
        count = f"{len(of_kind)} | {len(of_kind)}"  # a training that does not survive ends this program
        lines.append(f"| {kind} | {count} | {np.mean(lost):.0f}, {max(lost)} | {notice:.1f} | {again:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=200, help="of a training; 11 updates each")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds of sleep before each update")
    parser.add_argument("--nice", type=int, default=5)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    print(f"seed {arguments.seed}, {arguments.seconds:.0f} s, {arguments.epochs} epochs", flush=True)
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "disk") as disk:
        place = Path(name)
        whole = Training(place / "whole", place / "programs", arguments.epochs, SAVE_STEPS, niceness=arguments.nice)
        began = time.monotonic()
        if whole.start().wait() != 0:
            sys.exit(whole.log.read_text()[-3000:])
        print(f"undisturbed: {time.monotonic() - began:.0f} s", flush=True)
        training = replace(whole, folder=(disk or place) / "soak", pause_s=arguments.pause)
        faults, trainings = soak(training, whole, arguments.seconds, arguments.seed, disk)
        took = time.monotonic() - began
    print(f"\n{len(faults)} faults in {trainings} trainings, {took:.0f} s in all; every bit is the same\n")
    print(table(faults))


if __name__ == "__main__":
    main()
