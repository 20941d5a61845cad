"""Pictures that go bad between the index and the moment they are needed: replaced by rule, listed, limited."""

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
from podscale.errors import UserError
from podscale.runs.folder import Run
from podscale.training import evaluate as evaluates
from podscale.training import loop, setup

N = 1200  # of which a share of 0.002 may be bad: two
COLOURS = ((200, 40, 40), (40, 200, 40))


@pytest.fixture(scope="module")
def pictures():
    """Encoded pictures, each of a shade of its own, so that a pixel tells which one it came from."""
    files = []
    for i in range(N):
        shade = np.full((10, 10, 3), COLOURS[i % 2], np.uint8)
        shade[..., 2] = i % 251
        held = io.BytesIO()
        Image.fromarray(shade).save(held, "PNG" if i % 3 else "JPEG", **({} if i % 3 else {"quality": 95}))
        files.append(held.getvalue())
    return files


@pytest.fixture
def folder(pictures, tmp_path):
    for i, data in enumerate(pictures):
        place = tmp_path / ("val" if i < 100 else "train") / f"class{i % 2}" / f"{i:04}.{'png' if i % 3 else 'jpg'}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return tmp_path


@pytest.fixture
def recipe(folder):
    changes = {"data.source": "folder", "data.path": str(folder), "data.lanes": 2, "model.width": 8}
    changes |= {"batch.size": 64, "batch.span": 32, "train.epochs": 1, "train.eval_epochs": 1}
    return recipes.override(recipes.load("digits"), changes | {"data.bad_share": 0.002})


def spoil(index, sample):
    """Damages a file so that its length, which the index knows, stays the same."""
    (path,), _, (length,) = index.sources(np.array([sample]))
    kept = length - 12 if path.endswith(".jpg") else 45  # past all headers, into the pixels
    with open(path, "r+b") as file:
        file.seek(kept)
        file.write(bytes(length - kept))
    return path


def seen(recipe, shape, cache):
    """Pixels and labels of an epoch, and what is said of it."""
    job = setup.cached(setup.prepare(recipe, pod.of(jax.devices(), shape)), Options(cache=cache))
    with setup.train_batches(job, job.plan.calls()) as batches:
        made = [(np.asarray(batch.images), np.asarray(batch.labels)) for batch in batches]
        return made, sorted(batches.bad.news())


@pytest.mark.parametrize("cache", ["none", "encoded", "decoded"])
def test_the_next_picture_of_the_lane_takes_the_place_of_a_bad_one(recipe, cache):
    train_index = open_index(recipe.data).train
    whole, said = seen(recipe, "1x1", cache)
    assert said == []
    bad = (401, 404)
    paths = [spoil(train_index, sample) for sample in bad]
    harmed, said = seen(recipe, "2x2", cache)
    assert [path for path, text in itertools.product(sorted(paths), said) if path in text] == sorted(paths)
    order = setup.Order(len(train_index), 2, 64, recipe.train.seed)
    for step, ((images, labels), (before, labels_before)) in enumerate(zip(harmed, whole, strict=True)):
        samples, _ = order.at(step, np.arange(64))
        replaced = np.isin(samples, bad)
        instead = np.where(replaced, samples + 2, samples)
        np.testing.assert_array_equal(labels.ravel(), train_index.labels[instead])
        assert np.array_equal(images[0, 0][~replaced], before[0, 0][~replaced])
        assert np.array_equal(labels_before.ravel()[~replaced], labels.ravel()[~replaced])


def test_a_run_tells_of_bad_pictures_lists_them_and_goes_on(recipe, tmp_path_factory, capsys):
    splits = open_index(recipe.data)
    bad = [spoil(splits.train, 7), spoil(splits.train, 800)]
    run = tmp_path_factory.mktemp("runs") / "run"
    summary = loop.train(recipe, pod=pod.of(jax.devices(), "1x1"), folder=run, console=Console(width=400))
    assert summary["steps"] == 18
    listed = Run.load(run).bad_pictures(0).read_text()
    said = capsys.readouterr().out
    assert all(path in listed and path in said for path in bad)
    assert listed.count("\n") == 2


def test_more_bad_pictures_than_allowed_stop_the_run(recipe, tmp_path_factory):
    splits = open_index(recipe.data)
    for sample in (7, 300, 800):
        spoil(splits.train, sample)
    with pytest.raises(UserError, match=r"3 of 1100 pictures cannot be read, more than data.bad_share allows"):
        loop.train(
            recipe,
            pod=pod.of(jax.devices(), "1x1"),
            folder=tmp_path_factory.mktemp("runs") / "run",
            console=Console(quiet=True),
        )


def test_an_unreadable_validation_picture_counts_as_wrong(recipe):
    allowed = recipes.override(recipe, {"data.bad_share": 0.05})
    job = setup.prepare(allowed, pod.of(jax.devices(), "1x2"))
    evaluate = evaluates.Evaluator(job)
    before = evaluate(job.state)
    # The untrained model calls everything by one name: either class may be the one that it gets right.
    bad = [
        spoil(job.data.val, int(sample))
        for label in (0, 1)
        for sample in np.flatnonzero(job.data.val.labels == label)[:2]
    ]
    after = evaluate(job.state)
    assert after["examples"] == before["examples"] == 100
    assert after["accuracy"] < before["accuracy"]
    assert sorted(evaluate.unreadable) == sorted(text for text in evaluate.unreadable if any(b in text for b in bad))
    assert len(evaluate.unreadable) == 4
