"""Elastic runs: the survivors of a lost process go on in place, and a replacement joins; all learn the same."""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from support.processes import (
    SETTINGS,
    assert_same_to_rounding,
    list_children,
    start,
    start_launcher,
    train_in_process,
    wait_for_exit,
    wait_for_step,
    wait_for_success,
)

EPOCHS = 12
LONGER = [*SETTINGS[:5], "--train.epochs", str(EPOCHS), "--train.eval_epochs", "2", "--json"]
MORE = ["--train.epochs", EPOCHS, "--train.eval_epochs", 2]
STEPS = 135


def read_events(logs):
    path = logs / "elastic.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def find_pid(logs, slot):
    return [event["pid"] for event in read_events(logs) if event["event"] == "start" and event["process"] == slot][-1]


def count(logs, kind):
    return sum(event["event"] == kind for event in read_events(logs))


def await_event(logs, kind, number, process):
    """Wait until an event has come so many times; fail if the run ends before."""
    while count(logs, kind) < number:
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.02)


def start_elastic(tmp_path, processes, limits, *more):
    launch = ["--elastic", limits, "--logs", tmp_path / "logs"]
    return start_launcher(processes, tmp_path / "run", *MORE, *more, launch=launch)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.processes(2)
@pytest.mark.parametrize(("summation", "slot"), [("xla", 1), slow("xla", 0), slow("sharded", 0), slow("sharded", 1)])
def test_the_survivor_of_a_killed_process_goes_on_and_a_replacement_joins(tmp_path, slot, summation):
    process, logs = start_elastic(tmp_path, 2, "1:2", "--plan.summation", summation), tmp_path / "logs"
    wait_for_step(tmp_path / "run", 12, process)
    survivor = find_pid(logs, 1 - slot)
    os.kill(find_pid(logs, slot), signal.SIGKILL)
    out, err = wait_for_success(process)
    assert f"process {slot} was killed by SIGKILL; a replacement is started" in err
    events = read_events(logs)
    ends = [(event["pid"], event["status"]) for event in events if event["event"] == "end"]
    assert [status for pid, status in ends if pid == survivor] in ([0], [])  # it was never restarted
    sizes = [len(event["slots"]) for event in events if event["event"] == "generation"]
    assert sizes[:2] == [2, 1]
    repeated = [event["step"] - event["snapshot"] for event in events if event["event"] == "generation"][1:]
    assert max(repeated) <= 5
    assert json.loads(out)["steps"] == STEPS
    train_in_process(tmp_path / "one", "1x2", LONGER)
    assert_same_to_rounding(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.processes(4)
def test_processes_that_the_batch_does_not_divide_over_stand_by(tmp_path):
    process, logs = start_elastic(tmp_path, 4, "1:4"), tmp_path / "logs"
    wait_for_step(tmp_path / "run", 12, process)
    os.kill(find_pid(logs, 2), signal.SIGKILL)
    wait_for_success(process)
    sizes = [len(event["slots"]) for event in read_events(logs) if event["event"] == "generation"]
    assert sizes[:2] == [4, 2]  # three survive, and 128 images do not divide over them
    train_in_process(tmp_path / "one", "2x2", LONGER)
    assert_same_to_rounding(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.processes(2)
def test_a_stopped_process_counts_as_lost(tmp_path):
    process, logs = start_elastic(tmp_path, 2, "1:2"), tmp_path / "logs"
    wait_for_step(tmp_path / "run", 12, process)
    os.kill(find_pid(logs, 1), signal.SIGSTOP)
    wait_for_success(process)
    assert count(logs, "generation") >= 2
    killed = [(event["process"], event["reason"]) for event in read_events(logs) if event["event"] == "killed"]
    assert killed == [(1, "stopped")]


@pytest.mark.slow
@pytest.mark.processes(3)
def test_a_pod_of_another_size_finds_its_programs_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    process, logs = start_elastic(tmp_path, 2, "1:2", "--train.epochs", "1000"), tmp_path / "logs"
    await_event(logs, "compiled ahead", 1, process)
    (result,) = [event for event in read_events(logs) if event["event"] == "compiled ahead"]
    assert (result["size"], result["status"]) == (1, 0), (logs / "compile-ahead.log").read_text()
    steps = list_steps(tmp_path)
    os.kill(find_pid(logs, 1), signal.SIGKILL)
    await_event(logs, "training", 2, process)
    assert [len(event["slots"]) for event in read_events(logs) if event["event"] == "generation"][1] == 1
    assert list_steps(tmp_path) == steps
    process.send_signal(signal.SIGTERM)
    assert wait_for_exit([process])[0] == [75]


def list_steps(tmp_path):
    """Return the compiled steps of training and evaluation that are in the cache."""
    return sorted(path.name for path in tmp_path.glob("cache*/jit_call-*-cache"))


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_saves_and_the_same_command_resumes(tmp_path, number, code):
    process = start_elastic(tmp_path, 2, "1:2")
    wait_for_step(tmp_path / "run", 12, process)
    process.send_signal(number)
    codes, _ = wait_for_exit([process])
    assert codes == [code]
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    wait_for_success(start_elastic(tmp_path, 2, "1:2"))
    train_in_process(tmp_path / "one", "1x2", LONGER)
    assert_same_to_rounding(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.processes(2)
def test_all_resume_from_the_checkpoint_when_nobody_is_left(tmp_path):
    process, logs = start_elastic(tmp_path, 2, "1:2"), tmp_path / "logs"
    wait_for_step(tmp_path / "run", 40, process)
    for slot in (0, 1):
        os.kill(find_pid(logs, slot), signal.SIGKILL)
    wait_for_success(process)
    train_in_process(tmp_path / "one", "1x2", LONGER)
    assert_same_to_rounding(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.processes(2)
def test_all_resume_from_the_checkpoint_when_the_coordinator_is_lost(tmp_path):
    process, logs = start_elastic(tmp_path, 2, "1:2"), tmp_path / "logs"
    wait_for_step(tmp_path / "run", 40, process)
    trained = {event["pid"] for event in read_events(logs) if event["event"] == "start"}
    (coordinator,) = [
        pid for pid in list_children(process) if b"podscale.processes.elastic.coordinator" in read_command(pid)
    ]
    os.kill(coordinator, signal.SIGKILL)
    _, err = wait_for_success(process)
    assert "the coordinator is gone; all processes are started again and resume from the last checkpoint" in err
    assert trained <= {event["pid"] for event in read_events(logs) if event["event"] == "end"}
    train_in_process(tmp_path / "one", "1x2", LONGER)
    assert_same_to_rounding(tmp_path / "run", tmp_path / "one")


def read_command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-n", 2, "--elastic", "2", "train"], "--elastic takes MIN:MAX, such as 2:4, not '2'"),
        (["-n", 2, "--elastic", "3:4", "train"], "--elastic 3:4 needs at least 3 processes, but -n is 2"),
        (
            ["-n", 2, "--elastic", "1:2", "--restarts", 3, "train"],
            "--elastic starts lost processes again by itself; leave --restarts out",
        ),
        (["-n", 2, "--elastic", "1:2", "eval"], "--elastic works only with train, not with eval"),
    ],
)
def test_what_cannot_be_elastic_is_refused(arguments, sentence):
    process = start([sys.executable, "-m", "podscale", "launch", *arguments])
    (code,), ((_, err),) = wait_for_exit([process])
    assert (code, err) == (2, f"podscale: {sentence}\n")
