"""Images that live on the devices change no pixel and no training, and are refused where they cannot."""

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
from podscale.data.order import compute_crop_boxes
from podscale.errors import UserError
from podscale.parallel import inputs
from podscale.pod import Pod
from podscale.runs.folder import Run
from podscale.training import compilation, evaluate, loop
from podscale.training.device_input import resident
from podscale.training.setup import load_train_batches, prepare

QUIET = Console(quiet=True)


def make_small_recipe(**changes):
    """Return a recipe of a few updates of a tiny network, with random augmentation on the device as well."""
    settings = {
        "model.name": "small_resnet",
        "model.width": 8,
        "batch.size": 64,
        "batch.span": 16,
        "train.epochs": 6.5 * 64 / 1437,
        "train.eval_epochs": 1,
        "augment.flip": True,
        "augment.padding": 2,
        "augment.erase": 0.5,
    }
    return recipes.override_recipe(recipes.load_recipe("digits"), settings | changes)


# --- pixels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crop", ["padded", "centre"])
@pytest.mark.parametrize(("height", "width", "padding"), [(12, 12, 4), (17, 12, 15), (12, 13, 0)])
def test_a_crop_on_the_device_equals_the_hosts(crop, height, width, padding):
    random, size = np.random.default_rng(0), 12
    images = random.integers(0, 256, (40, height, width, 3), np.uint8)
    sizes = np.broadcast_to(np.array([width, height], np.int32), (40, 2))
    index = Index(np.zeros(40, np.int32), sizes, images=images)
    recipe = recipes.override_recipe(
        recipes.Recipe(), {"data.image_size": size, "augment.crop": crop, "augment.padding": padding}
    )
    samples, passes = random.integers(0, 40, (3, 100)), random.integers(0, 9, (3, 100))
    boxes, flips = compute_crop_boxes(recipe.augment, 0, passes.ravel(), samples.ravel(), sizes[samples.ravel()], size)
    expected = np.empty((300, size, size, 3), np.uint8)
    crops.crop_batch(index, samples.ravel(), boxes, flips, expected)
    picks_array = picks.make_picks(recipe, index, samples, passes)
    cropped = jax.jit(inputs.crop_picks, static_argnums=2)(images, picks_array, size)
    assert cropped.shape == (3, 100, size, size, 3)
    np.testing.assert_array_equal(np.asarray(cropped).reshape(expected.shape), expected)


# --- training ----------------------------------------------------------------------------------------------------


def train(recipe, shape, **options):
    """Return the metrics of every update, the last state, and the result of an evaluation."""
    setup = prepare(recipe, pod.make_pod(jax.devices(), shape), Options(**options))
    call, state, history = compilation.compile_train_step(setup), setup.init_state(), []
    with load_train_batches(setup, setup.plan.calls()) as batches:
        for batch in batches:
            state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
            history.append(np.stack(jax.device_get(metrics))[:, : batch.count])
    return np.concatenate(history, axis=1), jax.device_get(state), evaluate.Evaluator(setup)(state)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("shape", "options"),
    [pytest.param("1x1", {}, marks=pytest.mark.slow), ("2x2", {"steps_per_call": 2, "summation": "torus"})],
    ids=["1x1", "2x2"],
)
def test_training_with_resident_images_is_bit_identical(shape, options):
    host, device = (train(make_small_recipe(), shape, cache=cache, **options) for cache in ("none", "device"))
    np.testing.assert_array_equal(host[0], device[0])
    assert host[0].shape == (5, 7)
    assert host[2] == device[2]
    assert jax.tree.structure(host[1]) == jax.tree.structure(device[1])
    for one, other in zip(jax.tree.leaves(host[1]), jax.tree.leaves(device[1]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.heavy
def test_resident_input_is_small_and_recorded_in_the_plan(tmp_path):
    options = Options(cache="device")
    summary = loop.train(
        make_small_recipe(), pod=pod.make_pod(jax.devices(), "1x1"), folder=tmp_path, options=options, console=QUIET
    )
    assert 0 < summary["accuracy_s"] <= summary["train_s"]
    plan = Run.read_plan(tmp_path)
    assert plan["input"]["cache"] == {"train": "device", "val": "device"}
    assert plan["bytes_per_device"]["images"] == 1797 * 8 * 8 * 3
    assert plan["bytes_per_device"]["input"] == 3 * 64 * 16


# --- when it is possible -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment.crop": "resized"}, "augment.crop resized needs the host"),
        ({"augment.randaugment": 2}, "augment.randaugment needs the host"),
        ({"data.image_size": 16}, "crops of 8 px would have to be resized to data.image_size 16"),
        ({"data.source": "folder", "data.path": "."}, "images of data.source folder are in files"),
    ],
)
def test_recipes_that_need_the_host_are_refused_in_one_sentence(changes, message):
    recipe, data = make_small_recipe(**changes), open_index(make_small_recipe().data)
    with pytest.raises(UserError, match=f"plan.cache device: {message}"):
        resident.resolve_cache(Options(cache="device"), recipe, pod.make_pod(jax.devices(), "1x1"), data)


def make_gpu_pod(memory_bytes):
    return Pod("gpu", 1, 1, devices=(types.SimpleNamespace(platform="gpu"),), memory_bytes=memory_bytes)


def test_images_become_resident_automatically_only_if_they_take_little_gpu_memory():
    recipe, data = make_small_recipe(), open_index(make_small_recipe().data)
    image_bytes = data.train.images.nbytes

    def resolve(target, recipe=recipe, **options):
        return resident.resolve_cache(Options(**options), recipe, target, data).cache

    assert resolve(make_gpu_pod(16 * image_bytes)) == "device"
    assert resolve(make_gpu_pod(16 * image_bytes - 16)) == "auto"
    assert resolve(make_gpu_pod(16 * image_bytes), cache="decoded") == "decoded"
    assert resolve(make_gpu_pod(16 * image_bytes), make_small_recipe(**{"augment.crop": "resized"})) == "auto"
    assert resolve(pod.make_pod(jax.devices(), "1x1")) == "auto"
    assert resolve(make_gpu_pod(1), cache="device") == "device"
