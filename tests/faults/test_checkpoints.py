"""Faults on disk: flipped bits, missing and truncated files, a full disk, two trainings in one folder."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from support.short_run import OPTIONS, train

from podscale import pod
from podscale import recipe as recipes
from podscale.cli import main
from podscale.config.options import Options
from podscale.config.stop_condition import StopCondition
from podscale.errors import UserError
from podscale.parallel import checksum
from podscale.runs.folder import Run
from podscale.storage.lock import FolderLock
from podscale.training.checkpoint import last as last_checkpoint
from podscale.training.checkpoint.checkpoints import CheckpointNotSavedError, Checkpoints, DamagedCheckpointError


def make_state(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {"w": jax.random.normal(keys[0], (100, 300)), "v": jax.random.normal(keys[1], (70,)), "n": jnp.int32(seed)}


@pytest.fixture
def checkpoint_folder(tmp_path):
    """Checkpoints 1, 2 and 3 of a small state."""
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), accuracy=step / 10)
    return tmp_path / "checkpoints"


def list_files(folder):
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)


def restore(folder, step):
    with Checkpoints(folder, read_only=True) as checkpoints:
        return checkpoints.restore(step, make_state(0))


def test_a_restored_checkpoint_equals_the_saved_state(checkpoint_folder):
    for step in (1, 2, 3):
        for ours, theirs in zip(
            jax.tree.leaves(restore(checkpoint_folder, step)), jax.tree.leaves(make_state(step)), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_is_detected(checkpoint_folder, seed):
    """A bit anywhere in the arrays, or in the manifest."""
    draw = random.Random(seed)
    path = draw.choice(list_files(checkpoint_folder / "3"))
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"checkpoints/3 is damaged: "):
        restore(checkpoint_folder, 3)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "missing"])
def test_every_truncated_emptied_or_missing_file_is_detected(checkpoint_folder, damage):
    for name in [path.relative_to(checkpoint_folder / "3") for path in list_files(checkpoint_folder / "3")]:
        copy = checkpoint_folder.with_name("copy") / "3"
        shutil.copytree(checkpoint_folder / "3", copy)
        if damage == "missing":
            (copy / name).unlink()
        else:
            size = (copy / name).stat().st_size
            os.truncate(copy / name, size // 2 if damage == "truncated" else 0)
        with pytest.raises(DamagedCheckpointError):
            restore(copy.parent, 3)
        shutil.rmtree(copy.parent)


def test_a_checksum_does_not_depend_on_the_sharding():
    mesh = pod.make_pod(jax.devices()[:4], "2x2").mesh((1, 1))
    array = jax.random.normal(jax.random.key(0), (64, 33))
    spread = jax.device_put(array, pod.make_batch_sharding(mesh))
    assert checksum.checksum_arrays([array]).tolist() == checksum.checksum_arrays([spread]).tolist()


# --- training ------------------------------------------------------------------------------------------------------


def read_losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(short_run, tmp_path, capsys):
    run = Path(shutil.copytree(short_run, tmp_path / "run"))
    path = list_files(run / "checkpoints" / "23")[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    (run / "summary.json").unlink()
    train(run, console=Console(width=200))
    output = capsys.readouterr().out
    assert "checkpoint 23 is damaged" in output
    assert "resuming after step 12" in output
    assert (run / "damaged" / "23").is_dir()
    assert read_losses(run) == read_losses(short_run)


def test_a_second_training_in_a_folder_is_refused_and_names_the_first(tmp_path):
    holder = """
import sys, time
from pathlib import Path
from podscale.storage.lock import FolderLock
claim = FolderLock(Path(sys.argv[1]))
claim.acquire()
print("taken", flush=True)
time.sleep(60)
"""
    first = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)],
        stdout=subprocess.PIPE,
    )
    try:
        assert first.stdout.readline() == b"taken\n"
        with pytest.raises(UserError, match=f"is being trained by process {first.pid} on "):
            FolderLock(tmp_path).acquire()
    finally:
        first.kill()
        first.communicate()
    with FolderLock(tmp_path) as lock:
        lock.acquire()  # a killed training holds no lock


@pytest.fixture
def small_disk(tmp_path):
    """A disk of a few megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a disk of its own")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_saved_checkpoints_and_saving_continues_once_there_is_space(small_disk):
    with Checkpoints(small_disk / "checkpoints", keep=3) as checkpoints:
        checkpoints.save(1, make_state(1))
        checkpoints.wait()
        (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 20_000))
        checkpoints.save(2, make_state(2))
        with pytest.raises(CheckpointNotSavedError, match="No space left on device"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
        (small_disk / "filler").unlink()
        checkpoints.save(3, make_state(3))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
    assert sorted(os.listdir(small_disk / "checkpoints")) == ["1", "3"]


def test_a_disk_that_fills_up_prints_nothing_but_what_is_reported(small_disk, capfd):
    """Five saves in a row fail, the last of them with nobody waiting for it but `wait`."""
    state = {str(i): jax.random.normal(jax.random.key(i), (50, 50)) for i in range(60)}
    with Checkpoints(small_disk / "checkpoints") as checkpoints:
        (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 40_000))
        for step in range(1, 6):
            with suppress(CheckpointNotSavedError):
                checkpoints.save(step, state)
        with pytest.raises(CheckpointNotSavedError, match="No space left on device"):
            checkpoints.wait()
    assert "Traceback" not in capfd.readouterr().err


