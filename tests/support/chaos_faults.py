"""The faults of the campaign: what each does to a training, when it can come, and how a session may end after it."""

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support import chaos_surroundings as around
from support.chaos_training import EARLY_END, ChaosTraining, TrialError, send_signal

USER_ERROR, PEER_LOST, PREEMPTED, INTERRUPTED = 2, 69, 75, 130
KILLED, HANG_UP = -signal.SIGKILL, -signal.SIGHUP
MOMENTS = ("starting", "training", "evaluating", "saving", "ending")


@dataclass(frozen=True)
class Fault:
    """One fault of a sequence; everything about it is drawn before the trial, so that it can be repeated."""

    kind: str
    moment: str  # one of MOMENTS
    delay_s: float  # after such a moment
    seed: int  # of what else is random in it


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `inject` returns seconds until it was noticed; None: there is nothing to notice."""

    inject: Callable[[ChaosTraining, random.Random], float | None]
    codes: tuple[int, ...] = ()  # exit codes that the command may end with, besides 0
    moments: tuple[str, ...] = MOMENTS
    processes: tuple[int, ...] = (1, 4)
    needs_disk: bool = False
    is_possible: bool = True  # on this machine


def is_drawn(kind: Kind, processes: int, has_disk: bool) -> bool:
    """Return whether a training of so many processes can be disturbed in this way."""
    return kind.is_possible and processes in kind.processes and (has_disk or not kind.needs_disk)


def draw_faults(draw: random.Random, processes: int, has_disk: bool, kinds: dict[str, Kind]) -> list[Fault]:
    """Return one to four faults for a training of so many processes: the same on every machine that can have them."""
    names = [name for name, kind in kinds.items() if processes in kind.processes]
    while True:
        faults = [_draw_fault(draw, draw.choice(names), kinds) for _ in range(draw.randint(1, 4))]
        if possible := [fault for fault in faults if is_drawn(kinds[fault.kind], processes, has_disk)]:
            return possible


def _draw_fault(draw: random.Random, kind: str, kinds: dict[str, Kind]) -> Fault:
    moment = draw.choice(kinds[kind].moments)
    spread_s = {"starting": 6.0, "training": 2.0, "evaluating": 0.1, "saving": 0.05, "ending": 0.3}[moment]
    return Fault(kind, moment, round(draw.uniform(0, spread_s), 3), draw.randrange(1 << 30))


def wait_for_moment(training: ChaosTraining, fault: Fault) -> bool:
    """Wait for the moment of a fault; return False if the command has ended first."""
    step = training.find_last_step()
    conditions = {
        "starting": lambda: True,
        "training": lambda: training.has_trained() and training.find_last_step() > step,
        "evaluating": training.is_evaluating,
        "saving": training.is_saving,
        "ending": lambda: training.find_last_step() >= training.last_step,
    }
    if not training.wait_until(conditions[fault.moment]):
        return False
    with contextlib.suppress(subprocess.TimeoutExpired):
        training.process.wait(fault.delay_s)
        return False
    return True


# --- signals -------------------------------------------------------------------------------------------------------


def _wait_for_end(training: ChaosTraining) -> float:
    """Return seconds until the command has ended, or the launcher starts it again."""
    began, sessions = time.monotonic(), training.count_sessions()
    training.wait_until(lambda: training.count_sessions() > sessions)
    return time.monotonic() - began


def _kill(training: ChaosTraining, numbers: list[int]) -> float:
    members = training.list_members()
    began, sessions = time.monotonic(), training.count_sessions()
    for number in numbers:
        if number < len(members):
            send_signal(members[number], signal.SIGKILL)
    if members:
        training.wait_until(lambda: training.count_sessions() > sessions)
    return time.monotonic() - began


def kill_one(training, draw):
    return _kill(training, [draw.randrange(training.processes)])


def kill_main(training, draw):
    return _kill(training, [0])


def kill_two(training, draw):
    return _kill(training, draw.sample(range(4), 2))


def kill_all(training, draw):
    """As when the power fails: the launcher and all processes at once."""
    training.kill()
    return 0.0


def kill_launcher(training, draw):
    members, began = training.list_members(), time.monotonic()
    training.process.kill()
    training.process.wait()
    training.wait_for_members(members)
    return time.monotonic() - began


def terminate(training, draw):
    training.process.terminate()
    return _wait_for_end(training)


def terminate_one(training, draw):
    members = training.list_members()
    if not members:
        return None
    send_signal(draw.choice(members), signal.SIGTERM)
    return _wait_for_end(training)


def hang_up(training, draw):
    training.process.send_signal(signal.SIGHUP)
    return _wait_for_end(training)


def interrupt(training, draw):
    training.process.send_signal(signal.SIGINT)
    return _wait_for_end(training)


def _pause(processes, seconds):
    for process in processes:
        send_signal(process, signal.SIGSTOP)
    time.sleep(seconds)
    for process in processes:
        send_signal(process, signal.SIGCONT)


def pause_one(training, draw):
    members = training.list_members()
    _pause([draw.choice(members)] if members else [], draw.uniform(1, 6))


def pause_all(training, draw):
    _pause([training.process.pid, *training.list_members()], draw.uniform(1, 8))


def pause_launcher(training, draw):
    _pause([training.process.pid], draw.uniform(1, 8))


def stop_one(training, draw):
    """Stop a process for good: the watchdogs of the others notice, and the launcher kills it."""
    members = training.list_members()
    if len(members) < training.processes:
        return None
    send_signal(draw.choice(members), signal.SIGSTOP)
    return _wait_for_end(training)


def starve(training, draw):
    """Leave the training little of the machine for a while."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    time.sleep(draw.uniform(2, 6))
    for other in others:
        other.kill()
        other.wait()


