"""Checkpoints that earlier versions wrote with Orbax are restored, verified and kept as ours are."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from support.short_run import train

from podscale.errors import UserError
from podscale.parallel import checksum
from podscale.runs.folder import Run
from podscale.training.checkpoint import files as checkpoint_files
from podscale.training.checkpoint import orbax as orbax_checkpoint
from podscale.training.checkpoint.checkpoints import Checkpoints, DamagedCheckpointError
from podscale.training.checkpoint.format import Manifest

ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed: what it wrote cannot be read")
# Orbax leaves its event loops open if reading fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def make_state(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (100, 300)), "n": jnp.int32(seed)}


def write_with_orbax(folder, checkpoints):
    """Write checkpoints, as (arrays, accuracy) by step, as the version before this format did."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["accuracy"], max_to_keep=None)
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handler) as manager:
        for step, (arrays, accuracy) in checkpoints.items():
            digests = np.asarray(checksum.checksum_arrays(list(arrays.values()))).tolist()
            digests = dict(zip(arrays, digests, strict=True))
            metadata = {"step": step, "digests": digests, "about": {"decoder": "none"}}
            save = ocp.args.StandardSave(arrays)
            metrics = None if accuracy is None else {"accuracy": accuracy}
            manager.save(step, args=save, metrics=metrics, force=True, custom_metadata=metadata)


@pytest.fixture
def folder(tmp_path):
    """Checkpoints 1, 2 and 3 of a small state; the second is the best."""
    checkpoints = {step: (make_state(step), accuracy) for step, accuracy in ((1, 0.1), (2, 0.9), (3, None))}
    write_with_orbax(tmp_path / "checkpoints", checkpoints)
    return tmp_path / "checkpoints"


@pytest.fixture(autouse=True)
def sleeps(monkeypatch):
    waits = []
    for module in (checkpoint_files, orbax_checkpoint):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waits.append))
    return waits


def restore(folder, step):
    with Checkpoints(folder, read_only=True) as checkpoints:
        return checkpoints.restore(step, make_state(0))


def test_they_are_restored(folder):
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert (checkpoints.steps(), checkpoints.best(), checkpoints.newest()) == ([1, 2, 3], 2, 3)
    for step in (1, 2, 3):
        for ours, theirs in zip(jax.tree.leaves(restore(folder, step)), jax.tree.leaves(make_state(step)), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_new_ones_are_written_in_the_new_format_and_old_ones_expire(folder):
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(4, make_state(4), accuracy=0.3)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4]
        np.testing.assert_array_equal(checkpoints.restore(2, make_state(0))["w"], make_state(2)["w"])
        np.testing.assert_array_equal(checkpoints.restore(4, make_state(0))["w"], make_state(4)["w"])
    assert sorted(os.listdir(folder)) == ["2", "4"]
    assert Manifest.from_bytes((folder / "4" / "manifest.json").read_bytes()).step == 4


def test_one_without_its_step_is_restored(folder):
    """As they were written before the step was part of the metadata."""
    path = folder / "3" / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    assert metadata["custom_metadata"].pop("step") == 3
    path.write_text(json.dumps(metadata))
    np.testing.assert_array_equal(restore(folder, 3)["w"], make_state(3)["w"])


def test_one_that_was_copied_under_another_step_is_refused(folder):
    shutil.copytree(folder / "1", folder / "9")
    with pytest.raises(DamagedCheckpointError, match=r"checkpoints/9 is damaged: it was saved after step 1, not after"):
        restore(folder, 9)


def test_a_flipped_bit_is_detected(folder):
    path = max((path for path in (folder / "3").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"checkpoints/3 is damaged: "):
        restore(folder, 3)


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "metrics/metrics"])
def test_invalid_metadata_is_moved_aside_when_a_run_resumes(folder, name):
    (folder / "2" / name).write_text("{")
    with pytest.raises(DamagedCheckpointError, match="its metadata is not valid JSON"):
        Checkpoints(folder, read_only=True)
    with Checkpoints(folder) as checkpoints:
        assert (checkpoints.steps(), checkpoints.moved) == ([1, 3], {2: folder.with_name("damaged") / "2"})


@pytest.mark.parametrize(
    "name", ["_CHECKPOINT_METADATA", "metrics/metrics", "default/_METADATA", "default/manifest.ocdbt"]
)
def test_a_file_that_cannot_be_read_is_no_damage(folder, sleeps, name):
    path = folder / "2" / name
    path.unlink()
    path.symlink_to("/proc/self/mem")  # its first byte cannot be read: EIO
    with pytest.raises(UserError, match=rf"^cannot read .*2/{name}: Input/output error, also after 15"):
        restore(folder, 2)
    assert sleeps == list(checkpoint_files.RETRY_DELAYS_S)


def test_one_of_another_model_is_refused(folder):
    with (
        Checkpoints(folder, read_only=True) as checkpoints,
        pytest.raises(UserError, match=r"checkpoint 3 does not fit .*: w has shape \(100, 300\), wanted \(4,\)"),
    ):
        checkpoints.restore(3, {"w": jnp.zeros(4)})


def test_without_orbax_the_message_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(
        UserError, match=r"was written by an earlier version, with Orbax.*pip install 'podscale\[orbax\]'"
    ):
        restore(folder, 3)


@pytest.mark.heavy
def test_a_run_resumes_from_them_and_ends_bit_identical(short_run, tmp_path, capsys):
    run = Path(shutil.copytree(short_run, tmp_path / "run"))
    losses = [line["loss"] for line in Run.load(run).metrics() if line["event"] == "train"]
    rewrite_with_orbax(run / "checkpoints", 12)
    shutil.rmtree(run / "checkpoints" / "23")
    train(run, console=Console(width=300))
    assert "resuming after step 12" in capsys.readouterr().out
    assert [line["loss"] for line in Run.load(run).metrics() if line["event"] == "train"] == losses
    assert (run / "checkpoints" / "23" / "manifest.json").exists()


def rewrite_with_orbax(folder, step):
    """Replace a checkpoint by the same arrays as Orbax writes them."""
    manifest = Manifest.from_bytes((folder / str(step) / "manifest.json").read_bytes())
    with Checkpoints(folder, read_only=True) as checkpoints:
        like = {spec.name: jnp.zeros(spec.shape, spec.dtype) for spec in manifest.arrays}
        arrays = checkpoints.restore(step, like)
    shutil.rmtree(folder / str(step))
    write_with_orbax(folder.with_name("old"), {step: (arrays, manifest.accuracy)})
    Path(folder.with_name("old") / str(step)).rename(folder / str(step))


def test_a_training_process_does_not_import_orbax():
    code = "import sys, podscale.training.loop; print('orbax' in sys.modules)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout == "False\n"
