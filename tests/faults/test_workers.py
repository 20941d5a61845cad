"""Pictures are decoded by threads of the training process: there is no worker process that could die alone.

Whatever takes memory too much takes the process as a whole, which test_kills.py does to it. Here: that there are no
other processes, whatever the pictures and however they are augmented, and that a thread which fails ends the batches
with what it failed of, rather than never.
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
    """JPEG, PNG and WebP, some of them lying on their side, through RandAugment."""
    writers.write_folder(tmp_path)
    changes = {"data.source": "folder", "data.path": str(tmp_path), "data.lanes": 1, "model.width": 8}
    changes |= {"batch.size": 8, "batch.span": 8, "augment.randaugment": 2, "train.epochs": 40}
    return recipes.override(recipes.load("digits"), changes)


def children():
    """Processes that this one has started and that still live."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(path.parent.name)
    return found


@pytest.mark.parametrize("decoder", ["native", "plain"])
def test_no_process_is_started_to_decode(recipe, monkeypatch, decoder):
    monkeypatch.setenv("PODSCALE_DECODER", decoder if decode.native is not None else "plain")
    before, forked = children(), []
    os.register_at_fork(before=lambda: forked.append(threading.current_thread().name))
    job = setup.prepare(recipe, pod.of(jax.devices()[:1], "1x1"))
    with setup.train_batches(job, job.plan.calls()[:6]) as batches:
        for _ in batches:
            assert children() == before
    assert not [name for name in forked if name.startswith("podscale")]


@pytest.mark.parametrize(("module", "function"), [(crop, "crop_batch"), (randaugment, "apply_batch")])
def test_a_thread_that_runs_out_of_memory_ends_the_batches_with_that(recipe, monkeypatch, module, function):
    job = setup.prepare(recipe, pod.of(jax.devices()[:1], "1x1"))
    work, seen = getattr(module, function), []

    def failing(*args, **more):
        seen.append(1)
        if len(seen) == 3:
            raise MemoryError("no room for a picture")
        return work(*args, **more)

    monkeypatch.setattr(module, function, failing)
    with (
        setup.train_batches(job, job.plan.calls()) as batches,
        pytest.raises(MemoryError, match="no room for a picture"),
    ):
        list(batches)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("podscale-d", "podscale-b"))]