def test_a_read_only_disk_is_not_reported_as_full(small_disk):
    with Checkpoints(small_disk / "checkpoints") as checkpoints:
        checkpoints.save(1, make_state(1))
        checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        checkpoints.save(2, make_state(2))
        with pytest.raises(CheckpointNotSavedError, match=r"^Read-only file system$"):
            checkpoints.wait()
    with pytest.raises(UserError, match=r"^cannot write checkpoints to .*: Read-only file system; make it writable"):
        Checkpoints(small_disk / "checkpoints")
    restored = restore(small_disk / "checkpoints", 1)
    np.testing.assert_array_equal(restored["w"], make_state(1)["w"])


def test_a_run_that_ends_on_a_full_disk_prints_its_result(small_disk, capfd, monkeypatch):
    run, filler = small_disk / "run", small_disk / "filler"
    command = ["train", "digits", *OPTIONS, "--run", str(run), "--json"]
    assert main.main([*command, "--until", "accuracy=0"]) == 0  # up to step 12
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))
    capfd.readouterr()
    fake_time = SimpleNamespace(monotonic=itertools.count(step=700).__next__, sleep=lambda _: None)
    monkeypatch.setattr(last_checkpoint, "time", fake_time)
    assert main.main(command) == 2
    out, err = capfd.readouterr()
    assert json.loads(out)["steps"] == 23
    assert "did not accept the last checkpoint for 2100 s: No space left on device; free space" in err
    assert "Traceback" not in err


def test_training_continues_while_the_disk_is_full(short_run, small_disk, capsys, monkeypatch):
    """From the second epoch on the disk is full. The end waits for space, and nothing is missing then."""
    run, filler = small_disk / "run", small_disk / "filler"
    train(run, until=StopCondition("accuracy", 0.0))
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))
    seen = []

    def sleep(_):
        with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
            seen.append(checkpoints.newest())
        filler.unlink()

    monkeypatch.setattr(last_checkpoint, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert train(run, console=Console(width=300))["steps"] == 23
    assert "disk full; checkpoints are not being written; existing checkpoints are intact" in capsys.readouterr().out
    assert seen == [12]
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.newest() == 23
    assert read_losses(run) == read_losses(short_run)


@pytest.mark.parametrize(
    ("stop_requests", "waited_s", "expected_tries", "newest", "again"),
    [([False] * 9, 2100, 2, 12, "resumes after step 12"), ([False, True], 1400, 1, None, "it starts again")],
)
def test_waiting_for_a_full_disk_ends(monkeypatch, stop_requests, waited_s, expected_tries, newest, again):
    fake_time = SimpleNamespace(monotonic=itertools.count(step=700).__next__, sleep=lambda _: None)
    monkeypatch.setattr(last_checkpoint, "time", fake_time)
    tries, progress = [], []
    events = SimpleNamespace(
        plan=SimpleNamespace(options=Options(timeout_s=1800)),
        run=SimpleNamespace(where="run"),
        tolerate=lambda _: nullcontext(),
    )
    problem = "No space left on device"
    checkpoints = SimpleNamespace(
        wait=lambda: None, is_saved=lambda step: False, newest=lambda: newest, problem=problem
    )
    record = partial(progress.append, 1)
    message = rf"^run did not accept the last checkpoint for {waited_s} s: No space left on device; .* {again}$"
    with pytest.raises(UserError, match=message):
        last_checkpoint.save_last(lambda: tries.append(1), 34, checkpoints, events, iter(stop_requests), record)
    assert len(tries) == expected_tries
    assert len(progress) == expected_tries + 1


def test_a_nonfinite_update_is_skipped_on_every_device():
    from podscale.training import compilation
    from podscale.training.setup import load_train_batches, prepare

    recipe = recipes.override_recipe(recipes.load_recipe("digits"), {"model.width": 8, "train.epochs": 2})
    setup = prepare(recipe, pod.make_pod(jax.devices()[:4], "2x2"))
    call = compilation.compile_train_step(setup)
    with load_train_batches(setup, [range(1), range(1, 2)]) as batches:
        first, second = list(batches)
    state = setup.init_state()
    params = jax.tree.map(lambda a: a.at[..., 0].set(jnp.nan), state.params)
    broken = state._replace(params=params, step=state.step + 1)  # in step 0, the learning rate is 0
    before = jax.device_get(broken)
    after, metrics = call(broken, first.images, first.labels, np.int32(1))
    assert metrics.skipped.tolist() == [1]
    assert int(after.step) == 2
    for name in ("params", "stats", "optimizer", "average"):
        for ours, theirs in zip(
            jax.tree.leaves(getattr(after, name)), jax.tree.leaves(getattr(before, name)), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    state = jax.device_put(jax.tree.map(np.asarray, prepare(recipe, setup.plan.pod).init_state()), after.step.sharding)
    after, metrics = call(state, second.images, second.labels, np.int32(1))
    assert metrics.skipped.tolist() == [0]
