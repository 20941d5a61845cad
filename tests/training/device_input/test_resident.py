"""Pictures that live on the devices: never another pixel, never another training; refused where that cannot be."""

import types

import jax
import numpy as np
import pytest
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data import crop as crops
from podscale.data import picks
from podscale.data.index.dataset import Index, open_index
from podscale.data.order import crop_boxes
from podscale.errors import UserError
from podscale.pod import Pod
from podscale.runs.folder import Run
from podscale.training import compilation, evaluate, loop, setup
from podscale.training.device_input import resident

QUIET = Console(quiet=True)


def small(**changes):
    """A few updates of a tiny network, with all that is drawn on the device as well."""
    settings = {
        "model.width": 8,
        "batch.size": 64,
        "batch.span": 16,
        "train.epochs": 6.5 * 64 / 1437,
        "train.eval_epochs": 1,
        "augment.flip": True,
        "augment.padding": 2,
        "augment.erase": 0.5,
    }
    return recipes.override(recipes.load("digits"), settings | changes)


# --- pixels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crop", ["padded", "centre"])
@pytest.mark.parametrize(("height", "width", "padding"), [(12, 12, 4), (17, 12, 15), (12, 13, 0)])
def test_a_crop_taken_on_the_device_is_the_one_the_host_makes(crop, height, width, padding):
    random, size = np.random.default_rng(0), 12
    images = random.integers(0, 256, (40, height, width, 3), np.uint8)
    sizes = np.broadcast_to(np.array([width, height], np.int32), (40, 2))
    index = Index(np.zeros(40, np.int32), sizes, images=images)
    recipe = recipes.override(
        recipes.Recipe(), {"data.image_size": size, "augment.crop": crop, "augment.padding": padding}
    )
    samples, passes = random.integers(0, 40, (3, 100)), random.integers(0, 9, (3, 100))
    boxes, mirrored = crop_boxes(recipe.augment, 0, passes.ravel(), samples.ravel(), sizes[samples.ravel()], size)
    wanted = np.empty((300, size, size, 3), np.uint8)
    crops.crop_batch(index, samples.ravel(), boxes, mirrored, size, wanted)
    picked = picks.make_picks(recipe, index, samples, passes)
    found = jax.jit(resident.taken, static_argnums=2)(images, picked, size)
    assert found.shape == (3, 100, size, size, 3)
    np.testing.assert_array_equal(np.asarray(found).reshape(wanted.shape), wanted)


# --- training ----------------------------------------------------------------------------------------------------


def trained(recipe, shape, **options):
    """Metrics of every update, the state at the end, and what an evaluation finds."""
    job = setup.prepare(recipe, pod.of(jax.devices(), shape), Options(**options))
    call, state, seen = compilation.compile_train_step(job), job.state, []
    with setup.train_batches(job, job.plan.calls()) as batches:
        for batch in batches:
            state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
            seen.append(np.stack(jax.device_get(metrics))[:, : batch.count])
    return np.concatenate(seen, axis=1), jax.device_get(state), evaluate.Evaluator(job)(state)


@pytest.mark.parametrize(
    ("shape", "options"),
    [pytest.param("1x1", {}, marks=pytest.mark.slow), ("2x2", {"steps_per_call": 2, "summation": "torus"})],
    ids=["1x1", "2x2"],
)
def test_a_training_with_pictures_on_the_devices_is_the_same_to_the_last_bit(shape, options):
    host, device = (trained(small(), shape, cache=cache, **options) for cache in ("none", "device"))
    np.testing.assert_array_equal(host[0], device[0])
    assert host[0].shape == (5, 7)
    assert host[2] == device[2]
    assert jax.tree.structure(host[1]) == jax.tree.structure(device[1])
    for one, other in zip(jax.tree.leaves(host[1]), jax.tree.leaves(device[1]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_loaded_is_small_and_a_run_says_where_its_pictures_are(tmp_path):
    options = Options(cache="device")
    summary = loop.train(small(), pod=pod.of(jax.devices(), "1x1"), folder=tmp_path, options=options, console=QUIET)
    assert 0 < summary["accuracy_s"] <= summary["train_s"]
    plan = Run.plan_in(tmp_path)
    assert plan["input"]["cache"] == {"train": "device", "val": "device"}
    assert plan["bytes_per_device"]["pictures"] == 1797 * 8 * 8 * 3
    assert plan["bytes_per_device"]["input"] == 3 * 64 * 16


# --- where it is possible ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"augment.crop": "resized"}, "augment.crop resized needs the host"),
        ({"augment.randaugment": 2}, "augment.randaugment needs the host"),
        ({"data.image_size": 16}, "crops of 8 px would have to be resized to data.image_size 16"),
        ({"data.source": "folder", "data.path": "."}, "pictures of data.source folder are in files"),
    ],
)
def test_what_needs_the_host_is_refused_in_a_sentence(changes, why):
    recipe, data = small(**changes), open_index(small().data)
    with pytest.raises(UserError, match=f"plan.cache device: {why}"):
        resident.settled(Options(cache="device"), recipe, pod.of(jax.devices(), "1x1"), data)


def like_gpu(memory_bytes):
    return Pod("gpu", 1, 1, devices=(types.SimpleNamespace(platform="gpu"),), memory_bytes=memory_bytes)


def test_pictures_are_put_on_a_device_unasked_only_where_that_is_little_of_a_gpus_memory():
    recipe, data = small(), open_index(small().data)
    taken = data.train.images.nbytes

    def chosen(where, recipe=recipe, **options):
        return resident.settled(Options(**options), recipe, where, data).cache

    assert chosen(like_gpu(16 * taken)) == "device"
    assert chosen(like_gpu(16 * taken - 16)) == "auto"
    assert chosen(like_gpu(16 * taken), cache="decoded") == "decoded"
    assert chosen(like_gpu(16 * taken), small(**{"augment.crop": "resized"})) == "auto"
    assert chosen(pod.of(jax.devices(), "1x1")) == "auto"
    assert chosen(like_gpu(1), cache="device") == "device"
