"""Real processes that train digits, for tests: started one by one, by the launcher, or as one with several devices."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.runs.folder import Run
from podscale.training import loop
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.setup import prepare

# In float64, results that differ only by rounding still agree to many digits after all steps.
SETTINGS = "digits --model.width 8 --model.precision float64 --train.epochs 3 --train.eval_epochs 3 --json".split()
SAME = 1e-9
STEPS = 34
PROGRAM = [sys.executable, "-m", "podscale"]
TIMEOUT_S = 900


def make_environment(**more):
    """Return the environment of a process: what one of them has compiled, the next one of the session loads.

    Their programs are not among those of pytest's own processes: a process that a test kills may leave half a file.
    """
    cache = {"JAX_COMPILATION_CACHE_DIR": f"{os.environ['JAX_COMPILATION_CACHE_DIR']}-of-processes"}
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"} | cache | more


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command, **more):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), env=make_environment(**more), text=True, **pipes)


def start_training(folder, *more):
    """Start one process."""
    return start([*PROGRAM, "train", *SETTINGS, "--run", folder, *more])


def train_in_process(folder, shape, settings=SETTINGS):
    """Train the same in the tests' own process, on as many devices as the shape has."""
    arguments = [argument for argument in settings if argument != "--json"]
    changes = {name.removeprefix("--"): value for name, value in zip(arguments[1::2], arguments[2::2], strict=True)}
    rows, cols = pod.parse_shape(shape)
    with jax.enable_x64(True):
        recipe = recipes.override_recipe(recipes.load_recipe(arguments[0]), changes)
        devices = pod.make_pod(jax.devices()[: rows * cols], shape)
        loop.train(recipe, pod=devices, folder=folder, console=Console(quiet=True))


def start_processes(processes, folder, *more):
    """Start several processes, each with its number."""
    join = ["--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", processes, "--process"]
    return [start_training(folder, *join, number, *more) for number in range(processes)]


def start_launcher(processes, folder, *more, launch=(), under=()):
    """Start several processes with `podscale launch`."""
    command = [*under, *PROGRAM, "launch", "-n", processes, *launch, "train", *SETTINGS, "--run", folder, *more]
    return start(command)


def wait_for_exit(processes):
    """Return exit codes and outputs; no process outlives the test."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
    return [process.returncode for process in processes], outputs


def wait_for_success(process):
    """Return stdout and stderr of a process that must succeed."""
    (code,), ((out, err),) = wait_for_exit([process])
    assert code == 0, err[-3000:]
    return out, err


def wait_for_step(folder, step, process):
    """Wait until the journal has this step; fail if the process ends before."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if any(f'"step": {step},' in line for line in read_journal(folder)):
            return
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
    raise AssertionError(f"step {step} never came: {process.communicate()[1][-3000:]}")


def read_journal(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def list_children(process):
    """Return the processes that a launcher has started, in the order of their numbers."""
    numbers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(number) for number in numbers]


def read_losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


def read_state(folder):
    """Return all arrays of a run's newest checkpoint, by name."""
    run = Run.load(folder)
    with jax.enable_x64(True), Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        setup = prepare(run.recipe, pod.make_pod(jax.devices()[:1], "1x1"))
        state = checkpoints.restore(checkpoints.newest(), setup.init_state())
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def assert_same_to_rounding(folder, other):
    """Assert that two runs have learnt the same, up to the order of their sums."""
    one, two = read_state(folder), read_state(other)
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, two[name], rtol=SAME, atol=SAME, err_msg=name)
    np.testing.assert_allclose(read_losses(folder), read_losses(other), rtol=SAME)
