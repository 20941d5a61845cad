"""Two hundred updates over real processes: the same bits on every replica, and the same bits every time."""

import json

import jax
import numpy as np
import pytest
from integration.test_processes import TIMEOUT_S, free_port, losses, start

from podscale.runs.folder import Run
from podscale.training import trained as trained_models

UPDATES = 200
LONG = f"--train.epochs {(UPDATES - 0.5) * 128 / 1437} --train.eval_epochs 1000 --plan.check_steps 20".split()


def trained(folder, summation, cores):
    """The first of two processes' summary; replicas are compared every 20 updates, and whoever differs is told of."""
    machine = ["--pod.shape", "1x2", "--pod.cores", str(cores), "--plan.summation", summation]
    machine += ["--plan.payload", "bfloat16", "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2"]
    started = [start([*LONG, *machine, "--process", str(i)], folder) for i in range(2)]
    outputs = [process.communicate(timeout=4 * TIMEOUT_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs[0][1][-2000:]
    assert "differs" not in outputs[0][1]
    return json.loads(outputs[0][0])


def held(folder):
    found = trained_models.load_trained(Run.load(folder), "newest")
    return jax.device_get((found.params, found.stats))


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize(("summation", "cores"), [("torus4", 4), ("ring2", 2), ("sharded", 1)])
def test_replicas_agree_for_two_hundred_updates_and_again_to_the_last_bit(tmp_path, summation, cores):
    for name in ("once", "again"):
        assert trained(tmp_path / name, summation, cores)["steps"] == UPDATES
    assert losses(tmp_path / "once") == losses(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, held(tmp_path / "once"), held(tmp_path / "again"))
    assert np.mean(losses(tmp_path / "once")[-10:]) < 0.7 * losses(tmp_path / "once")[0]
