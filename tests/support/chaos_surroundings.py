"""Faults of the campaign that come from around a training: mounts, other files, the clock, memory, the network."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from support.chaos_training import ChaosTraining, TrialError
from support.shifted_clock import COMPILER, YEAR_S, shift_clock

MEMORY = Path("/sys/fs/cgroup/memory")
UNREADABLE_FILE = "/proc/self/mem"  # reading its first bytes is an input/output error, for root too
LITTLE_MIB = 120
STRAY_FILES = 300
ENDS = ("--dport", "--sport")  # of a connection: a packet goes to or comes from a port that one of them listens on

CAN_LIMIT_MEMORY = (MEMORY / "memory.limit_in_bytes").exists() and os.access(MEMORY, os.W_OK)
CAN_CUT_LINKS = os.geteuid() == 0 and shutil.which("iptables") is not None

JOIN_PROGRAM = """
import sys
from podscale.processes import group
group.join(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""


# --- files, while nothing runs -------------------------------------------------------------------------------------


def replace_file(training, draw):
    """Put a file of the checkpoint before in the place of one of the newest, as a copy or a link."""
    training.kill()
    if len(steps := training.list_steps()) > 1:
        older, newest = (training.checkpoints / str(step) for step in steps[-2:])
        files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
        name = draw.choice([name for name in files if (older / name).is_file()])
        (newest / name).unlink()
        draw.choice([shutil.copy, os.symlink])(older / name, newest / name)
    return 0.0


def copy_checkpoint(training, draw):
    """Leave a copy of the newest checkpoint under the number of a later step."""
    training.kill()
    if steps := training.list_steps():
        copy = training.checkpoints / str(steps[-1] + draw.randint(1, 10))
        shutil.copytree(training.checkpoints / str(steps[-1]), copy)
    return 0.0


def hide_checkpoints(training, draw):
    """Start a session while the folder of checkpoints is away, like a disk that is not mounted, for up to 20 s."""
    training.kill()
    away = training.folder / "away"
    if training.list_steps():
        training.checkpoints.rename(away)
        training.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            training.process.wait(draw.uniform(1, 20))
        _move_back(away, training)


def _move_back(away: Path, training: ChaosTraining) -> None:
    deadline = time.monotonic() + 30
    while True:  # what a session has made meanwhile is empty, but for the moment in which it tries to write there
        try:
            return away.replace(training.checkpoints)
        except OSError:
            if training.list_steps() or time.monotonic() > deadline:
                raise TrialError("the run started from scratch while its checkpoints were away") from None
            time.sleep(0.02)


def make_unreadable(training, draw):
    """Start a session while a file of the newest checkpoint gives input/output errors, for up to 20 s."""
    training.kill()
    if steps := training.list_steps():
        files = sorted(path for path in (training.checkpoints / str(steps[-1])).rglob("*") if path.is_file())
        path = draw.choice(files)
        kept = path.with_name("kept")
        path.rename(kept)
        path.symlink_to(UNREADABLE_FILE)
        training.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            training.process.wait(draw.uniform(1, 20))
        if not kept.exists():
            raise TrialError("a checkpoint that could not be read for a moment was moved")
        kept.replace(path)


def leave_stray_files(training, draw):
    """Leave files and folders that are not the run's, pipes and loops among them, and names that are not UTF-8."""
    training.kill()
    folder = training.checkpoints
    if not folder.exists():
        return 0.0
    for name in ("999-0.part", "998.deleted", "999.orbax-checkpoint-tmp"):
        (folder / name).mkdir(exist_ok=True)
    for name in ("notes.txt", os.fsdecode(b"\xff\xe4"), *(f"stray-{i}" for i in range(STRAY_FILES))):
        (folder / name).write_text("of mine")
    with contextlib.suppress(FileExistsError):  # from the same fault before
        os.mkfifo(folder / "pipe")
        (folder / "loop").symlink_to("loop")
    return 0.0


# --- what a session starts in --------------------------------------------------------------------------------------


def change_surroundings(training, draw):
    """Start a session with another time zone, locale, or time of day."""
    training.kill()
    zone = {"TZ": draw.choice(["Pacific/Kiritimati", ":nowhere/at/all"])}
    language = {"LC_ALL": draw.choice(["C", "tr_TR.UTF-8"]), "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shift_s = draw.choice([YEAR_S, -YEAR_S, 3 * 3600])
    clock = [shift_clock(shift_s)] if COMPILER else []
    training.start(environment=draw.choice([zone, language, *clock]))
    return 0.0


def limit_memory(training, draw):
    """Start a session with so little memory that the kernel kills it."""
    training.kill()
    group = MEMORY / f"podscale-chaos-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LITTLE_MIB << 20))
        training.start(under=["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"])
        training.process.wait(120)
    except subprocess.TimeoutExpired:
        raise TrialError(f"the kernel has not killed a process that may use {LITTLE_MIB} MiB") from None
    finally:
        training.end()
        _remove_group(group)


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + 30
    while True:  # the kernel counts a process until it is gone altogether
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


# --- the network ---------------------------------------------------------------------------------------------------


def intrude(training, draw):
    """Send garbage to every port that the processes listen on, also the coordinator's."""
    ports = _list_checked_ports(training)
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as stranger:
            stranger.sendall(draw.choice([b"GET / HTTP/1.1\r\n\r\n", draw.randbytes(4096), b"\0" * 70000]))
            time.sleep(draw.uniform(0, 0.5))


def cut_links(training, draw):
    """Lose every packet between the processes for up to 8 s."""
    ports = _list_checked_ports(training)
    rules = [["INPUT", "-i", "lo", "-p", "tcp", end, str(port), "-j", "DROP"] for port in ports for end in ENDS]
    added = []
    try:
        for rule in rules:
            subprocess.run(["iptables", "-w", "-I", *rule], check=True, capture_output=True)
            added.append(rule)
        time.sleep(draw.uniform(1, 8))
    finally:
        for rule in added:
            subprocess.run(["iptables", "-w", "-D", *rule], check=True, capture_output=True)


def join_twice(training, draw):
    """Start a process with a number that is taken: JAX's coordinator ends the run, and the launcher starts it again."""
    members, sessions = training.list_members(), training.count_sessions()
    address = _find_coordinator(members)
    if not address:
        return None
    number = str(draw.randint(1, training.processes - 1))
    command = [sys.executable, "-c", JOIN_PROGRAM, address, str(training.processes), number]
    began, environment = time.monotonic(), os.environ | {"JAX_PLATFORMS": "cpu"}
    stranger = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        training.wait_until(lambda: training.count_sessions() > sessions)
    finally:
        stranger.kill()
        stranger.wait()
    return time.monotonic() - began


def _find_coordinator(members: list[int]) -> str:
    """Return the address that the launcher has given its processes; empty while there are none."""
    for member in members:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{member}/cmdline").read_text().split("\0")
            if "--coordinator" in words:
                return words[words.index("--coordinator") + 1]
    return ""


def _list_checked_ports(training: ChaosTraining) -> list[int]:
    """Return the ports that the processes listen on, among which, once they train, must be the coordinator's."""
    members = training.list_members()
    ports = _list_ports(members)
    is_training = training.has_trained() and training.find_last_step() < training.last_step
    if is_training and int(_find_coordinator(members).rpartition(":")[2]) not in ports:
        raise TrialError(f"nobody listens on the coordinator's port, only on {ports}")
    return ports


def _list_ports(processes):
    """Return the TCP ports that these processes listen on."""
    table = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    lines = [line for line in table if any(f"pid={process}," in line for process in processes)]
    return sorted({int(line.split()[3].rpartition(":")[2]) for line in lines})
