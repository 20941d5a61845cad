"""Real processes that train digits, for the tests: started by hand, by a launcher, or as one with several devices."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.runs.folder import Run
from podscale.training import loop
from podscale.training.checkpoint import Checkpoints
from podscale.training.setup import prepare

# In float64, what differs by rounding alone still agrees to many digits after all steps.
SETTINGS = "digits --model.width 8 --model.precision float64 --train.epochs 3 --train.eval_epochs 3 --json".split()
SAME = 1e-9
STEPS = 34
PROGRAM = [sys.executable, "-m", "podscale"]
TIMEOUT_S = 900
# What one process of this session has compiled, the next one need not.
_programs = tempfile.TemporaryDirectory(prefix="podscale-programs-")


def environment(**more):
    kept = {"JAX_COMPILATION_CACHE_DIR": _programs.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"} | kept | more


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(command, **more):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), env=environment(**more), text=True, **pipes)


def train(folder, *more):
    """One process."""
    return started([*PROGRAM, "train", *SETTINGS, "--run", folder, *more])


def alone(folder, shape, settings=SETTINGS):
    """The same in this very process, on as many devices as the shape has."""
    words = [word for word in settings if word != "--json"]
    changes = {name.removeprefix("--"): value for name, value in zip(words[1::2], words[2::2], strict=True)}
    rows, cols = pod.parse_shape(shape)
    with jax.enable_x64(True):
        recipe = recipes.override_recipe(recipes.load_recipe(words[0]), changes)
        where = pod.make_pod(jax.devices()[: rows * cols], shape)
        loop.train(recipe, pod=where, folder=folder, console=Console(quiet=True))


def by_hand(processes, folder, *more):
    """Several processes, each with its number."""
    join = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", processes, "--process"]
    return [train(folder, *join, number, *more) for number in range(processes)]


def launched(processes, folder, *more, launch=(), under=()):
    """Several processes, by our own launcher."""
    command = [*under, *PROGRAM, "launch", "-n", processes, *launch, "train", *SETTINGS, "--run", folder, *more]
    return started(command)


def ended(processes):
    """Exit codes and outputs; nothing outlives the test."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
    return [process.returncode for process in processes], outputs


def succeeded(process):
    """What a process that must end well said, on stdout and stderr."""
    (code,), ((out, err),) = ended([process])
    assert code == 0, err[-3000:]
    return out, err


def until_step(folder, step, process):
    """Waits until the journal tells of this step, and until no longer than the process lives."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if any(f'"step": {step},' in line for line in journal(folder)):
            return
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
    raise AssertionError(f"step {step} never came: {process.communicate()[1][-3000:]}")


def journal(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def children(process):
    """The processes that a launcher has started, in the order of their numbers."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(number) for number in found]


def losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


def learnt(folder):
    """All numbers that a run has learnt, by name."""
    run = Run.load(folder)
    with jax.enable_x64(True), Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        job = prepare(run.recipe, pod.make_pod(jax.devices()[:1], "1x1"))
        state = checkpoints.restore(checkpoints.newest(), job.state)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def assert_same_to_rounding(folder, other):
    """Two runs have learnt the same, but for the order of their sums."""
    one, two = learnt(folder), learnt(other)
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, two[name], rtol=SAME, atol=SAME, err_msg=name)
    np.testing.assert_allclose(losses(folder), losses(other), rtol=SAME)
