"""The launcher of elastic runs, with processes that follow its protocol and train nothing."""

import signal
import sys
from operator import attrgetter
from types import SimpleNamespace

import pytest

from podscale.processes.elastic import coordinator
from podscale.processes.elastic.compile_ahead import Precompiler
from podscale.processes.elastic.coordinator import Coordinator
from podscale.processes.elastic.launcher import MAX_FAILURES, Launcher
from podscale.processes.elastic.members import Starter, choose_members
from podscale.processes.launch import StopSignals

# It joins, reports that a step is done, and ends with an exit code; the arguments say which, by the start's number.
MEMBER = """
import json, os, socket, sys
from pathlib import Path

starts = Path(sys.argv[1])
with starts.open("a") as file:
    file.write("start\\n")
number = len(starts.read_text().splitlines())
end = socket.socket(fileno=int(os.environ["PODSCALE_ELASTIC_FD"]))
receive = end.makefile("r").readline

def send(kind, **values):
    end.sendall(json.dumps({"kind": kind, **values}).encode() + b"\\n")

send("ready", snapshot=-1, step=0, is_connected=False)
generation = json.loads(receive())["generation"]
send("beat", generation=generation, calls=1, step=eval(sys.argv[2]))
send("barrier", generation=generation, number=1)
receive()  # so the launcher has read the step
sys.exit(eval(sys.argv[3]))
"""


@pytest.fixture
def launch(tmp_path):
    """Run the launcher with one such process; return its exit code and the number of starts."""

    def launch(step, code, change=lambda launcher: None):
        script, starts = tmp_path / "member.py", tmp_path / "starts"
        script.write_text(MEMBER)
        starter = Starter(
            [], [None], tmp_path, {"start_new_session": True}
        )  # without a fork of this process, which has JAX
        starter._command = [sys.executable, "-I", "-S", str(script), str(starts), step, code]
        with StopSignals() as signals:
            precompiler = Precompiler([], tmp_path, is_enabled=False)
            launcher = Launcher(starter, 1, (1, 1), tmp_path, signals, precompiler)
            change(launcher)
            try:
                return launcher.run(), len(starts.read_text().splitlines())
            finally:
                launcher.close()

    return launch


def test_a_fault_that_always_comes_at_the_same_step_ends_the_run(launch):
    assert launch("7", f"1 if number < {MAX_FAILURES + 10} else 0") == (1, MAX_FAILURES)


def test_faults_with_new_steps_between_them_do_not_end_the_run(launch):
    assert launch("number", f"1 if number < {MAX_FAILURES + 5} else 0") == (0, MAX_FAILURES + 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_coordinator_that_is_gone_or_hangs_is_replaced(launch, number, monkeypatch, capfd):
    def disturb(launcher):
        address = launcher._coordinator.start(100, 1)  # its imports are done
        assert address
        if number == signal.SIGSTOP:
            monkeypatch.setattr(coordinator, "ANSWER_S", 0.0)
        launcher._coordinator._process.send_signal(number)

    start, started = Coordinator.__init__, []

    def count(self, **settings):
        started.append(self)
        monkeypatch.setattr(coordinator, "ANSWER_S", 300.0 if len(started) > 1 else coordinator.ANSWER_S)
        start(self, **settings)

    monkeypatch.setattr(Coordinator, "__init__", count)
    code, _ = launch("number", "0", disturb)
    assert (code, len(started)) == (0, 2)
    assert "the coordinator is gone; all processes are started again" in capfd.readouterr().err


def test_a_generation_starts_while_stand_ins_of_the_one_before_still_connect(monkeypatch):
    kept = Coordinator(start_new_session=True)
    try:
        kept.start(0, 2)
        kept.stand_in(0, [1])  # it waits for process 0, which never comes
        kept.end(0)
        monkeypatch.setattr(coordinator, "ANSWER_S", 20.0)
        assert kept.start(1, 1)
    finally:
        kept.close()


def test_the_main_process_has_the_newest_state_and_among_equals_the_first_slot():
    ready = [(3, 40), (1, 40), (2, 35), (0, -1), (4, 40)]
    members = choose_members([SimpleNamespace(slot=slot, snapshot=step) for slot, step in ready], 4)
    assert list(map(attrgetter("slot"), members)) == [1, 3, 4, 2]
