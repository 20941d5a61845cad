"""Two hundred updates over real processes: the same bits on every replica, and the same bits every time."""

import json

import jax
import numpy as np
import pytest
from integration.test_processes import TIMEOUT_S, find_free_port, read_losses, start

from podscale.runs.folder import Run
from podscale.training import restore as trained_models

UPDATES = 200
LONG = f"--train.epochs {(UPDATES - 0.5) * 128 / 1437} --train.eval_epochs 1000 --plan.check_steps 20".split()


def train(folder, summation, cores):
    """Return the summary of the first of two processes; replicas are compared every 20 updates."""
    machine = ["--pod.shape", "1x2", "--pod.cores", str(cores), "--plan.summation", summation]
    machine += ["--plan.payload", "bfloat16", "--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", "2"]
    started = [start([*LONG, *machine, "--process", str(i)], folder) for i in range(2)]
    outputs = [process.communicate(timeout=4 * TIMEOUT_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs[0][1][-2000:]
    assert "differs" not in outputs[0][1]
    return json.loads(outputs[0][0])


def load_arrays(folder):
    model = trained_models.load_trained(Run.load(folder), "newest")
    return jax.device_get((model.params, model.stats))


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize(("summation", "cores"), [("torus4", 4), ("ring2", 2), ("sharded", 1)])
def test_replicas_agree_for_two_hundred_updates_and_a_second_run_is_bit_identical(tmp_path, summation, cores):
    for name in ("first", "second"):
        assert train(tmp_path / name, summation, cores)["steps"] == UPDATES
    assert read_losses(tmp_path / "first") == read_losses(tmp_path / "second")
    jax.tree.map(np.testing.assert_array_equal, load_arrays(tmp_path / "first"), load_arrays(tmp_path / "second"))
    assert np.mean(read_losses(tmp_path / "first")[-10:]) < 0.7 * read_losses(tmp_path / "first")[0]
