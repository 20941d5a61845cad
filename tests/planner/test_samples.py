"""The grid of samples shows what the training step gets."""

import jax
import numpy as np
import pytest
from PIL import Image

from podscale import plan as plans
from podscale import pod as pods
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data import loader
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.plan import Counts
from podscale.planner import samples
from podscale.training.device_input import augment

MIXED = {"augment.mixup": 0.3, "augment.erase": 0.5, "batch.size": 32, "batch.span": 8}


@pytest.mark.heavy
@pytest.mark.parametrize("step", [0, 50])
@pytest.mark.parametrize("shape", ["1x1", "2x2"])
def test_the_grid_has_the_samples_of_the_training_batch(step, shape):
    recipe = recipes.override_recipe(recipes.load_recipe("digits"), MIXED)
    data = open_index(recipe.data)
    pod = pods.find_pod(virtual=shape)
    plan = plans.make_plan(recipe, pod, Counts(len(data.train), len(data.val), 10), Options())
    mesh = pod.mesh(plan.tile)
    with loader.load_train_batches(
        data.train, plan, [range(step, step + 1)], pods.make_batch_sharding(mesh, axis=2)
    ) as batches:
        batch = next(batches)
    images, labels = jax.device_get((batch.images[0, 0], batch.labels[0, 0]))
    prepare = jax.jit(augment.prepare_batch, static_argnums=(0, 5))
    expected, targets = prepare(recipe, images, labels, np.int32(step), np.arange(32), 10)
    expected = np.asarray(expected) * np.array(recipe.data.std) + np.array(recipe.data.mean)
    pixels, soft_labels = samples.load_training_samples(recipe, data, step, 11)
    assert np.abs(pixels - (expected[:11] * 255).clip(0, 255)).max() <= 0.5 + 1e-3
    np.testing.assert_allclose(soft_labels, targets[:11], atol=1e-6)


def test_the_grid_holds_every_image_and_its_caption(tmp_path):
    recipe = recipes.load_recipe("digits")
    summary = samples.write_grid(recipe, tmp_path / "grid.png", count=10)
    pixels, targets = samples.load_training_samples(recipe, open_index(recipe.data), 0, 10)
    assert summary["captions"] == [str(np.argmax(target)) for target in targets]
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    side = 96
    assert np.array_equal(grid[samples.GAP : samples.GAP + side : 12, samples.GAP : samples.GAP + side : 12], pixels[0])


def test_captions_of_mixed_images_name_both_classes():
    target = np.full(10, 0.01)
    target[3], target[7] = 0.7, 0.22
    names = tuple("abcdefghij")
    assert samples._make_caption(target, names, 0.1) == "70% d + 22% h"
    assert samples._make_caption(np.eye(10)[4] * 0.9 + 0.01, names, 0.1) == "e"
    assert samples._make_caption(np.array([0.95, 0.05]), ("cat", "dog"), 0.1) == "cat"
    assert samples._make_caption(np.array([0.95, 0.05]), ("cat", "dog"), 0.0) == "95% cat + 5% dog"


def test_validation_samples_are_drawn_as_evaluation_sees_them(tmp_path):
    recipe = recipes.load_recipe("digits")
    summary = samples.write_grid(recipe, tmp_path / "val.png", "val", 5)
    assert summary["description"] == "5 of 360 validation samples, as the model sees them"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "grid.jpg"}, "must end in .png"),
        ({"count": 0}, "--images must be 1 to 1024"),
        ({"step": -1}, "--step must be 0 or more"),
        ({"path": "nowhere/grid.png"}, "choose another file with --to"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, arguments, message):
    path = tmp_path / arguments.pop("path", "grid.png")
    with pytest.raises(UserError, match=message):
        samples.write_grid(recipes.load_recipe("digits"), path, **arguments)


def test_a_missing_data_path_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"name the data with --data\.path"):
        samples.write_grid(recipes.load_recipe("imagefolder"), tmp_path / "a.png")
