"""SIGTERM, as schedulers send it: to a single process, to one of several, to all of them; at different times."""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.processes import make_environment

from podscale.runs.folder import Run

SETTINGS = "digits --model.width 8 --train.epochs 6 --train.eval_epochs 3 --json".split()
PREEMPTED, TIMEOUT_S = 75, 900


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder, processes, shape, *plan):
    join = ["--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", str(processes)]
    each = [[*join, "--process", str(i), "--pod.shape", shape] for i in range(processes)]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "podscale", "train", *SETTINGS, "--run", str(folder), *more, *plan],
            env=make_environment(JAX_ENABLE_X64="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for more in (each if processes > 1 else [["--pod.virtual", shape]])
    ]


def wait_for_exit(started):
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in started]
    return [process.returncode for process in started], outputs


def wait_for_step(folder, step):
    """Wait until the journal has this step."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if any(f'"step": {step},' in line for line in read_lines(folder)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} never came")


def read_lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def read_losses(folder):
    return [(m["step"], m["loss"]) for m in Run.load(folder).metrics() if m["event"] == "train"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function that returns the losses of an undisturbed run of so many processes."""
    cache = {}

    def train(processes, shape):
        if processes not in cache:
            folder = tmp_path_factory.mktemp("undisturbed")
            codes, outputs = wait_for_exit(start(folder, processes, shape))
            assert codes == [0] * processes, outputs[0][1][-2000:]
            cache[processes] = read_losses(folder)
        return cache[processes]

    return train


@pytest.mark.parametrize(
    ("processes", "shape", "targets", "step"),
    [
        pytest.param(1, "2x2", [0], 5, marks=pytest.mark.slow),
        pytest.param(1, "2x2", [0], 33, marks=pytest.mark.slow),
        pytest.param(2, "1x2", [1], 7, marks=[pytest.mark.processes(2), pytest.mark.slow]),
        pytest.param(4, "2x2", [2], 20, marks=[pytest.mark.processes(4), pytest.mark.slow]),
        pytest.param(4, "2x2", [0, 1, 2, 3], 9, marks=[pytest.mark.processes(4), pytest.mark.slow]),
    ],
)
def test_after_sigterm_all_save_the_same_step_and_the_same_command_resumes(
    tmp_path, undisturbed, processes, shape, targets, step
):
    started = start(tmp_path, processes, shape)
    wait_for_step(tmp_path, step)
    for target in targets:
        started[target].send_signal(signal.SIGTERM)
    codes, outputs = wait_for_exit(started)
    assert codes == [PREEMPTED] * processes, outputs[0][1][-2000:]
    assert "the same command resumes from there" in outputs[0][1]
    assert not outputs[0][0]
    codes, outputs = wait_for_exit(start(tmp_path, processes, shape))
    assert codes == [0] * processes, outputs[0][1][-2000:]
    assert json.loads(outputs[0][0])["steps"] == 68
    assert "resuming after step" in outputs[0][1]
    assert read_losses(tmp_path) == undisturbed(processes, shape)


def test_sigterm_before_the_first_step_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")  # so that compiling takes seconds
    (started,) = start(tmp_path, 1, "1x1")
    deadline = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "plan.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    (code,), ((_, errors),) = wait_for_exit([started])
    assert code in (PREEMPTED, -signal.SIGTERM)
    assert code != PREEMPTED or errors.splitlines()[-1] in (
        "podscale: stopped on request before the first step of this session; the same command starts again",
        "podscale: stopped; no step was completed in this session; the same command starts again",
        "podscale: stopped on request; there is no checkpoint yet, so the same command starts again",
    )
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").glob("[0-9]*"))
