"""Processes that die, fail or stop alone: the others end with the same code and report why, and the run resumes."""

import json
import os
import re
import signal
import sys
import time

import pytest
from support.dying import write_dying_site
from support.processes import (
    SETTINGS,
    STEPS,
    assert_same_to_rounding,
    find_free_port,
    list_children,
    read_losses,
    start,
    start_launcher,
    start_processes,
    start_training,
    train_in_process,
    wait_for_exit,
    wait_for_step,
    wait_for_success,
)

PEER_LOST, STUCK, PREEMPTED, HEARTBEAT_S = 69, 70, 75, 30
HEARTBEAT = ["--pod.heartbeat_s", HEARTBEAT_S]


def kill_one(processes, victim, folder, step):
    """Kill one of several processes; return exit codes and errors of the others, and seconds until all had ended."""
    started = start_processes(processes, folder, "--pod.virtual", "2x2", "--plan.save_steps", 5, *HEARTBEAT)
    wait_for_step(folder, step, started[0])
    started[victim].send_signal(signal.SIGKILL)
    start_time = time.monotonic()
    codes, outputs = wait_for_exit(started)
    seconds = time.monotonic() - start_time
    others = [number for number in range(processes) if number != victim]
    return [codes[number] for number in others], [outputs[number][1] for number in others], seconds


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize("processes", [2, 4])
def test_killing_any_process_ends_the_others_with_its_name_and_the_run_resumes(tmp_path, undisturbed_run, processes):
    """First the last process, during a collective; then, resumed, the main process, which coordinates."""
    victim = processes - 1
    codes, errors, seconds = kill_one(processes, victim, tmp_path, step=8)
    assert codes == [PEER_LOST] * (processes - 1), errors[0][-3000:]
    assert all(f"podscale: process {victim} on " in text and "is gone" in text for text in errors), errors
    assert seconds < HEARTBEAT_S
    print(f"{processes} processes, one killed: all ended after {seconds:.1f} s")
    codes, errors, seconds = kill_one(processes, 0, tmp_path, step=20)
    assert codes == [PEER_LOST] * (processes - 1), errors[0][-3000:]
    assert all("process 0, through which all find each other, is gone" in text for text in errors)
    assert seconds < HEARTBEAT_S + 10
    print(f"{processes} processes, the first one killed: all ended after {seconds:.1f} s")
    _, err = wait_for_success(start_training(tmp_path, "--pod.virtual", "2x2"))
    assert "resuming after step" in err
    assert_same_to_rounding(tmp_path, undisturbed_run)


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize("moment", ["start", "written", "commit"])
def test_a_process_that_dies_in_a_save_ends_the_others_with_its_name(tmp_path, moment, monkeypatch):
    """Before it has written, before it reports that, and before it knows that the checkpoint is complete."""
    monkeypatch.setenv("PYTHONPATH", str(write_dying_site(tmp_path / "site", moment, victim=1)))
    run = tmp_path / "run"
    started = start_processes(2, run, "--pod.virtual", "1x2", "--plan.save_steps", 5, *HEARTBEAT)
    codes, outputs = wait_for_exit(started)
    assert codes == [PEER_LOST, -signal.SIGKILL], outputs[0][1][-3000:]
    assert "podscale: process 1 on " in outputs[0][1], outputs[0][1][-3000:]
    assert "is gone" in outputs[0][1]


REFUSING_PROGRAM = """
import sys
from podscale.cli import main as cli
from podscale.data import prefetch
from podscale.errors import UserError

def refuse(self, take=prefetch.Batches.__next__, seen=[]):
    seen.append(1)
    if len(seen) == 5:
        raise UserError("3 of 10 images cannot be read")
    return take(self)

if sys.argv[sys.argv.index("--process") + 1] == "1":
    prefetch.Batches.__next__ = refuse
sys.argv = ["podscale", "train", *sys.argv[1:]]
cli.run()
"""


@pytest.mark.slow
@pytest.mark.processes(2)
def test_a_user_error_in_one_process_ends_all_with_its_message(tmp_path):
    join = ["--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", 2, "--run", tmp_path]
    started = [start([sys.executable, "-c", REFUSING_PROGRAM, *SETTINGS, *join, "--process", i]) for i in range(2)]
    codes, outputs = wait_for_exit(started)
    assert codes == [2, 2], outputs
    assert all("podscale: 3 of 10 images cannot be read" in err for _, err in outputs)
    assert all("Traceback" not in err for _, err in outputs)


@pytest.mark.slow
@pytest.mark.processes(4)
def test_a_stopped_process_is_killed_and_the_run_restarts(tmp_path, undisturbed_run):
    """A process gets SIGSTOP: the watchdogs of the others end them, the launcher kills it and starts all again.

    One of the others ends first. The remaining ones then find either that they are stuck as well, or that a collective
    has failed and the stopped process gives no sign of life.
    """
    more = ["--pod.virtual", "2x2", "--plan.timeout_s", 20, "--plan.save_steps", 5]
    launcher = start_launcher(4, tmp_path, *more, launch=["--restarts", 1])
    wait_for_step(tmp_path, 12, launcher)
    victim = list_children(launcher)[2]
    os.kill(victim, signal.SIGSTOP)
    out, err = wait_for_success(launcher)
    assert ("is stuck for" in err and "waiting for process 2" in err) or "process 2 on" in err
    assert re.search(rf"ended with exit code ({STUCK}|{PEER_LOST}); starting again \(1 of 1\)", err)
    assert "resuming after step " in err
    assert json.loads(out)["steps"] == STEPS
    assert not os.path.exists(f"/proc/{victim}")
    assert_same_to_rounding(tmp_path, undisturbed_run)


@pytest.mark.slow
@pytest.mark.processes(4)
def test_a_run_resumes_on_fewer_processes_and_devices(tmp_path):
    """8 devices in 4 processes, 4 in 2, 2 in one, 1: the same samples and groups, so the same losses to rounding."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_in_process(whole, "2x4")
    for processes, virtual in ((4, "2x4"), (2, "2x2"), (1, "1x2")):
        step = 5 + (len(read_losses(run)) if run.exists() else 0)
        launcher = start_launcher(processes, run, "--pod.virtual", virtual)
        wait_for_step(run, step, launcher)
        launcher.send_signal(signal.SIGTERM)
        (code,), ((_, err),) = wait_for_exit([launcher])
        assert code == PREEMPTED, err[-3000:]
        assert f"torus, {processes} hosts" in err or processes == 1
    assert len(read_losses(run)) < STEPS
    wait_for_success(start_training(run, "--pod.virtual", "1x1"))
    assert_same_to_rounding(run, whole)
