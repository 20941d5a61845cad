"""Processes that are alive but make no progress: asleep in the middle of the loop, or stopped by a signal."""

import os
import signal
import subprocess
import sys

import pytest
from faults.test_stop import SETTINGS, TIMEOUT_S, start, wait_for_exit, wait_for_step
from support.short_run import OPTIONS

STUCK = 70


def run_program(program, *arguments):
    """Run a program that ends by itself."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


SLEEPING_PROGRAM = """
import sys, time
from podscale.cli import main as cli
from podscale.data import prefetch

def sleep(self, take=prefetch.Batches.__next__, seen=[]):
    seen.append(1)
    if len(seen) == 5:
        time.sleep(300)
    return take(self)

prefetch.Batches.__next__ = sleep
sys.argv = ["podscale", "train", *sys.argv[1:]]
cli.run()
"""


@pytest.mark.slow
def test_a_process_that_sleeps_is_ended_and_its_stacks_are_written(tmp_path):
    more = ["--pod.virtual", "1x1", "--plan.timeout_s", "8", "--run", str(tmp_path / "run")]
    done = run_program(SLEEPING_PROGRAM, *SETTINGS, *more)
    assert done.returncode == STUCK, done.stderr[-2000:]
    assert "process 0 is stuck for" in done.stderr
    stacks = (tmp_path / "run" / "stuck-0.txt").read_text()
    assert "in sleep" in stacks
    assert "run_training" in stacks


BLOCKED_PROGRAM = """
import sys, threading
from podscale.cli import main as cli
from podscale.training.checkpoint.folder import CheckpointFolder

def write_part(self, attempt, name, blocks, write=CheckpointFolder.write_part):
    if attempt.step == 23:  # the last one
        threading.Event().wait(300)
    write(self, attempt, name, blocks)

CheckpointFolder.write_part = write_part
sys.argv = ["podscale", "train", "digits", *sys.argv[1:]]
cli.run()
"""


@pytest.mark.heavy
def test_a_last_checkpoint_whose_disk_hangs_ends_the_process(tmp_path):
    done = run_program(BLOCKED_PROGRAM, *OPTIONS, "--plan.timeout_s", "6", "--run", str(tmp_path / "run"))
    assert done.returncode == STUCK, done.stderr[-2000:]
    assert "(save the last state); stacks in" in done.stderr
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["12"]


@pytest.mark.processes(2)
def test_a_stopped_process_is_named_by_the_other(tmp_path):
    started = start(tmp_path, 2, "1x2", "--plan.timeout_s", "8")
    wait_for_step(tmp_path, 5)
    started[1].send_signal(signal.SIGSTOP)
    try:
        _, errors = started[0].communicate(timeout=TIMEOUT_S)
        assert started[0].returncode == STUCK, errors[-2000:]
        assert "process 0 is stuck for" in errors
        assert "waiting for process 1" in errors
    finally:
        started[1].kill()
    wait_for_exit(started[1:])
