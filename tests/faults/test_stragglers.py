"""A host that is three times slower than the others: named within 20 steps, with what is slow about it."""

import json
import os
import signal
import sys
import threading
import time

import pytest
from support.processes import SETTINGS, by_hand, ended, free_port, journal, started, until_step

from podscale.processes.stragglers import Pace, StragglerMonitor, find_stragglers


def paces(*changed, processes=4):
    usual = {n: Pace(n, f"host{n}", call_s=0.3, input=0.01, kept=0.02, step=0.005) for n in range(processes)}
    return list((usual | {pace.process: pace for pace in changed}).values())


def test_nobody_is_named_where_all_are_alike():
    assert find_stragglers(paces()) == []
    assert find_stragglers(paces(Pace(1, "host1", 0.3, 0.09, 0.1, 0.008))) == []  # what differs by less than it takes to notice
    assert find_stragglers(paces(processes=1)) == []


@pytest.mark.parametrize(
    ("part", "pace"),
    [
        ("input", Pace(2, "host2", 0.3, 0.21, 0.02, 0.005)),
        ("host", Pace(2, "host2", 0.3, 0.01, 0.2, 0.006)),
        ("step", Pace(2, "host2", 0.3, 0.01, 0.02, 0.015)),
    ],
)
@pytest.mark.parametrize("processes", [3, 4])
def test_the_slow_one_is_named_with_what_is_slow(part, pace, processes):
    (found,) = find_stragglers(paces(pace, processes=processes))
    assert (found.process, found.host, found.part) == (2, "host2", part)
    assert found.own_s > found.others_s
    assert "process 2 on host2 holds the others up" in found.describe()


def test_a_process_that_is_kept_from_running_is_slow_in_all_it_does():
    (found,) = find_stragglers(paces(Pace(2, "host2", 0.3, 0.2, 0.2, 0.015)))
    assert (found.process, found.part) == (2, "host")


def test_what_is_slowest_is_named():
    (found,) = find_stragglers(paces(Pace(2, "host2", 0.3, 0.25, 0.12, 0.005)))
    assert (found.process, found.part) == (2, "input")


def test_of_two_the_slower_is_named():
    (found,) = find_stragglers(paces(Pace(1, "host1", 0.3, 0.21, 0.02, 0.005), processes=2))
    assert (found.process, found.part) == (1, "input")


def test_devices_are_compared_only_where_all_were_timed():
    slow = Pace(2, "host2", 0.3, 0.01, 0.02, 0.015)
    assert find_stragglers(paces(slow, Pace(0, "host0", 0.3, 0.01, 0.02, None))) == []


def test_a_slow_look_is_told_when_it_is_confirmed_and_once():
    stragglers, slow = StragglerMonitor(), find_stragglers(paces(Pace(2, "host2", 0.3, 0.21, 0.02, 0.005)))
    told = []
    for found in (slow, [], slow, slow, slow, [], slow, slow):
        stragglers._note(found)
        told.append(len(stragglers.pop_new()))
    assert told == [0, 0, 0, 1, 0, 0, 0, 1]


SLOW_INPUT = """
import sys, time
from podscale.cli import main as cli
from podscale.data import prefetch

def slow(self, take=prefetch.Batches.__next__, seen=[time.monotonic()]):
    took = time.monotonic() - seen[0]  # by the call before
    time.sleep(min(2 * took, 2.0) / (2 if len(seen) > 1 else 1))
    seen[:] = [time.monotonic()]
    return take(self)

if sys.argv[sys.argv.index("--process") + 1] == "1":
    prefetch.Batches.__next__ = slow
sys.argv = ["podscale", "train", *sys.argv[1:]]
cli.run()
"""


def named(folder, process=1):
    lines = map(json.loads, journal(folder))
    return [line for line in lines if line["event"] == "straggler" and line["process"] == process]


@pytest.mark.slow
@pytest.mark.processes(3)
def test_slow_input_is_named_within_20_steps(tmp_path):
    join = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", 3, "--run", tmp_path]
    join += ["--batch.size", 96, "--batch.span", 32]
    at_work = [started([sys.executable, "-c", SLOW_INPUT, *SETTINGS, *join, "--process", i]) for i in range(3)]
    codes, outputs = ended(at_work)
    assert codes == [0, 0, 0], outputs[0][1][-3000:]
    found = [line for line in named(tmp_path) if line["part"] == "input"]
    assert found
    assert found[0]["step"] <= 20
    others = named(tmp_path, process=0) + named(tmp_path, process=2)
    assert not [line for line in others if line["part"] == "input"]
    assert "warning: process 1 on " in outputs[0][1]
    assert "a call for its pictures" in outputs[0][1]


@pytest.mark.slow
@pytest.mark.processes(3)
def test_a_host_that_runs_a_third_of_the_time_is_named_within_20_steps(tmp_path):
    """SIGSTOP and SIGCONT in turns, as a machine does that has other things to do."""
    at_work = by_hand(3, tmp_path, "--batch.size", 96, "--batch.span", 32)
    until_step(tmp_path, 14, at_work[0])
    over = threading.Event()

    def pulse():
        while not over.is_set() and at_work[1].poll() is None:
            os.kill(at_work[1].pid, signal.SIGSTOP)
            time.sleep(0.08)
            os.kill(at_work[1].pid, signal.SIGCONT)
            time.sleep(0.04)

    before = json.loads(journal(tmp_path)[-1])["step"]
    pulsing = threading.Thread(target=pulse)
    pulsing.start()
    try:
        deadline = time.monotonic() + 200
        while not named(tmp_path) and at_work[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        over.set()
        pulsing.join()
    codes, outputs = ended(at_work)
    assert codes == [0, 0, 0], outputs[0][1][-3000:]
    found = [line for line in named(tmp_path) if line["step"] > before]
    assert found
    assert found[0]["part"] in ("host", "step")  # of a CPU, the device is kept from running with the host
    assert found[0]["step"] <= before + 20
