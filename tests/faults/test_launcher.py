"""The launcher is asked to stop, or is itself stopped: at the moments that a signal to its processes cannot reach."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.processes import (
    PROGRAM,
    SETTINGS,
    STEPS,
    list_children,
    start,
    start_launcher,
    wait_for_exit,
    wait_for_step,
    wait_for_success,
)

PREEMPTED, INTERRUPTED = 75, 130

# The unchanged command, but the launcher gets a signal just before it starts a process: the given one, counted over all
# attempts. The first attempt loses its last process at once, so that there is a restart.
SIGNALLED_PROGRAM = """
import os, signal, subprocess, sys
from podscale.cli import main as cli
from podscale.processes import launch

number, at = int(sys.argv.pop(1)), int(sys.argv.pop(1))
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
started = []

class SignallingPopen(subprocess.Popen):
    def __init__(self, *args, **more):
        if len(started) == at:
            os.kill(os.getpid(), number)
        super().__init__(*args, **more)
        started.append(self)
        if len(started) == 2 and at != 1:
            self.kill()

subprocess.Popen = SignallingPopen
cli.run()
"""


CODES = {signal.SIGTERM: PREEMPTED, signal.SIGHUP: PREEMPTED, signal.SIGINT: INTERRUPTED}


def pair_signals_with_moments():
    """Yield all pairs; every signal and every moment is in one that is not slow."""
    for i, (number, code) in enumerate(CODES.items()):
        for at in (1, 2, 3):
            yield pytest.param(number, code, at, marks=() if at == i + 1 else pytest.mark.slow)


@pytest.mark.parametrize(("number", "code", "at"), list(pair_signals_with_moments()))
def test_a_signal_while_processes_are_started_ends_the_command(tmp_path, number, code, at):
    """Before the second process, before the first one of a restart, and between the processes of a restart."""
    command = ["launch", "-n", 2, "--restarts", 3, "train", *SETTINGS, "--run", tmp_path / "run"]
    launcher = start([sys.executable, "-c", SIGNALLED_PROGRAM, int(number), at, *command])
    (exit_code,), ((out, err),) = wait_for_exit([launcher])
    assert exit_code == code, err[-3000:]
    assert not out
    assert err.count("starting again") == (at > 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_at_any_moment_of_a_start_ends_the_command(tmp_path, processes):
    """Once the processes have joined, the run is saved after its first call; before that, there is nothing to save."""
    codes = []
    for delay_s in (0.3, 1, 2, 3, 4, 6, 8, 10):
        launcher = start_launcher(processes, tmp_path / f"after-{delay_s}", "--train.epochs", 300)
        time.sleep(delay_s)
        launcher.send_signal(signal.SIGTERM)
        (code,), ((_, err),) = wait_for_exit([launcher])
        codes.append(code)
        assert code in (PREEMPTED, -signal.SIGTERM), err[-3000:]  # the latter: while Python itself starts
    assert PREEMPTED in codes


@pytest.mark.slow
@pytest.mark.processes(2)
def test_a_command_that_saves_nothing_ends_after_a_signal_too(tmp_path):
    logs = tmp_path / "logs"
    launcher = start([*PROGRAM, "launch", "-n", 2, "--logs", logs, "bench", "step", "digits", "--repeats", 1000000])
    deadline = time.monotonic() + 120
    while not is_joined(launcher) and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    (code,), ((_, err),) = wait_for_exit([launcher])
    assert code == PREEMPTED, err[-3000:]


def is_joined(launcher):
    """Whether JAX's runtime, which handles SIGTERM, connects all processes: they have the threads of its messages."""
    names = [
        {path.read_text()[:4] for path in Path(f"/proc/{child}/task").glob("*/comm")}
        for child in list_children(launcher)
    ]
    return len(names) == 2 and all("grpc" in threads for threads in names)


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize("killed", [False, True])
def test_a_stopped_launcher_stops_no_training_and_acts_when_it_continues(tmp_path, killed):
    """Its processes train to the end without it. If one of them dies meanwhile, the others notice by themselves."""
    launcher = start_launcher(2, tmp_path, "--plan.save_steps", 5, launch=["--restarts", 1])
    wait_for_step(tmp_path, 6, launcher)
    members = list_children(launcher)
    launcher.send_signal(signal.SIGSTOP)
    if killed:
        os.kill(members[1], signal.SIGKILL)
    deadline = time.monotonic() + 300
    while not all(map(has_ended, members)) and time.monotonic() < deadline:
        time.sleep(0.05)
    ended, finished = [has_ended(member) for member in members], (tmp_path / "summary.json").exists()
    launcher.send_signal(signal.SIGCONT)
    out, err = wait_for_success(launcher)
    assert all(ended)
    assert finished == (not killed)
    assert ("process 1 was killed by SIGKILL; starting again (1 of 1)" in err) == killed
    assert json.loads(out)["steps"] == STEPS


def has_ended(process):
    """Whether a process has ended and waits for its parent to ask for its exit code."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
