"""`podscale launch`: several processes on this machine as one command."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest
from support.processes import (
    PROGRAM,
    STEPS,
    alone,
    assert_same_to_rounding,
    children,
    ended,
    launched,
    started,
    succeeded,
    until_step,
)

from podscale.cli.main import main
from podscale.errors import UserError
from podscale.processes import launch
from podscale.processes.launch import ProcessExit

PREEMPTED = 75
MISTAKES = [
    (["-n", "2"], "launch what?"),
    (["-n", "0", "train"], "from 1 up"),
    (["-n", "2", "--restarts", "-1", "train"], "from 0 up"),
    (["-n", "2", "recipes"], "recipes is for one process"),
    (["-n", "2", "train", "--process", "1"], "leave them out"),
    (["-n", "2", "train", "--trian.epochs", "3"], "did you mean --train.epochs"),
    (["-n", "2", "launch", "-n", "2", "train"], "launch is for one process"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_starts_nothing(arguments, words, capfd, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    assert main(["launch", *arguments]) == 2
    assert words in capfd.readouterr().err


def test_what_the_processes_refuse_is_said_once_and_not_tried_again(tmp_path):
    command = [*PROGRAM, "launch", "-n", 2, "--restarts", 5, "--logs", tmp_path / "logs", "train", "nonesuch"]
    (code,), ((out, err),) = ended([started(command)])
    assert code == 2
    assert err.count("podscale: there is no recipe") == 1
    assert "starting again" not in err
    assert "nonesuch" in (tmp_path / "logs" / "process-1.log").read_text()
    assert not out


def test_deaths_are_told_and_signals_come_before_what_followed_from_them():
    assert launch._find_cause([ProcessExit(0, 69), ProcessExit(3, 1), ProcessExit(2, -9)]) == ProcessExit(2, -9)
    assert launch._find_cause([ProcessExit(0, 69), ProcessExit(3, 70)]) == ProcessExit(3, 70)
    assert ProcessExit(1, -15).code == 69


def test_gpus_are_shared_among_the_processes(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert launch._assign_gpus(["train"], 2) == ["4,5", "6,7"]
    assert launch._assign_gpus(["train"], 1) == [None]
    assert launch._assign_gpus(["train", "--pod.virtual", "2x4"], 8) == [None] * 8
    with pytest.raises(UserError, match="8 processes cannot share 4 GPUs: start 4, or simulate"):
        launch._assign_gpus(["train"], 8)


def listening(pid):
    """Local addresses, in the kernel's hexadecimal, on which a process listens."""
    sockets = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{number}"))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            rows = [line.split() for line in file][1:]
        found += [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return found


# 127.0.0.1; the same as the kernel writes it for a socket that could do IPv6 as well
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def reachable(folder):
    """A command under which this machine's name stands for an address that others can reach, as on most clusters."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return []
        address = probe.getsockname()[0]
    if os.geteuid() or not shutil.which("unshare") or address.startswith("127."):
        return []
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} reachable\n")
    script = f'hostname reachable && mount --bind {folder}/hosts /etc/hosts && exec "$@"'
    return ["unshare", "--uts", "--mount", "bash", "-c", script, "bash"]


@pytest.mark.processes(2)
def test_a_launched_training_listens_on_loopback_stops_when_asked_and_goes_on(tmp_path):
    """The machine's share of a simulated pod; SIGTERM to the launcher; the same command again."""
    run = tmp_path / "run"
    alone(tmp_path / "one", "2x2")
    first = launched(2, run, "--pod.virtual", "2x2", under=reachable(tmp_path))
    until_step(run, 5, first)
    addresses = [listening(pid) for pid in children(first)]
    first.send_signal(signal.SIGTERM)
    (code,), ((out, err),) = ended([first])
    assert code == PREEMPTED, err[-3000:]
    assert not out
    assert len(addresses) == 2
    assert all(found and set(found) <= LOOPBACK for found in addresses), addresses
    out, err = succeeded(launched(2, run, "--pod.virtual", "2x2"))
    assert json.loads(out)["steps"] == STEPS
    assert "resuming after step" in err
    assert "cpu, 2x2 torus, 2 hosts" in err
    assert_same_to_rounding(run, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.processes(2)
def test_a_killed_process_is_named_and_the_run_resumes_by_itself(tmp_path):
    launcher = launched(2, tmp_path, "--plan.save_steps", 5, launch=["--restarts", 2])
    until_step(tmp_path, 17, launcher)
    os.kill(children(launcher)[1], signal.SIGKILL)
    out, err = succeeded(launcher)
    assert "podscale: process 1 was killed by SIGKILL; starting again (1 of 2)" in err
    resumed = int(re.search(r"resuming after step (\d+)", err)[1])
    assert resumed in (10, 15, 20)  # the one before, if the last had not yet been written
    assert json.loads(out)["steps"] == STEPS


@pytest.mark.slow
@pytest.mark.processes(2)
def test_without_restarts_the_death_is_named_and_all_end(tmp_path):
    launcher = launched(2, tmp_path)
    until_step(tmp_path, 5, launcher)
    members = children(launcher)
    os.kill(members[1], signal.SIGKILL)
    (code,), ((_, err),) = ended([launcher])
    assert code == 69
    assert "podscale: process 1 was killed by SIGKILL\n" in err
    assert not any(os.path.exists(f"/proc/{member}") for member in members)


@pytest.mark.slow
@pytest.mark.processes(2)
def test_processes_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    launcher = launched(2, tmp_path)
    until_step(tmp_path, 5, launcher)
    members = children(launcher)
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{member}") for member in members) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{member}") for member in members)
