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
    assert_same_to_rounding,
    list_children,
    start,
    start_launcher,
    wait_for_exit,
    wait_for_step,
    wait_for_success,
)

from podscale.cli.main import main
from podscale.errors import UserError
from podscale.processes import launch
from podscale.processes.launch import ProcessExit

PREEMPTED = 75
MISTAKES = [
    (["-n", "2"], "launch needs a command"),
    (["-n", "0", "train"], "from 1 up"),
    (["-n", "2", "--restarts", "-1", "train"], "from 0 up"),
    (["-n", "2", "recipes"], "recipes runs in one process"),
    (["-n", "2", "train", "--process", "1"], "leave them out"),
    (["-n", "2", "train", "--trian.epochs", "3"], "did you mean --train.epochs"),
    (["-n", "2", "launch", "-n", "2", "train"], "launch runs in one process"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_starts_nothing(arguments, message, capfd, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    assert main(["launch", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_user_error_of_the_processes_is_printed_once_without_a_restart_and_logs_are_continued(tmp_path):
    log = tmp_path / "logs" / "process-1.log"
    log.parent.mkdir()
    log.write_text("of an earlier attempt\n")
    command = [*PROGRAM, "launch", "-n", 2, "--restarts", 5, "--logs", tmp_path / "logs", "train", "nonesuch"]
    (code,), ((out, err),) = wait_for_exit([start(command)])
    assert code == 2
    assert err.count("podscale: there is no recipe") == 1
    assert "starting again" not in err
    assert log.read_text().startswith("of an earlier attempt\n")
    assert "nonesuch" in log.read_text()
    assert not out


def test_the_cause_of_several_exits_is_a_signal_before_an_exit_code():
    assert launch._find_cause([ProcessExit(0, 69), ProcessExit(3, 1), ProcessExit(2, -9)]) == ProcessExit(2, -9)
    assert launch._find_cause([ProcessExit(0, 69), ProcessExit(3, 70)]) == ProcessExit(3, 70)
    assert ProcessExit(1, -15).code == 69


def test_the_coordinators_port_is_none_that_the_system_gives_to_connections():
    ports = {launch.find_free_port() for _ in range(20)}
    assert len(ports) > 1
    assert min(ports) >= 61440
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        assert min(ports) > int(file.read().split()[1])


def test_gpus_are_divided_among_the_processes(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert launch.assign_gpus(["train"], 2) == ["4,5", "6,7"]
    assert launch.assign_gpus(["train"], 1) == [None]
    assert launch.assign_gpus(["train", "--pod.virtual", "2x4"], 8) == [None] * 8
    with pytest.raises(UserError, match="8 processes cannot share 4 GPUs: start 4, or simulate"):
        launch.assign_gpus(["train"], 8)


def list_listening_addresses(pid):
    """Return local addresses on which a process listens, in the kernel's hexadecimal."""
    sockets = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{number}"))
        except FileNotFoundError:
            continue
    addresses = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            rows = [line.split() for line in file][1:]
        addresses += [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return addresses


# 127.0.0.1; the same as the kernel writes it for a socket that could do IPv6 as well
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def make_reachable(folder):
    """Return a command under which this machine's name resolves to an address that others can reach, as on clusters."""
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


@pytest.mark.heavy
@pytest.mark.processes(2)
def test_a_launched_training_listens_on_loopback_stops_on_sigterm_and_resumes(tmp_path, undisturbed_run):
    """On a simulated pod: SIGTERM to the launcher, then the same command again."""
    run = tmp_path / "run"
    first = start_launcher(2, run, "--pod.virtual", "2x2", under=make_reachable(tmp_path))
    wait_for_step(run, 5, first)
    addresses = [list_listening_addresses(pid) for pid in list_children(first)]
    first.send_signal(signal.SIGTERM)
    (code,), ((out, err),) = wait_for_exit([first])
    assert code == PREEMPTED, err[-3000:]
    assert not out
    assert len(addresses) == 2
    assert all(listening and set(listening) <= LOOPBACK for listening in addresses), addresses
    out, err = wait_for_success(start_launcher(2, run, "--pod.virtual", "2x2"))
    assert json.loads(out)["steps"] == STEPS
    assert "resuming after step" in err
    assert "cpu, 2x2 torus, 2 hosts" in err
    assert_same_to_rounding(run, undisturbed_run)


@pytest.mark.slow
@pytest.mark.processes(2)
def test_a_killed_process_is_named_and_the_run_restarts(tmp_path):
    launcher = start_launcher(2, tmp_path, "--plan.save_steps", 5, launch=["--restarts", 2])
    wait_for_step(tmp_path, 17, launcher)
    os.kill(list_children(launcher)[1], signal.SIGKILL)
    out, err = wait_for_success(launcher)
    assert "podscale: process 1 was killed by SIGKILL; starting again (1 of 2)" in err
    resumed_step = int(re.search(r"resuming after step (\d+)", err)[1])
    assert resumed_step in (10, 15, 20)  # the one before, if the last was not yet written
    assert json.loads(out)["steps"] == STEPS


@pytest.mark.slow
@pytest.mark.processes(2)
def test_without_restarts_a_killed_process_is_named_and_all_end(tmp_path):
    launcher = start_launcher(2, tmp_path)
    wait_for_step(tmp_path, 5, launcher)
    members = list_children(launcher)
    os.kill(members[1], signal.SIGKILL)
    (code,), ((_, err),) = wait_for_exit([launcher])
    assert code == 69
    assert "podscale: process 1 was killed by SIGKILL\n" in err
    assert not any(os.path.exists(f"/proc/{member}") for member in members)


@pytest.mark.slow
@pytest.mark.processes(2)
def test_processes_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    launcher = start_launcher(2, tmp_path)
    wait_for_step(tmp_path, 5, launcher)
    members = list_children(launcher)
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{member}") for member in members) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{member}") for member in members)
