"""A process that must end does so, whatever its disk and its output are like."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from podscale.processes.exit_codes import PEER_LOST, STUCK

TESTS = Path(__file__).parents[1]
LIMIT_S = 60
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
STUCK_PROGRAM = """
import sys, threading
from pathlib import Path
from podscale.processes import watchdog
from podscale.processes.monitor import Monitor

watchdog.LIMIT_S = 0.2
with Monitor().watch(watchdog.Watchdog(0.1, Path(sys.argv[1]))):
    threading.Event().wait(600)
"""
LOST_PROGRAM = """
import threading
from support.key_values import LocalClient
from podscale.processes.heartbeat import Heartbeat
from podscale.processes.key_value_store import KeyValueStore
from podscale.processes.monitor import Monitor

store = KeyValueStore(LocalClient())
print("what a full disk does not take")
beats = Heartbeat(store, 1, 2, heartbeat_s=1.0)
beats.request_exit(69, "process 0 is gone")
monitor = Monitor(store)
with monitor.watch(beats):
    threading.Event().wait(600)
"""


def run_program(text, *arguments, **settings):
    """Run a program whose stdout has a buffer."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(TESTS)])
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False, **settings
    )


def test_a_watchdog_ends_its_process_though_the_disk_for_the_stacks_hangs(tmp_path):
    os.mkfifo(tmp_path / "stuck-0.txt")  # to open it waits for a reader, as a disk that is gone waits for ever
    done = run_program(STUCK_PROGRAM, tmp_path)
    assert done.returncode == STUCK, done.stderr


@needs_full
def test_a_process_that_has_lost_another_ends_though_its_output_is_on_a_full_disk():
    with open("/dev/full", "w") as full:
        done = run_program(LOST_PROGRAM, stdout=full)
    assert done.returncode == PEER_LOST, done.stderr
    assert done.stderr == (
        "podscale: process 0 is gone; the same command resumes from the last checkpoint, if there is one\n"
    )


@needs_full
@pytest.mark.parametrize(("arguments", "code"), [(("recipes",), 0), (("recipes", "-x"), 2), (("train", "no.toml"), 2)])
def test_a_command_whose_output_is_on_a_full_disk_ends_with_its_own_exit_code(arguments, code, tmp_path):
    program = "from podscale.cli.main import run; print('what a full disk does not take'); run()"
    with open("/dev/full", "w") as full:
        done = run_program(program, *arguments, stdout=full, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
