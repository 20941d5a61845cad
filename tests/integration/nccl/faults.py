"""Faults of ranks in real trainings: kill -9, SIGSTOP, SIGTERM, and a restart. All trainings run beside each other."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from integration.nccl.ranks import HERE, find_free_port, make_environment

PEER_LOST, STUCK, PREEMPTED = 69, 70, 75
SETTINGS = "digits --model.width 8 --train.epochs 60 --train.eval_epochs 60 --plan.save_steps 10".split()
FIRST_STEP, START_TIMEOUT_S, END_TIMEOUT_S = 12, 150, 90


@dataclass(frozen=True)
class Fault:
    """A signal to one rank of a training, and how all must end.

    Attributes:
        name: unique.
        ranks: how many there are.
        victim: the rank that gets the signal.
        number: the signal.
        code: that the others end with.
        sentence: that each of them prints.
        within_s: after the signal.
        more: options of the training.
    """

    name: str
    ranks: int
    victim: int
    number: int
    code: int
    sentence: str
    within_s: float
    more: tuple[str, ...] = ()


FAULTS = [
    Fault("kill -9 of rank 2 of 4", 4, 2, signal.SIGKILL, PEER_LOST, "process 2 on", 60),
    Fault("kill -9 of rank 1 of 2", 2, 1, signal.SIGKILL, PEER_LOST, "process 1 on", 60),
    Fault("kill -9 of rank 0 of 2", 2, 0, signal.SIGKILL, PEER_LOST, "process 0, through which all find", 60),
    Fault("SIGSTOP of rank 1 of 4", 4, 1, signal.SIGSTOP, PEER_LOST, "process 1 on", 20, ("--pod.heartbeat_s", "20")),
    Fault(
        "SIGSTOP of rank 1 of 2", 2, 1, signal.SIGSTOP, STUCK, "waiting for process 1", 15, ("--plan.timeout_s", "8")
    ),
    Fault(
        "SIGSTOP of rank 0 of 2", 2, 0, signal.SIGSTOP, PEER_LOST, "process 0, through", 20, ("--pod.heartbeat_s", "12")
    ),
    Fault("SIGTERM to rank 1 of 2", 2, 1, signal.SIGTERM, PREEMPTED, "stopped on request", 60),
]
RESTART = "launch --restarts 1, kill -9 of rank 1 of 4"


def run(platform, folder, names=None):
    """Inject all faults, or those that are named, and return a row of the table for each."""
    rows, jobs = {}, {}
    for fault in FAULTS:
        jobs[fault.name] = lambda fault=fault: inject(fault, platform, folder)
    jobs[RESTART] = lambda: restart(platform, folder)
    threads = [
        threading.Thread(target=lambda name=name: rows.update({name: jobs[name]()}))
        for name in jobs
        if names is None or name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[name] for name in jobs if name in rows]


def inject(fault, platform, folder):
    """Start a training, send the signal once it trains, and report how every rank ended."""
    folder, port = folder / fault.name.replace(" ", "-"), find_free_port()
    folder.mkdir()
    join = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(fault.ranks), "--process"]
    command = [sys.executable, "-m", "podscale", "train", *SETTINGS, "--run", str(folder / "run"), *fault.more, *join]
    logs = [folder / f"rank-{rank}.log" for rank in range(fault.ranks)]
    ranks = [start([*command, str(rank)], make_environment(platform, rank), logs[rank]) for rank in range(fault.ranks)]
    row = {"name": fault.name, "ranks": fault.ranks, "like": "", "seconds": 0.0}
    try:
        if not wait_for_step(folder / "run", ranks):
            return row | {"right": False, "error": "it never trained:\n" + read_logs(logs)}
        begin = time.monotonic()
        ranks[fault.victim].send_signal(fault.number)
        others = [n for n in range(fault.ranks) if n != fault.victim or fault.code == PREEMPTED]
        seconds = {number: wait(ranks[number], begin) for number in others}
    finally:
        end(ranks)
    codes = [ranks[number].returncode for number in others]
    silent = [number for number in others if fault.sentence not in logs[number].read_text(errors="replace")]
    late = max(seconds.values())
    right = codes == [fault.code] * len(others) and not silent and late <= fault.within_s
    note = f"exit codes {', '.join(map(str, codes))}; {'all name it' if not silent else f'{silent} do not name it'}"
    return row | {"right": right, "seconds": late, "note": note, "error": read_logs(logs)}


def restart(platform, folder):
    """Kill a rank under `launch --restarts`: the same command goes on from its last checkpoint, to the end."""
    folder = folder / "restart"
    folder.mkdir()
    more = {"CUDA_VISIBLE_DEVICES": "0,0,0,0"} if platform == "gpu" else {}
    environment = make_environment(platform, **more)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "hosts"), environment["PYTHONPATH"]])
    launch = [sys.executable, "-m", "podscale", "launch", "-n", "4", "--restarts", "1", "--logs", str(folder / "logs")]
    settings = [*SETTINGS, "--train.epochs", "6", "--run", str(folder / "run")]
    launcher = start([*launch, "train", *settings], environment, folder / "launch.log")
    row = {"name": RESTART, "ranks": 4, "like": "", "seconds": 0.0}
    try:
        if not wait_for_step(folder / "run", [launcher]):
            return row | {"right": False, "error": (folder / "launch.log").read_text(errors="replace")[-4000:]}
        begin = time.monotonic()
        os.kill(list_children(launcher)[1], signal.SIGKILL)
        seconds = wait(launcher, begin, 2 * END_TIMEOUT_S)
    finally:
        end([launcher])
    log = (folder / "launch.log").read_text(errors="replace")
    resumed = "starting again (1 of 1)" in log and "resuming after step" in log
    note = f"exit code {launcher.returncode}; {'resumed' if resumed else 'did not resume'}"
    return row | {"right": launcher.returncode == 0 and resumed, "seconds": seconds, "note": note, "error": log[-6000:]}


def start(command, environment, log):
    with log.open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def wait_for_step(folder, processes):
    """Wait until the journal has some steps; return whether it came so far."""
    deadline, journal = time.monotonic() + START_TIMEOUT_S, folder / "metrics.jsonl"
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if journal.exists() and f'"step": {FIRST_STEP},' in journal.read_text():
            return True
        time.sleep(0.05)
    return False


def wait(process, begin, timeout_s=END_TIMEOUT_S):
    """Return the seconds until a process ended; it is killed if it does not."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return time.monotonic() - begin


def end(processes):
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def read_logs(logs):
    return "\n".join(f"[{log.name}] {log.read_text(errors='replace')[-2500:]}" for log in logs)


def list_children(process):
    """Return the processes that a launcher has started, in the order of their numbers."""
    return [int(n) for n in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
