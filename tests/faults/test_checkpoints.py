"""Faults of what is kept on disk: flipped bits, missing and cut files, no room, two trainings in one folder."""

import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.config.stop_condition import Until
from podscale.errors import UserError
from podscale.parallel import checksum
from podscale.runs.folder import Run
from podscale.storage.lock import FolderLock
from podscale.training import loop
from podscale.training.checkpoint import Checkpoints, DamagedError, NotSavedError

QUIET = Console(quiet=True)
# Orbax leaves its event loops open where reading fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def numbers(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {"w": jax.random.normal(keys[0], (100, 300)), "v": jax.random.normal(keys[1], (70,)), "n": jnp.int32(seed)}


@pytest.fixture
def saved(tmp_path):
    """Checkpoints 1, 2 and 3 of a small state."""
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, numbers(step), accuracy=step / 10)
    return tmp_path / "checkpoints"


def data_files(folder):
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)


def restored(folder, step):
    with Checkpoints(folder, read_only=True) as checkpoints:
        return checkpoints.restore(step, numbers(0))


def test_a_whole_checkpoint_is_what_was_saved(saved):
    for step in (1, 2, 3):
        for one, other in zip(jax.tree.leaves(restored(saved, step)), jax.tree.leaves(numbers(step)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_is_found(saved, seed):
    """Anywhere in the largest files, which hold the arrays."""
    draw = random.Random(seed)
    path = draw.choice([path for path in data_files(saved / "3") if path.stat().st_size > 10_000])
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"checkpoints/3 is damaged: "):
        restored(saved, 3)


@pytest.mark.parametrize("harm", ["cut", "emptied", "missing"])
def test_every_file_that_is_cut_emptied_or_missing_is_found_or_not_needed(saved, harm):
    """Some files of Orbax's are only informative; then the arrays are whole all the same."""
    good, found = numbers(3), 0
    for name in [path.relative_to(saved / "3") for path in data_files(saved / "3")]:
        copy = saved.with_name("copy") / "3"
        shutil.copytree(saved / "3", copy)
        if harm == "missing":
            (copy / name).unlink()
        else:
            size = (copy / name).stat().st_size
            os.truncate(copy / name, size // 2 if harm == "cut" else 0)
        try:
            for one, other in zip(jax.tree.leaves(restored(copy.parent, 3)), jax.tree.leaves(good), strict=True):
                np.testing.assert_array_equal(one, other)
        except UserError:
            found += 1
        shutil.rmtree(copy.parent)
    assert found >= 3


def test_a_digest_does_not_depend_on_the_sharding():
    mesh = pod.of(jax.devices()[:4], "2x2").mesh((1, 1))
    array = jax.random.normal(jax.random.key(0), (64, 33))
    spread = jax.device_put(array, pod.batch_sharding(mesh))
    assert checksum.checksum_arrays([array]).tolist() == checksum.checksum_arrays([spread]).tolist()


# --- training ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe():
    changes = {"model.width": 8, "train.epochs": 3, "train.eval_epochs": 1}
    return recipes.override(recipes.load("digits"), changes)


def trained(recipe, folder, **more):
    return loop.train(recipe, pod=pod.of(jax.devices()[:1], "1x1"), folder=folder, **more)


def losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    trained(recipe, folder, console=QUIET)
    return folder


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(recipe, undisturbed, tmp_path, capsys):
    trained(recipe, tmp_path, console=QUIET)
    path = data_files(tmp_path / "checkpoints" / "34")[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    (tmp_path / "summary.json").unlink()
    trained(recipe, tmp_path, console=Console(width=200))
    said = capsys.readouterr().out
    assert "checkpoint 34 is damaged" in said
    assert "resuming after step 23" in said
    assert (tmp_path / "damaged" / "34").is_dir()
    assert losses(tmp_path) == losses(undisturbed)


def test_the_second_training_in_a_folder_is_refused_by_the_firsts_name(tmp_path):
    holder = """
import sys, time
from pathlib import Path
from podscale.storage.lock import FolderLock
claim = FolderLock(Path(sys.argv[1]))
claim.take()
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
            FolderLock(tmp_path).take()
    finally:
        first.kill()
        first.wait()
    with FolderLock(tmp_path) as claim:
        claim.take()  # a killed training claims nothing


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


def test_a_full_disk_keeps_what_is_there_and_saving_goes_on_when_there_is_room(small_disk):
    with Checkpoints(small_disk / "checkpoints", keep=3) as checkpoints:
        checkpoints.save(1, numbers(1))
        checkpoints.wait()
        (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 20_000))
        checkpoints.save(2, numbers(2))
        with pytest.raises(NotSavedError, match="No space left on device"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
        (small_disk / "filler").unlink()
        checkpoints.save(3, numbers(3))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
    assert not list((small_disk / "checkpoints").glob("*tmp*"))


def test_training_goes_on_while_the_disk_is_full(recipe, undisturbed, small_disk, capsys, monkeypatch):
    """From the second epoch on nothing fits any more. At the end room is waited for, and nothing is missing then."""
    run, filler = small_disk / "run", small_disk / "filler"
    trained(recipe, run, until=Until("accuracy", 0.0), console=QUIET)
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))
    seen = []

    def sleep(_):
        with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
            seen.append(checkpoints.newest())
        filler.unlink()

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert trained(recipe, run, console=Console(width=300))["steps"] == 34
    assert "takes no more: No space left on device" in capsys.readouterr().out
    assert seen == [12]
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.newest() == 34
    assert losses(run) == losses(undisturbed)


@pytest.mark.parametrize(("asked", "waited_s", "most"), [([False] * 9, 2100, 2), ([False, True], 1400, 1)])
def test_a_disk_that_stays_full_is_not_waited_for_for_ever(monkeypatch, asked, waited_s, most):
    clock = SimpleNamespace(monotonic=itertools.count(step=700).__next__, sleep=lambda _: None)
    monkeypatch.setattr(loop, "time", clock)
    tries = []
    teller = SimpleNamespace(
        plan=SimpleNamespace(timeout_s=1800), run=SimpleNamespace(folder="run"), bearing=lambda _: nullcontext()
    )
    checkpoints = SimpleNamespace(wait=lambda: None, holds=lambda step: False, newest=lambda: 12)
    words = rf"^run had no room for the last checkpoint in {waited_s} s; .* after step 12$"
    with pytest.raises(UserError, match=words):
        loop._keep_last(lambda: tries.append(1), 34, checkpoints, teller, iter(asked))
    assert len(tries) == most


def test_an_update_without_a_number_is_skipped_on_every_device_alike():
    from podscale.training import compilation, setup

    made = recipes.override(recipes.load("digits"), {"model.width": 8, "schedule.warmup_epochs": 0})
    job = setup.prepare(made, pod.of(jax.devices()[:4], "2x2"))
    call = compilation.compile_train_step(job)
    with setup.train_batches(job, [range(1), range(1, 2)]) as batches:
        first, second = list(batches)
    broken = job.state._replace(params=jax.tree.map(lambda a: a.at[..., 0].set(jnp.nan), job.state.params))
    before = jax.device_get(broken)
    after, metrics = call(broken, first.images, first.labels, np.int32(1))
    assert metrics.skipped.tolist() == [1]
    assert int(after.step) == 1
    for name in ("params", "stats", "optimizer", "average"):
        for one, other in zip(
            jax.tree.leaves(getattr(after, name)), jax.tree.leaves(getattr(before, name)), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    state = jax.device_put(jax.tree.map(np.asarray, setup.prepare(made, job.plan.pod).state), after.step.sharding)
    after, metrics = call(state, second.images, second.labels, np.int32(1))
    assert metrics.skipped.tolist() == [0]
