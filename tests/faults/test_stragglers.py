"""A host that is three times slower than the others: it is named, with the part that is slow."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.processes import (
    SETTINGS,
    find_free_port,
    read_journal,
    start,
    start_processes,
    wait_for_exit,
    wait_for_step,
)

from podscale.processes.stragglers import Pace, StragglerCheck, find_stragglers


def make_paces(*changed, processes=4):
    usual = {n: Pace(n, f"host{n}", call_s=0.3, input_s=0.01, stalled_s=0.02, probe_s=0.005) for n in range(processes)}
    return list((usual | {pace.process: pace for pace in changed}).values())


def test_no_process_is_named_where_all_are_alike():
    assert find_stragglers(make_paces()) == []
    assert find_stragglers(make_paces(Pace(1, "host1", 0.3, 0.09, 0.1, 0.008))) == []  # below the limits
    assert find_stragglers(make_paces(processes=1)) == []


@pytest.mark.parametrize(
    ("part", "pace"),
    [
        ("input", Pace(2, "host2", 0.3, 0.21, 0.02, 0.005)),
        ("host", Pace(2, "host2", 0.3, 0.01, 0.2, 0.006)),
        ("step", Pace(2, "host2", 0.3, 0.01, 0.02, 0.015)),
    ],
)
@pytest.mark.parametrize("processes", [3, 4])
def test_a_slow_process_is_named_with_the_part_that_is_slow(part, pace, processes):
    (straggler,) = find_stragglers(make_paces(pace, processes=processes))
    assert (straggler.process, straggler.host, straggler.part) == (2, "host2", part)
    assert straggler.own_s > straggler.others_s
    assert "process 2 on host2 is a straggler" in straggler.describe()


def test_a_stalled_process_is_named_as_a_slow_host_only():
    (straggler,) = find_stragglers(make_paces(Pace(2, "host2", 0.3, 0.2, 0.2, 0.015)))
    assert (straggler.process, straggler.part) == (2, "host")


def test_the_slowest_part_is_named():
    (straggler,) = find_stragglers(make_paces(Pace(2, "host2", 0.3, 0.25, 0.12, 0.005)))
    assert (straggler.process, straggler.part) == (2, "input")


def test_the_slower_of_two_processes_is_named():
    (straggler,) = find_stragglers(make_paces(Pace(1, "host1", 0.3, 0.21, 0.02, 0.005), processes=2))
    assert (straggler.process, straggler.part) == (1, "input")


def test_devices_are_compared_only_if_all_were_timed():
    slow = Pace(2, "host2", 0.3, 0.01, 0.02, 0.015)
    assert find_stragglers(make_paces(slow, Pace(0, "host0", 0.3, 0.01, 0.02, None))) == []


def test_a_straggler_is_reported_once_when_two_more_comparisons_confirm_it():
    stragglers, slow = StragglerCheck(), find_stragglers(make_paces(Pace(2, "host2", 0.3, 0.21, 0.02, 0.005)))
    counts = []
    for comparison in (slow, slow, [], slow, slow, slow, slow, [], slow, slow, slow):
        stragglers._note(comparison)
        counts.append(len(stragglers.pop_new()))
    assert counts == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_windows_of_the_same_number_are_compared_each_once_however_late_they_arrive():
    """The slow process publishes a window late; where calls are short, several windows arrive at once."""
    usual, slow = (Pace(0, "host0", 0.3, 0.01, 0.02, 0.005), Pace(1, "host1", 0.3, 0.21, 0.02, 0.005))
    paces = [[usual] * 5, [usual, usual, slow, slow, slow]]

    def publish(*counts):
        return [[[n, list(pace)] for n, pace in enumerate(paces[i][:count])] for i, count in enumerate(counts)]

    check, named = StragglerCheck(), []
    for counts in ((1, 0), (1, 1), (3, 1), (3, 2), (3, 3), (3, 3), (5, 3), (5, 3), (5, 5)):
        check.compare(publish(*counts))
        named.append([straggler.process for straggler in check.pop_new()])
    assert named == [[]] * 8 + [[1]]

    check = StragglerCheck()
    check.compare(publish(5, 5))
    assert [straggler.process for straggler in check.pop_new()] == [1]


def name_stragglers(calls):
    """Return the numbers of those that are named among processes whose calls took (call, input, stalled, probe) s."""
    checks, named = [StragglerCheck() for _ in calls], []
    for row in zip(*calls, strict=True):
        paces = [check.add_call(*call) for check, call in zip(checks, row, strict=True)]
        if all(paces):
            checks[0]._note(find_stragglers([pace._replace(process=n) for n, pace in enumerate(paces)]))
            named += [straggler.process for straggler in checks[0].pop_new()]
    return named


USUAL = (0.3, 0.01, 0.02, 0.005)


def test_a_single_long_stall_names_nobody_and_a_lasting_one_does():
    stalled = [USUAL] * 40
    for at in range(40):
        once = [*stalled[:at], (3.3, 0.01, 3.0, 0.05), *stalled[at + 1 :]]
        assert name_stragglers([[USUAL] * 40, [USUAL] * 40, once]) == []
    lasting = [*stalled[:10], *[(0.3, 0.01, 0.2, 0.005)] * 30]
    assert name_stragglers([[USUAL] * 40, [USUAL] * 40, lasting]) == [2]


@pytest.mark.parametrize("start", range(4, 9))
@pytest.mark.parametrize("slow", [(0.3, 0.21, 0.02, 0.005), (0.3, 0.01, 0.2, 0.005), (0.3, 0.01, 0.02, 0.015)])
def test_a_process_that_becomes_slow_is_named_within_15_calls(start, slow):
    usual, changed = [USUAL] * (start + 15), [USUAL] * start + [slow] * 15
    assert name_stragglers([usual, usual, changed]) == [2]


def test_probes_that_a_busy_machine_delays_by_chance_name_no_device():
    """Each device is slow in half of its probes, and one in all of them."""
    draw = random.Random(0)
    innocent = [[(0.3, 0.01, 0.02, 0.005 * draw.choice([1.0, 4.0])) for _ in range(400)] for _ in range(4)]
    assert name_stragglers(innocent) == []
    slow = [(0.3, 0.01, 0.02, 0.015 * draw.choice([1.0, 4.0])) for _ in range(400)]
    assert set(name_stragglers([*innocent, slow])) == {4}


SLOW_INPUT_PROGRAM = """
import sys, time
from podscale.cli import main as cli
from podscale.data import prefetch