# --- disks ---------------------------------------------------------------------------------------------------------


def _fill_disk(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return filler


def fill_disk(training, draw):
    filler = _fill_disk(training.folder.parent)
    try:
        time.sleep(draw.uniform(2, 8))
    finally:
        filler.unlink()


def restart_on_full_disk(training, draw):
    """Kill everything while the disk is full, and start the command before there is space again."""
    filler = _fill_disk(training.folder.parent)
    try:
        kill_all(training, draw)
        training.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            training.process.wait(draw.uniform(2, 10))
    finally:
        filler.unlink()


# --- files, while nothing runs -------------------------------------------------------------------------------------


def _damage_newest(training, draw, damage):
    kill_all(training, draw)
    steps = training.list_steps()
    if len(steps) > 1:  # a run whose only checkpoint is damaged ends, and rightly
        files = [path for path in (training.checkpoints / str(steps[-1])).rglob("*") if path.is_file()]
        damage(max(files, key=lambda path: path.stat().st_size))
    return 0.0


def flip_bit(training, draw):
    def flip(path):
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)

    return _damage_newest(training, draw, flip)


def truncate_file(training, draw):
    return _damage_newest(training, draw, lambda path: path.write_bytes(path.read_bytes()[: draw.randrange(50)]))


def remove_file(training, draw):
    return _damage_newest(training, draw, Path.unlink)


def garble_metadata(training, draw):
    def garble(path):
        steps = training.list_steps()
        (training.checkpoints / str(steps[-1]) / "manifest.json").write_text("{")

    return _damage_newest(training, draw, garble)


def tear_journal(training, draw):
    """Leave half a line at the end of the journal, and a ledger that is no JSON."""
    kill_all(training, draw)
    if (training.folder / "metrics.jsonl").exists():
        with (training.folder / "metrics.jsonl").open("a") as journal:
            journal.write('{"event": "train", "st')
        (training.folder / "ledger.json").write_text("[{")
    return 0.0


def damage_programs(training, draw):
    kill_all(training, draw)
    for path in draw.sample(sorted(training.programs.iterdir()), 5):
        path.write_bytes(path.read_bytes()[:20])
    return 0.0


def limit_files(training, draw):
    """Start a session that can open too few files, then one that can."""
    kill_all(training, draw)
    training.start(under=["prlimit", f"--nofile={draw.choice([16, 24, 40])}"])
    with contextlib.suppress(subprocess.TimeoutExpired):
        training.process.wait(60)  # it may train, and wait for descriptors to save with
    training.end()
    return 0.0


# --- strangers -----------------------------------------------------------------------------------------------------


def train_twice(training, draw):
    """Start the same command again beside itself: it must refuse, and the first one must not notice."""
    second = ChaosTraining(training.folder, training.programs, training.processes)
    if not training.wait_until(training.has_trained):
        return
    second.start()
    try:
        code = second.process.wait(240)
    finally:
        second.end()
    if code != USER_ERROR and training.process.poll() is None:
        raise TrialError(f"a second training in the folder ended with {code}")


STOPPED = (PREEMPTED, INTERRUPTED, *EARLY_END)
RUNNING = ("training", "saving")
KINDS = {
    "kill_one": Kind(kill_one, (KILLED,)),
    "kill_main": Kind(kill_main, processes=(4,)),
    "kill_two": Kind(kill_two, processes=(4,)),
    "kill_all": Kind(kill_all, (KILLED,)),
    "kill_launcher": Kind(kill_launcher, (KILLED,), processes=(4,)),
    "terminate": Kind(terminate, STOPPED),
    "terminate_one": Kind(terminate_one, processes=(4,)),
    "hang_up": Kind(hang_up, STOPPED),
    "interrupt": Kind(interrupt, (*STOPPED, 1), RUNNING),
    "pause_one": Kind(pause_one),
    "pause_all": Kind(pause_all),
    "pause_launcher": Kind(pause_launcher, processes=(4,)),
    "stop_one": Kind(stop_one, (), RUNNING, (4,)),
    "starve": Kind(starve),
    "fill_disk": Kind(fill_disk, (), ("training", "saving", "ending"), needs_disk=True),
    "restart_on_full_disk": Kind(restart_on_full_disk, (KILLED, USER_ERROR), RUNNING, needs_disk=True),
    "flip_bit": Kind(flip_bit, (KILLED,)),
    "truncate_file": Kind(truncate_file, (KILLED,)),
    "remove_file": Kind(remove_file, (KILLED,)),
    "garble_metadata": Kind(garble_metadata, (KILLED,)),
    "tear_journal": Kind(tear_journal, (KILLED,)),
    "replace_file": Kind(around.replace_file, (KILLED,)),
    "copy_checkpoint": Kind(around.copy_checkpoint, (KILLED,)),
    "hide_checkpoints": Kind(around.hide_checkpoints, (KILLED, USER_ERROR)),
    "make_unreadable": Kind(around.make_unreadable, (KILLED, USER_ERROR)),
    "leave_stray_files": Kind(around.leave_stray_files, (KILLED,)),
    "change_surroundings": Kind(around.change_surroundings, (KILLED,)),
    "limit_memory": Kind(around.limit_memory, (KILLED,), processes=(1,), is_possible=around.CAN_LIMIT_MEMORY),
    "damage_programs": Kind(damage_programs, (KILLED,), RUNNING),
    "limit_files": Kind(limit_files, (KILLED, USER_ERROR), RUNNING, (1,)),
    "train_twice": Kind(train_twice, (), ("training",)),
    "intrude": Kind(around.intrude, processes=(4,)),
    "cut_links": Kind(around.cut_links, (), RUNNING, (4,), is_possible=around.CAN_CUT_LINKS),
    "join_twice": Kind(around.join_twice, (), RUNNING, (4,)),
}
