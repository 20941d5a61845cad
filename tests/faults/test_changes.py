"""Data, recipe and libraries that change between two sessions of a run: reported, refused, and allowed by name."""

import json

import numpy as np
import pytest

from podscale import recipe as recipes
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.runs.environment import list_library_versions
from podscale.runs.folder import Run

CLASSES = ("cat", "dog")
PLAN = {"counts": {"train": 10, "val": 5, "classes": 2}, "data_digest": "00c0ffee", "versions": list_library_versions()}


@pytest.fixture
def recipe():
    return recipes.load_recipe("digits")


@pytest.fixture
def folder(tmp_path, recipe):
    return Run.create(tmp_path / "run", recipe, PLAN, CLASSES).folder


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("data", {"counts": {"train": 11, "val": 5, "classes": 2}}, "train 10, now 11"),
        ("data", {"data_digest": "deadbeef"}, "00c0ffee, now deadbeef"),
        (
            "versions",
            {"versions": list_library_versions() | {"jax": "9.9.9"}},
            f"jax {list_library_versions()['jax']}, now 9.9.9",
        ),
    ],
)
def test_a_change_is_reported_and_refused_unless_it_is_allowed(folder, recipe, kind, change, message):
    with pytest.raises(UserError, match=message) as refusal:
        Run.create(folder, recipe, PLAN | change, CLASSES)
    assert f"--allow-changed {kind}" in str(refusal.value)
    others = {"data", "versions", "recipe"} - {kind}
    with pytest.raises(UserError, match=message):
        Run.create(folder, recipe, PLAN | change, CLASSES, others)
    Run.create(folder, recipe, PLAN | change, CLASSES, [kind])
    assert json.loads((folder / "plan.json").read_text()) == PLAN | change
    Run.create(folder, recipe, PLAN | change, CLASSES)  # an allowed change belongs to the run from then on


def test_another_recipe_is_refused_unless_it_is_allowed(folder, recipe):
    changed = recipes.override_recipe(recipe, {"schedule.peak": 3.0})
    with pytest.raises(UserError, match=r"schedule\.peak .*, now 3\.0.*--allow-changed recipe"):
        Run.check(folder, changed)
    Run.create(folder, changed, PLAN, CLASSES, ["recipe"])
    assert Run.load(folder).recipe.schedule.peak == 3.0


def test_only_kinds_of_changes_can_be_allowed(folder, recipe):
    with pytest.raises(UserError, match="--allow-changed takes recipe, data, versions, not 'weather'"):
        Run.check(folder, recipe, ["weather"])


def test_one_changed_pixel_or_label_changes_the_data_digest(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    labels = np.arange(40) % 2

    def compute_digest(images, labels):
        path = tmp_path / "data.npz"
        np.savez(path, train_images=images, train_labels=labels, val_images=images, val_labels=labels)
        return open_index(recipes.Data(source="npz", path=str(path))).digest()

    first = compute_digest(images, labels)
    assert compute_digest(images, labels) == first
    changed = images.copy()
    changed[3, 2, 1, 0] ^= 1
    assert compute_digest(changed, labels) != first
    assert compute_digest(images, labels[::-1]) != first