def slow(self, take=prefetch.Batches.__next__, seen=[time.monotonic()]):
    took = time.monotonic() - seen[0]  # seconds of the call before
    time.sleep(min(2 * took, 2.0) / (2 if len(seen) > 1 else 1))
    seen[:] = [time.monotonic()]
    return take(self)

if sys.argv[sys.argv.index("--process") + 1] == "1":
    prefetch.Batches.__next__ = slow
sys.argv = ["podscale", "train", *sys.argv[1:]]
cli.run()
"""


def read_stragglers(folder, process=1):
    lines = map(json.loads, read_journal(folder))
    return [line for line in lines if line["event"] == "straggler" and line["process"] == process]


@pytest.mark.slow
@pytest.mark.processes(3)
def test_slow_input_is_named_within_20_steps(tmp_path):
    join = ["--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", 3, "--run", tmp_path]
    join += ["--batch.size", 96, "--batch.span", 32]
    started = [start([sys.executable, "-c", SLOW_INPUT_PROGRAM, *SETTINGS, *join, "--process", i]) for i in range(3)]
    codes, outputs = wait_for_exit(started)
    assert codes == [0, 0, 0], outputs[0][1][-3000:]
    stragglers = [line for line in read_stragglers(tmp_path) if line["part"] == "input"]
    assert stragglers
    assert stragglers[0]["step"] <= 20
    others = read_stragglers(tmp_path, process=0) + read_stragglers(tmp_path, process=2)
    assert not [line for line in others if line["part"] == "input"]
    assert "warning: process 1 on " in outputs[0][1]
    assert "per call for its images" in outputs[0][1]


@pytest.mark.slow
@pytest.mark.processes(3)
def test_a_host_that_runs_a_third_of_the_time_is_named(tmp_path):
    """SIGSTOP and SIGCONT in turns. After how many calls, if nothing else delays the others, is tested above.

    The model is wide enough that a window of four calls takes longer than such a turn: else some windows have none.
    """
    options = ["--batch.size", 96, "--batch.span", 32, "--model.width", 16, "--train.epochs", 8]
    started = start_processes(3, tmp_path, *options)
    wait_for_step(tmp_path, 14, started[0])
    stopped = threading.Event()

    def pulse():
        while not stopped.is_set() and started[1].poll() is None:
            os.kill(started[1].pid, signal.SIGSTOP)
            time.sleep(0.08)
            os.kill(started[1].pid, signal.SIGCONT)
            time.sleep(0.04)

    before = json.loads(read_journal(tmp_path)[-1])["step"]
    pulsing = threading.Thread(target=pulse)
    pulsing.start()
    try:
        deadline = time.monotonic() + 200
        while not read_stragglers(tmp_path) and started[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        stopped.set()
        pulsing.join()
    codes, outputs = wait_for_exit(started)
    assert codes == [0, 0, 0], outputs[0][1][-3000:]
    stragglers = [line for line in read_stragglers(tmp_path) if line["step"] > before]
    assert stragglers
    assert stragglers[0]["part"] in ("host", "step")  # on a CPU, the device stalls with the host


@pytest.mark.slow
@pytest.mark.processes(4)
def test_a_machine_that_is_busy_with_other_work_names_nobody(tmp_path):
    """Four processes share the cores with twice as many other programs, and with more now and then."""
    burn = [sys.executable, "-c", "while True: pass"]
    burst = [sys.executable, "-c", "import random, time\nwhile True:\n time.sleep(random.uniform(0, 0.6))\n"
             " stop = time.monotonic() + random.uniform(0, 0.6)\n while time.monotonic() < stop: pass"]  # fmt: skip
    others = [subprocess.Popen(command) for command in [burn] * 2 * os.cpu_count() + [burst] * 2]
    try:
        codes, outputs = wait_for_exit(start_processes(4, tmp_path, "--train.epochs", 8))
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert codes == [0] * 4, outputs[0][1][-3000:]
    assert [line for line in map(json.loads, read_journal(tmp_path)) if line["event"] == "straggler"] == []
