"""Processes that monitor each other through JAX's store: a real one, with three clients in one process."""

import json
import signal
import subprocess
import sys

import pytest
from support.key_values import LocalClient
from support.processes import find_free_port, make_environment

from podscale.processes import heartbeat
from podscale.processes.key_value_store import KeyValueStore, StoreError
from podscale.processes.monitor import Monitor

PROGRAM = """
import json, sys, threading, time
from jax._src.lib import _jax
from podscale.processes import heartbeat
from podscale.processes.monitor import Monitor
from podscale.processes.key_value_store import KeyValueStore

address = sys.argv[1]
service = _jax.get_distributed_runtime_service(address, 3)
stores = [_jax.get_distributed_runtime_client(address, number) for number in range(3)]
threads = [threading.Thread(target=store.connect) for store in stores]
[thread.start() for thread in threads], [thread.join() for thread in threads]

exits = {}

class RecordingHeartbeat(heartbeat.Heartbeat):
    def _exit(self, group_exit):
        exits.setdefault(self._process, group_exit)

stores = [KeyValueStore(store) for store in stores]
beats = zero, one, two = [RecordingHeartbeat(store, number, 3, heartbeat_s=5.0) for number, store in enumerate(stores)]
monitors = [Monitor(store) for store in stores]
[monitor.add(beat) for monitor, beat in zip(monitors, beats)]

def wait_until(is_ready, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not is_ready() and time.monotonic() < deadline:
        time.sleep(0.05)

results, passed = {}, []

def wait_for_peers(beat, after_s):
    time.sleep(after_s)
    beat.wait_for_peers()
    passed.append(time.monotonic() - start)

start = time.monotonic()
threads = [threading.Thread(target=wait_for_peers, args=case) for case in ((zero, 0), (one, 0), (two, 1.5))]
[thread.start() for thread in threads], [thread.join() for thread in threads]
results["all wait for the last"] = len(passed) == 3 and min(passed) >= 1.5
time.sleep(2)
results["no exit while all are alive"] = zero.read_exit() is None
monitors[2].stop()
two.leave()
one.report_trouble('the sum failed')
time.sleep(6)  # longer than the limit for a process that is gone
results["a process that has left is not missed"] = zero.read_exit() is None and not exits
monitors[1].stop()  # silent, as a dead process is
wait_until(lambda: len(exits) == 1)
results["reason"] = exits[0].reason if 0 in exits else ""
results["code"] = exits[0].code if 0 in exits else 0
results["the first request counts"] = one.request_exit(2, "something else") == zero.read_exit() == exits.get(0)
print(json.dumps(results), flush=True)
import os
os._exit(0)
"""


@pytest.mark.heavy
def test_a_process_that_leaves_is_not_missed_and_a_silent_one_is():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"127.0.0.1:{find_free_port()}"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    reason = results.pop("reason")
    assert results == {
        "all wait for the last": True,
        "no exit while all are alive": True,
        "a process that has left is not missed": True,
        "code": 69,
        "the first request counts": True,
    }
    assert reason.startswith("process 1 on ")
    assert "is gone: no sign of life for" in reason
    assert reason.endswith("(process 1: the sum failed)")


MEMBER = """
import sys, threading
from podscale.processes import group
group.join(sys.argv[1], 3, int(sys.argv[2]), heartbeat_s=3.0)
print("joined", flush=True)
threading.Event().wait(120)
"""


