"""Processes that die, fail or stop alone: the others end with the same code and say why, and the run goes on."""

import json
import os
import re
import signal
import sys
import time

import pytest
from support.processes import (
    SETTINGS,
    STEPS,
    alone,
    assert_same_to_rounding,
    by_hand,
    children,
    ended,
    free_port,
    launched,
    losses,
    started,
    succeeded,
    train,
    until_step,
)

GONE, STUCK, PREEMPTED, HEARTBEAT_S = 69, 70, 75, 30
HEARTBEAT = ["--pod.heartbeat_s", HEARTBEAT_S]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What one process with four devices trains."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    alone(folder, "2x2")
    return folder


def killed(processes, victim, folder, step):
    """Kills one of several processes; exit codes and errors of the others, and the seconds until all had ended."""
    at_work = by_hand(processes, folder, "--pod.virtual", "2x2", "--plan.save_steps", 5, *HEARTBEAT)
    until_step(folder, step, at_work[0])
    at_work[victim].send_signal(signal.SIGKILL)
    since = time.monotonic()
    codes, outputs = ended(at_work)
    seconds = time.monotonic() - since
    others = [number for number in range(processes) if number != victim]
    return [codes[number] for number in others], [outputs[number][1] for number in others], seconds


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize("processes", [2, 4])
def test_whoever_is_killed_the_others_end_by_name_and_the_run_goes_on(tmp_path, undisturbed, processes):
    """First the last process, in the middle of sums; then, resumed, the first one, which coordinates."""
    victim = processes - 1
    codes, errors, seconds = killed(processes, victim, tmp_path, step=8)
    assert codes == [GONE] * (processes - 1), errors[0][-3000:]
    assert all(f"podscale: process {victim} on " in text and "is gone" in text for text in errors), errors
    assert seconds < HEARTBEAT_S
    print(f"{processes} processes, one killed: all ended after {seconds:.1f} s")
    codes, errors, seconds = killed(processes, 0, tmp_path, step=20)
    assert codes == [GONE] * (processes - 1), errors[0][-3000:]
    assert all("process 0, through which all find each other, is gone" in text for text in errors)
    assert seconds < HEARTBEAT_S + 10
    print(f"{processes} processes, the first one killed: all ended after {seconds:.1f} s")
    _, err = succeeded(train(tmp_path, "--pod.virtual", "2x2"))
    assert "resuming after step" in err
    assert_same_to_rounding(tmp_path, undisturbed)


REFUSER = """
import sys
from podscale.cli import main as cli
from podscale.data import prefetch
from podscale.errors import UserError

def refusing(self, take=prefetch.Batches.__next__, seen=[]):
    seen.append(1)
    if len(seen) == 5:
        raise UserError("3 of 10 pictures cannot be read")
    return take(self)

if sys.argv[sys.argv.index("--process") + 1] == "1":
    prefetch.Batches.__next__ = refusing
sys.argv = ["podscale", "train", *sys.argv[1:]]
cli.run()
"""


@pytest.mark.slow
@pytest.mark.processes(2)
def test_what_one_process_refuses_ends_all_with_its_sentence(tmp_path):
    join = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2, "--run", tmp_path]
    at_work = [started([sys.executable, "-c", REFUSER, *SETTINGS, *join, "--process", i]) for i in range(2)]
    codes, outputs = ended(at_work)
    assert codes == [2, 2], outputs
    assert all("podscale: 3 of 10 pictures cannot be read" in err for _, err in outputs)
    assert all("Traceback" not in err for _, err in outputs)


@pytest.mark.slow
@pytest.mark.processes(4)
def test_a_stopped_process_is_ended_and_the_run_resumes_by_itself(tmp_path, undisturbed):
    """Alive, but SIGSTOP: the watchdogs of the others end them, the launcher ends it and starts all again.

    One of them ends first. The others then find either that they are stuck as well, or that a sum has failed and the
    stopped process gives no sign of life.
    """
    more = ["--pod.virtual", "2x2", "--plan.timeout_s", 20, "--plan.save_steps", 5]
    launcher = launched(4, tmp_path, *more, launch=["--restarts", 1])
    until_step(tmp_path, 12, launcher)
    victim = children(launcher)[2]
    os.kill(victim, signal.SIGSTOP)
    out, err = succeeded(launcher)
    assert ("is stuck for" in err and "waiting for process 2" in err) or "process 2 on" in err
    assert re.search(rf"ended with exit code ({STUCK}|{GONE}); starting again \(1 of 1\)", err)
    assert "resuming after step " in err
    assert json.loads(out)["steps"] == STEPS
    assert not os.path.exists(f"/proc/{victim}")
    assert_same_to_rounding(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.processes(4)
def test_fewer_processes_and_devices_go_on_with_a_run(tmp_path):
    """8 devices in 4 processes, 4 in 2, 2 in one, 1: the same samples and groups, so the same losses to rounding."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    alone(whole, "2x4")
    for processes, virtual in ((4, "2x4"), (2, "2x2"), (1, "1x2")):
        step = 5 + (len(losses(run)) if run.exists() else 0)
        going = launched(processes, run, "--pod.virtual", virtual)
        until_step(run, step, going)
        going.send_signal(signal.SIGTERM)
        (code,), ((_, err),) = ended([going])
        assert code == PREEMPTED, err[-3000:]
        assert f"torus, {processes} hosts" in err or processes == 1
    assert len(losses(run)) < STEPS
    succeeded(train(run, "--pod.virtual", "1x1"))
    assert_same_to_rounding(run, whole)
