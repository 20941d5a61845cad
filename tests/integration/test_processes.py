"""Several real processes, connected by JAX's runtime, train the same as one process."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from podscale.runs.folder import Run

SETTINGS = "digits --model.width 8 --train.epochs 2 --train.eval_epochs 1 --augment.erase 0.3 --json".split()
TIMEOUT_S = 240


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(arguments, folder):
    command = [sys.executable, "-m", "podscale", "train", *SETTINGS, "--run", str(folder), *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(processes, folder, virtual=""):
    """Train with so many processes; return the summary that the main process prints."""
    join = ["--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", str(processes)]
    started = [
        start([*join, "--process", str(i), *virtual.split()] if processes > 1 else virtual.split(), folder)
        for i in range(processes)
    ]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in started]
    assert [process.returncode for process in started] == [0] * processes, outputs[0][1][-2000:]
    assert [bool(out) for out, _ in outputs] == [True] + [False] * (processes - 1)
    return json.loads(outputs[0][0])


def read_losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.processes(4)
def test_several_processes_train_the_same_as_one(tmp_path):
    one = train(1, tmp_path / "one", "--pod.virtual 2x2 --plan.summation torus")
    for processes, virtual in (
        (2, "--pod.shape 1x2 --plan.summation ring"),
        (4, "--pod.shape 2x2 --plan.summation torus"),
    ):
        folder = tmp_path / str(processes)
        many = train(processes, folder, virtual)
        np.testing.assert_allclose(read_losses(folder), read_losses(tmp_path / "one"), rtol=1e-3)
        assert many["steps"] == one["steps"] == 23
        assert abs(many["accuracy"] - one["accuracy"]) <= 2 / 360  # one or two images may be decided by rounding
        evals = [m for m in Run.load(folder).metrics() if m["event"] == "eval"]
        assert [m["examples"] for m in evals] == [360, 360]
        correct = Run.load(folder).mistakes()["correct"]  # every process's predictions, each at its place
        assert sum(correct) == round(many["accuracy"] * 360)


@pytest.mark.slow
@pytest.mark.processes(2)
def test_processes_resume_a_run_that_one_process_started(tmp_path):
    first = start(["--pod.virtual", "1x2", "--until", "accuracy=0"], tmp_path)
    _, errors = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 0, errors[-2000:]
    resumed = train(2, tmp_path, "--pod.shape 1x2")
    assert resumed["steps"] == 23
    assert len(read_losses(tmp_path)) == 23
