"""Ctrl-C and a lost terminal, of several processes: the first saves, a second ends at once, and messages are true."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from support.processes import (
    PROGRAM,
    SETTINGS,
    list_children,
    make_environment,
    start_launcher,
    start_processes,
    wait_for_exit,
    wait_for_step,
    wait_for_success,
)

PREEMPTED, INTERRUPTED = 75, 130
STOPPING = "podscale: stopping: this step will be saved; press Ctrl-C again to end at once"
LONG = ["--train.epochs", 300, "--plan.save_steps", 1000]
pytestmark = pytest.mark.processes(2)


@pytest.fixture(autouse=True)
def _default_hangup():
    """Let processes that tests start have the default of SIGHUP, even if this one runs under nohup."""
    previous = signal.signal(signal.SIGHUP, lambda *_: None)  # what is handled here has its default in a new program
    yield
    signal.signal(signal.SIGHUP, previous)


def list_steps(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())


def find_saved_step(errors):
    """Return the step that the message says is saved."""
    (step,) = re.findall(
        r"podscale: .*step (\d+)(?:, which)? is saved(?:,|;) .*the same command resumes from there", errors
    )
    return int(step)


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_ctrl_c_of_a_launched_run_saves_and_the_same_command_resumes(tmp_path, processes):
    more = ["--pod.virtual", f"1x{processes}", *LONG, "--train.epochs", 60]  # more than a run does before it stops
    launcher = start_launcher(processes, tmp_path, *more, launch=["--restarts", 3])
    wait_for_step(tmp_path, 5, launcher)
    launcher.send_signal(signal.SIGINT)
    (code,), ((out, err),) = wait_for_exit([launcher])
    assert code == INTERRUPTED, err[-3000:]
    assert not out
    assert STOPPING in err
    assert "starting again" not in err
    assert list_steps(tmp_path)[-1] == find_saved_step(err)
    assert "Traceback" not in err
    if processes > 2:
        out, resumed = wait_for_success(start_launcher(processes, tmp_path, *more))
        assert f"resuming after step {find_saved_step(err)}" in resumed
        assert json.loads(out)["steps"] == 674  # 60 epochs of 1,437 images in batches of 128


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_second_ctrl_c_ends_a_run_that_cannot_save(tmp_path, processes):
    """One process is stopped, so that the others wait for it in a collective, and the checkpoint never comes."""
    launcher = start_launcher(processes, tmp_path, "--pod.virtual", "2x2", *LONG)
    wait_for_step(tmp_path, 5, launcher)
    members = list_children(launcher)
    os.kill(members[-1], signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    while STOPPING not in launcher.stderr.readline():
        assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    (code,), ((out, err),) = wait_for_exit([launcher])
    assert code == INTERRUPTED, err[-3000:]
    assert not out
    assert "the last checkpoint, if there is one" in err
    assert list_steps(tmp_path) == []
    assert not any(os.path.exists(f"/proc/{member}") for member in members)


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_of_a_launched_run_ends_it(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")  # so that compiling takes seconds
    launcher = start_launcher(2, tmp_path, "--pod.virtual", "1x2", *LONG)
    deadline = time.monotonic() + 300
    while not (tmp_path / "sample.png").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # the last file before compilation
    launcher.send_signal(signal.SIGINT)
    (code,), ((_, err),) = wait_for_exit([launcher])
    assert code == INTERRUPTED, err[-3000:]
    assert list_steps(tmp_path) == []
    assert re.search(
        "the same command starts again|from the last checkpoint, if there is one|podscale: interrupted$", err
    )
    assert "resumes" not in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGHUP, PREEMPTED)])
@pytest.mark.parametrize("target", [0, 1])
def test_a_signal_to_one_of_several_processes_makes_all_save(tmp_path, number, code, target):
    started = start_processes(2, tmp_path, "--pod.virtual", "1x2", *LONG)
    wait_for_step(tmp_path, 5, started[0])
    started[target].send_signal(number)
    codes, outputs = wait_for_exit(started)
    assert codes[target] == code, outputs[target][1][-3000:]
    assert codes[1 - target] == PREEMPTED, outputs[1 - target][1][-3000:]
    assert {find_saved_step(err) for _, err in outputs} == {list_steps(tmp_path)[-1]}


def start_alone(folder, *under):
    command = [*under, *PROGRAM, "train", *SETTINGS, "--pod.virtual", "1x1", *LONG, "--run", folder]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), env=make_environment(), text=True, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_terminal_that_is_gone_ends_a_run_saved_unless_nohup_asks_otherwise(tmp_path, processes):
    for name, under in (("ends", []), ("goes-on", ["nohup"])):
        folder = tmp_path / name
        if processes == 1:
            process = start_alone(folder, *under)
        else:
            process = start_launcher(2, folder, "--pod.virtual", "1x2", *LONG, under=under)
        wait_for_step(folder, 5, process)
        process.send_signal(signal.SIGHUP)
        if under:
            wait_for_step(folder, 40, process)
            process.send_signal(signal.SIGTERM)
        (code,), ((_, err),) = wait_for_exit([process])
        assert code == PREEMPTED, err[-3000:]
        assert list_steps(folder)[-1] == find_saved_step(err)
