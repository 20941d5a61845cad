"""A rehearsal reports what the run would do."""

import math

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from podscale import pod as pods
from podscale.config.options import Options
from podscale.data.order import Order
from podscale.errors import UserError
from podscale.models import registry
from podscale.planner import rehearsal
from podscale.recipe import load_recipe


@pytest.fixture(scope="module")
def rehearsed():
    recipe = load_recipe("digits").override({"train.epochs": 7, "train.eval_epochs": 2, "model.width": 8})
    return recipe, rehearsal.rehearse(recipe, pods.make_pod(jax.devices()[:4], "2x2"), images=32)


def test_steps_evaluations_and_samples_equal_those_of_the_run(rehearsed):
    recipe, result = rehearsed
    assert result["steps"] == math.ceil(7 * 1437 / recipe.batch.size) == 79
    assert result["evaluated_after"] == [math.ceil(k * 1437 / recipe.batch.size) for k in (2, 4, 6, 7)]
    assert result["examples_evaluated"] == 4 * 360
    assert result["order"]["drawn"] == 79 * recipe.batch.size
    assert (result["order"]["whole_passes"], result["order"]["drawn_twice"]) == (7, 0)


def test_the_learning_rate_follows_the_schedule(rehearsed):
    recipe, result = rehearsed
    warm_up = 3 * 1437 / recipe.batch.size
    assert result["learning_rate"]["peak_step"] == math.ceil(warm_up)
    assert 0.9 * recipe.schedule.peak < result["learning_rate"]["peak"] <= recipe.schedule.peak
    assert result["learning_rate"]["points"][0] == (0, 0.0)
    assert result["learning_rate"]["falls_after_peak"]


def test_the_checkpoint_has_its_full_size(rehearsed):
    recipe, result = rehearsed
    model = registry.build_model(recipe.model, 10, 8, 0)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert result["checkpoint"]["bytes"] > 2 * 4 * numbers * 0.5  # parameters and momentum; the disk's format is denser


def test_repeated_samples_are_counted(rehearsed, monkeypatch):
    recipe, _ = rehearsed
    original = Order.get_samples

    def repeat_samples(self, steps, positions):
        samples, passes = original(self, steps, positions)
        return np.where(samples == 5, 3, samples), passes

    monkeypatch.setattr(Order, "get_samples", repeat_samples)
    result = rehearsal.rehearse(recipe, pods.make_pod(jax.devices()[:1], "1x1"), images=0)
    assert result["order"]["whole_passes"] == 0
    assert result["order"]["drawn_twice"] >= 7


def test_unreadable_images_are_named(tmp_path):
    for split in ("train", "val"):
        for label in ("ant", "bee"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(8):
                noise = np.random.default_rng(i).integers(0, 256, (48, 48, 3), np.uint8)
                Image.fromarray(noise).save(tmp_path / split / label / f"{i}.jpg")
    bad = tmp_path / "train" / "ant" / "3.jpg"
    bad.write_bytes(bad.read_bytes()[:1500])
    changes = {"data.source": "folder", "data.path": str(tmp_path), "data.lanes": 1, "batch.size": 16, "batch.span": 16}
    recipe = load_recipe("digits").override(changes | {"train.epochs": 1, "model.width": 8})
    result = rehearsal.rehearse(recipe, pods.make_pod(jax.devices()[:1], "1x1"), images=16)
    assert result["decoded"]["images"] == 16
    assert [str(bad) in reason for reason in result["decoded"]["unreadable"]] == [True]


def test_a_negative_number_of_images_is_refused():
    with pytest.raises(UserError, match="--images must be 0 or more"):
        rehearsal.rehearse(load_recipe("digits"), pods.make_pod(jax.devices()[:1], "1x1"), Options(), images=-1)
