"""What faults of the campaign do: each is injected into a small process or its checkpoints, in place of a training."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from support import chaos_surroundings as around
from support.chaos_training import NOTHING, ChaosTraining, TrialError

from podscale.training.checkpoint.checkpoints import Checkpoints, DamagedCheckpointError

LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[2].rpartition(":")[2]))) as server:
    while True:
        with server.accept()[0] as peer:
            print(len(peer.recv(100000)), flush=True)
"""
ALLOCATE = "data = bytearray(1 << 30); data[::4096] = b'1' * (1 << 18); import time; time.sleep(60)"
SLEEP = "import time; time.sleep(60)"


class Draw(random.Random):
    """Draws that make a fault short."""

    def uniform(self, *_):
        return 0.2


class StandIn(ChaosTraining):
    """A process of the same places and methods as a training."""

    program, words = SLEEP, ()

    def start(self, under=(), environment=NOTHING):
        command = [*under, sys.executable, "-c", self.program, *self.words]
        self.close()
        self.process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)

    def close(self):
        if self.process is not None:
            self.process.stdout.close()

    def list_members(self):
        return [self.process.pid]

    def has_trained(self):
        return True


@pytest.fixture
def training(tmp_path):
    (tmp_path / "run").mkdir()
    stand_in = StandIn(tmp_path / "run", tmp_path / "programs", 4)
    yield stand_in
    stand_in.end()
    stand_in.close()


@pytest.fixture
def saved(training):
    """The stand-in, with checkpoints 1, 2 and 3."""
    with Checkpoints(training.checkpoints, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), accuracy=0.5)
    training.start()
    return training


def make_state(step):
    return {"w": jnp.full(1000, step, jnp.float32)}


def restore(training, step):
    with Checkpoints(training.checkpoints, read_only=True) as checkpoints:
        return float(checkpoints.restore(step, make_state(0))["w"][0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["replace_file", "copy_checkpoint"])
def test_only_the_newest_checkpoint_is_damaged(saved, kind, seed):
    getattr(around, kind)(saved, Draw(seed))
    newest = saved.list_steps()[-1]
    assert newest > 3 or kind == "replace_file"
    with pytest.raises(DamagedCheckpointError):
        restore(saved, newest)
    assert [restore(saved, step) for step in saved.list_steps()[:-1]] == saved.list_steps()[:-1]


@pytest.mark.parametrize("kind", ["hide_checkpoints", "make_unreadable"])
def test_a_session_meets_checkpoints_that_are_away_or_unreadable_and_they_are_whole_after_it(saved, kind):
    def look():
        while not seen:
            try:
                seen.extend(["away"] if not saved.list_steps() else [])
                seen.extend(path for path in saved.checkpoints.rglob("*") if path.is_symlink())
            except OSError:  # the folder goes while it is listed
                continue

    seen, looking = [], threading.Thread(target=look, daemon=True)
    looking.start()
    getattr(around, kind)(saved, Draw(0))
    looking.join(30)
    assert seen
    assert [restore(saved, step) for step in (1, 2, 3)] == [1, 2, 3]
    assert saved.process.poll() is None


def test_a_run_that_starts_from_scratch_while_its_checkpoints_are_away_is_noticed(saved):
    saved.program = "import os, sys, time; os.makedirs(sys.argv[1]); time.sleep(60)"
    saved.words = (str(saved.checkpoints / "1"),)
    draw = Draw(0)
    draw.uniform = lambda *_: 5.0
    with pytest.raises(TrialError, match="started from scratch"):
        around.hide_checkpoints(saved, draw)


def test_stray_files_are_left_alone_by_a_run_but_for_its_own_leftovers(saved):
    around.leave_stray_files(saved, Draw(0))
    with Checkpoints(saved.checkpoints) as checkpoints:
        assert checkpoints.steps() == [1, 2, 3]
    left = os.listdir(saved.checkpoints)
    assert {"pipe", "loop", "notes.txt", os.fsdecode(b"\xff\xe4")} < set(left)
    assert len([name for name in left if name.startswith("stray-")]) == around.STRAY_FILES
    assert "999-0.part" not in left


def read_environment(pid):
    """Return a process's variables; the kernel shows none until the new program is laid out in memory."""
    path, deadline = Path(f"/proc/{pid}/environ"), time.monotonic() + 60
    while not (content := path.read_bytes()):
        assert time.monotonic() < deadline
    return content.split(b"\0")


def test_sessions_start_in_other_surroundings(saved):
    changed = set()
    for seed in range(12):
        around.change_surroundings(saved, Draw(seed))
        names = {line.partition(b"=")[0].decode() for line in read_environment(saved.process.pid)}
        changed |= names & {"TZ", "LC_ALL", "SHIFTED_CLOCK_S"} - set(os.environ)
    expected = {"TZ", "LC_ALL", *(["SHIFTED_CLOCK_S"] if around.COMPILER else [])}
    assert changed == expected - set(os.environ)


@pytest.mark.skipif(not around.CAN_LIMIT_MEMORY, reason="needs root and a memory controller of cgroups, version 1")
def test_a_session_with_too_little_memory_is_killed(saved):
    saved.program = ALLOCATE
    around.limit_memory(saved, Draw(0))
    assert saved.process.returncode == -signal.SIGKILL


@pytest.fixture
def listening(training):
    """The stand-in, and the port that it listens on as a coordinator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    training.program, training.words = LISTEN, ("--coordinator", f"127.0.0.1:{port}")
    training.start()
    deadline = time.monotonic() + 60
    while port not in around._list_ports([training.process.pid]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return training, port


def test_garbage_is_sent_to_the_port_of_the_coordinator(listening):
    training, _ = listening
    around.intrude(training, Draw(0))
    assert int(training.process.stdout.readline()) > 10


def test_a_training_without_a_coordinator_fails_a_trial_that_would_send_it_garbage(saved):
    saved.kill()
    saved.words = ("--coordinator", "127.0.0.1:9")
    saved.start()
    with pytest.raises(TrialError, match="nobody listens on the coordinator's port"):
        around.intrude(saved, Draw(0))


@pytest.mark.skipif(not around.CAN_CUT_LINKS, reason="needs root and iptables")
def test_packets_are_lost_for_a_while_and_then_no_more(listening):
    training, port = listening
    reached = []

    class TryToConnect(Draw):
        def uniform(self, *_):
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.3)
            reached.append(False)
            return 0.0

    around.cut_links(training, TryToConnect(0))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(b"12")
    assert reached == [False]
    rules = subprocess.run(["iptables", "-S"], capture_output=True, text=True, check=True).stdout
    assert f"port {port} " not in rules
