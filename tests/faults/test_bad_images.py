"""Images that become unreadable after indexing: replaced by a rule, listed, limited in number."""

import io
import itertools

import jax
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data.index.dataset import open_index
from podscale.data.order import Order
from podscale.errors import UserError
from podscale.runs.folder import Run
from podscale.training import evaluate as evaluates
from podscale.training import loop, setup

N = 1200  # images, of which a share of 0.002 may be bad: two
COLORS = ((200, 40, 40), (40, 200, 40))


@pytest.fixture(scope="module")
def images():
    """Encoded images, each of a shade of its own, so that a pixel identifies its image."""
    files = []
    for i in range(N):
        shade = np.full((10, 10, 3), COLORS[i % 2], np.uint8)
        shade[..., 2] = i % 251
        file = io.BytesIO()
        Image.fromarray(shade).save(file, "PNG" if i % 3 else "JPEG", **({} if i % 3 else {"quality": 95}))
        files.append(file.getvalue())
    return files


@pytest.fixture
def folder(images, tmp_path):
    for i, data in enumerate(images):
        path = tmp_path / ("val" if i < 100 else "train") / f"class{i % 2}" / f"{i:04}.{'png' if i % 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path


@pytest.fixture
def recipe(folder):
    changes = {"data.source": "folder", "data.path": str(folder), "data.lanes": 2, "model.width": 8}
    changes |= {"batch.size": 64, "batch.span": 32, "train.epochs": 1, "train.eval_epochs": 1}
    return recipes.override_recipe(recipes.load_recipe("digits"), changes | {"data.bad_share": 0.002})


def damage_file(index, sample):
    """Damage a file without changing its length, which the index knows; return its path."""
    (path,), _, (length,) = index.locate_bytes(np.array([sample]))
    start = length - 12 if path.endswith(".jpg") else 45  # after all headers, in the pixels
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(bytes(length - start))
    return path


def load_epoch(recipe, shape, cache):
    """Return pixels and labels of an epoch, and the messages about bad images."""
    prepared = setup.cache_images(setup.prepare(recipe, pod.make_pod(jax.devices(), shape), Options(cache=cache)))
    with setup.load_train_batches(prepared, prepared.plan.calls()) as batches:
        arrays = [(np.asarray(batch.images), np.asarray(batch.labels)) for batch in batches]
        return arrays, sorted(batches.bad_images.pop_messages())


@pytest.mark.parametrize("cache", ["none", "encoded", "decoded"])
def test_the_next_image_of_the_lane_replaces_a_bad_one(recipe, cache):
    train_index = open_index(recipe.data).train
    original, messages = load_epoch(recipe, "1x1", cache)
    assert messages == []
    bad = (401, 404)
    paths = [damage_file(train_index, sample) for sample in bad]
    damaged, messages = load_epoch(recipe, "2x2", cache)
    assert [path for path, text in itertools.product(sorted(paths), messages) if path in text] == sorted(paths)
    order = Order(len(train_index), 2, 64, recipe.train.seed)
    for step, ((images, labels), (before, labels_before)) in enumerate(zip(damaged, original, strict=True)):
        samples, _ = order.get_samples(step, np.arange(64))
        replaced = np.isin(samples, bad)
        expected = np.where(replaced, samples + 2, samples)
        np.testing.assert_array_equal(labels.ravel(), train_index.labels[expected])
        assert np.array_equal(images[0, 0][~replaced], before[0, 0][~replaced])
        assert np.array_equal(labels_before.ravel()[~replaced], labels.ravel()[~replaced])


def test_a_run_reports_and_lists_bad_images_and_continues(recipe, tmp_path_factory, capsys):
    splits = open_index(recipe.data)
    bad = [damage_file(splits.train, 7), damage_file(splits.train, 800)]
    run = tmp_path_factory.mktemp("runs") / "run"
    summary = loop.train(recipe, pod=pod.make_pod(jax.devices(), "1x1"), folder=run, console=Console(width=400))
    assert summary["steps"] == 18
    listing = Run.load(run).get_bad_images_path(0).read_text()
    output = capsys.readouterr().out
    assert all(path in listing and path in output for path in bad)
    assert listing.count("\n") == 2


def test_more_bad_images_than_allowed_stop_the_run(recipe, tmp_path_factory):
    splits = open_index(recipe.data)
    for sample in (7, 300, 800):
        damage_file(splits.train, sample)
    with pytest.raises(UserError, match=r"3 of 1100 images cannot be read, more than data.bad_share allows"):
        loop.train(
            recipe,
            pod=pod.make_pod(jax.devices(), "1x1"),
            folder=tmp_path_factory.mktemp("runs") / "run",
            console=Console(quiet=True),
        )


def test_an_unreadable_validation_image_counts_as_wrong(recipe):
    allowed = recipes.override_recipe(recipe, {"data.bad_share": 0.05})
    prepared = setup.prepare(allowed, pod.make_pod(jax.devices(), "1x2"))
    evaluate = evaluates.Evaluator(prepared)
    before = evaluate(prepared.init_state())
    # The untrained model predicts one class for every image; either class may be that one.
    bad = [
        damage_file(prepared.data.val, int(sample))
        for label in (0, 1)
        for sample in np.flatnonzero(prepared.data.val.labels == label)[:2]
    ]
    after = evaluate(prepared.init_state())
    assert after["examples"] == before["examples"] == 100
    assert after["accuracy"] < before["accuracy"]
    assert sorted(evaluate.unreadable_images) == sorted(
        text for text in evaluate.unreadable_images if any(path in text for path in bad)
    )
    assert len(evaluate.unreadable_images) == 4