@pytest.mark.heavy
@pytest.mark.processes(3)
@pytest.mark.parametrize(
    ("victim", "sentence"),
    [(0, "process 0, through which all find each other, has not answered for 3 s"), (1, "process 1 on ")],
)
def test_a_stopped_process_is_named_by_all_others_before_the_runtime_aborts_them(victim, sentence):
    """Without waiting in a collective, which may notice sooner."""
    address, pipes = f"127.0.0.1:{find_free_port()}", {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", MEMBER, address]
    members = [
        subprocess.Popen([*command, str(number)], env=make_environment(), text=True, **pipes) for number in range(3)
    ]
    others = [member for number, member in enumerate(members) if number != victim]
    try:
        assert [member.stdout.readline() for member in members] == ["joined\n"] * 3
        members[victim].send_signal(signal.SIGSTOP)
        errors = [member.communicate(timeout=120)[1] for member in others]
    finally:
        for member in members:
            member.kill()
            member.communicate()
    assert [member.returncode for member in others] == [heartbeat.PEER_LOST] * 2, errors
    for text in errors:
        assert sentence in text
        assert "Terminating process" not in text, "JAX's runtime was first"


def test_signs_of_life_of_a_stranger_are_ignored():
    client = LocalClient()
    store = KeyValueStore(client)
    for name in ("99", "nobody"):
        client.key_value_set(f"{heartbeat.ALIVE}/{name}", "0 elsewhere")
    beats = heartbeat.Heartbeat(store, 0, 2, heartbeat_s=60.0)
    beats.exchange(store)
    assert beats.read_exit() is None
    assert client.values[f"{heartbeat.ALIVE}/0"].startswith("0 ")


@pytest.mark.parametrize(
    ("code", "has_hint"), [(1, False), (2, False), (65, False), (69, True), (70, True), (75, True), (130, False)]
)
def test_only_an_exit_after_which_a_restart_helps_says_that_the_run_resumes(code, has_hint, capsys):
    heartbeat.print_exit(heartbeat.GroupExit(code, "it ended"))
    hint = "; the same command resumes from the last checkpoint, if there is one" if has_hint else ""
    assert capsys.readouterr().err == f"podscale: it ended{hint}\n"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:16258: Connection reset by peer"), True),
        (heartbeat.CollectiveFailedError("cannot save together: the barrier timed out"), True),
        (ValueError("operands could not be broadcast together"), False),
        (KeyError("UNKNOWN: "), False),
    ],
)
def test_errors_of_collectives_differ_from_other_errors(error, expected):
    assert heartbeat.is_collective_failure(error) is expected


RESET = "Gloo AllReduce failed: [pair.cc:534] Read error [127.0.0.1]:16258: Connection reset by peer"
UNREACHABLE = "process 0 could not reach the others: "


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (StoreError("UNAVAILABLE: failed to connect to all addresses\nmore"), 69, "UNAVAILABLE: failed to connect"),
        (StoreError("ABORTED: the barrier"), 69, "ABORTED: the barrier"),
        (ValueError(f"UNKNOWN: {RESET}"), 69, f"UNKNOWN: {RESET}"),
        (StoreError(f"FAILED_PRECONDITION: Buffer Definition Event: {RESET}"), 69, "FAILED_PRECONDITION: Buffer"),
        (heartbeat.CollectiveFailedError("process 0 has decided nothing for 3600 s"), 69, "process 0 has decided"),
        (StoreError("INTERNAL: an instruction has no shape"), None, "JaxRuntimeError: INTERNAL: an instruction"),
        (KeyError("x"), None, "KeyError: 'x'"),
    ],
)
def test_a_failure_of_the_network_with_nobody_missing_ends_all_with_a_code_that_restarts(error, code, reason):
    client, monitor = LocalClient(), Monitor()
    heartbeat.start(monitor, KeyValueStore(client), 0, 1, heartbeat_s=1.0)
    monitor.stop()
    try:
        group_exit = heartbeat.agree_on_exit(error)
    finally:
        heartbeat.leave()
    asked = heartbeat.GroupExit(*json.loads(client.values[heartbeat.END]))
    if code is None:  # the traceback is printed
        assert group_exit is None
        assert (asked.code, asked.reason.startswith(f"process 0 failed: {reason}")) == (1, True)
    else:
        assert group_exit == asked
        assert (asked.code, asked.reason.startswith(UNREACHABLE + reason)) == (code, True)


def test_a_process_that_fails_ends_as_the_one_that_was_first():
    client, monitor = LocalClient(), Monitor()
    heartbeat.start(monitor, KeyValueStore(client), 0, 1, heartbeat_s=1.0)
    monitor.stop()
    client.key_value_set(heartbeat.END, json.dumps([2, "class folder birds/ is empty"]))
    try:
        for error in (KeyError("x"), StoreError("UNAVAILABLE: ")):
            assert heartbeat.agree_on_exit(error) == (2, "class folder birds/ is empty")
    finally:
        heartbeat.leave()
    assert heartbeat.agree_on_exit(KeyError("x")) is None  # alone
