"""Images are decoded by threads of the training process: there is no worker process that could die alone.

When memory runs out, the kernel kills the whole process, which test_kills.py covers. These tests check that there are
no other processes, for any kind of image and augmentation, and that the error of a thread ends the batches instead of
blocking them forever.
"""

import contextlib
import os
import threading
from pathlib import Path

import jax
import pytest
from support import writers

from podscale import pod
from podscale import recipe as recipes
from podscale.data import crop, decode, randaugment
from podscale.training import setup


@pytest.fixture
def recipe(tmp_path):
    """JPEG, PNG and WebP, some of them rotated by EXIF, through RandAugment."""
    writers.write_folder(tmp_path)
    changes = {"data.source": "folder", "data.path": str(tmp_path), "data.lanes": 1, "model.width": 8}
    changes |= {"batch.size": 8, "batch.span": 8, "augment.randaugment": 2, "train.epochs": 40}
    return recipes.override_recipe(recipes.load_recipe("digits"), changes)


def list_children():
    """Return the processes that this one has started and that are alive."""
    processes = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                processes.add(path.parent.name)
    return processes


@pytest.mark.parametrize("decoder", ["native", "plain"])
def test_decoding_starts_no_process(recipe, monkeypatch, decoder):
    monkeypatch.setenv("PODSCALE_DECODER", decoder if decode.native is not None else "plain")
    before, forks = list_children(), []
    os.register_at_fork(before=lambda: forks.append(threading.current_thread().name))
    prepared = setup.prepare(recipe, pod.make_pod(jax.devices()[:1], "1x1"))
    with setup.load_train_batches(prepared, prepared.plan.calls()[:6]) as batches:
        for _ in batches:
            assert list_children() == before
    assert not [name for name in forks if name.startswith("podscale")]


@pytest.mark.parametrize(("module", "function"), [(crop, "crop_batch"), (randaugment, "augment_batch")])
def test_batches_end_with_the_memory_error_of_a_thread(recipe, monkeypatch, module, function):
    prepared = setup.prepare(recipe, pod.make_pod(jax.devices()[:1], "1x1"))
    work, calls = getattr(module, function), []

    def fail_at_third_call(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no memory for an image")
        return work(*args, **kwargs)

    monkeypatch.setattr(module, function, fail_at_third_call)
    with (
        setup.load_train_batches(prepared, prepared.plan.calls()) as batches,
        pytest.raises(MemoryError, match="no memory for an image"),
    ):
        list(batches)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("podscale-d", "podscale-b"))]
