"""`data.shrink`: images made smaller before anything else, in training, evaluation and prediction alike."""

import io
import itertools

import jax
import numpy as np
import pytest
from PIL import Image
from support import writers

from podscale import recipe as recipes
from podscale.data import decode, loader
from podscale.data.index.dataset import index_files, open_index
from podscale.data.order import compute_eval_boxes
from podscale.errors import UserError
from podscale.export import inference
from podscale.training.loop import train

SIZE, LONGEST = 8, 20
TINY = {"model.name": "resnet8", "model.stem": "small", "model.width": 8, "data.image_size": SIZE}
TINY |= {"batch.size": 4, "batch.span": 4, "train.epochs": 1, "train.eval_epochs": 1}
TINY |= {"optimizer.name": "sgd"}  # which is compiled sooner than Muon


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = writers.write_folder(tmp_path_factory.mktemp("shrink"))
    return recipes.override_recipe(
        recipes.load_recipe("imagefolder"), TINY | {"data.path": str(root), "data.shrink": LONGEST}
    )


def shrink_with_pillow(image):
    """Resize horizontally, then vertically, by Pillow alone."""
    scale = min(1, LONGEST / max(image.size))
    width, height = (max(1, int(side * scale + 0.5)) for side in image.size)
    narrowed = image.resize((width, image.height), Image.Resampling.BILINEAR)
    return narrowed.resize((width, height), Image.Resampling.BILINEAR)


def crop_with_pillow(index, sample):
    """Return what evaluation has to see."""
    image = shrink_with_pillow(Image.fromarray(decode.decode_image(index.read(sample))))
    out = np.zeros((SIZE, SIZE, 3), np.uint8)
    decode.crop_image(np.asarray(image), compute_eval_boxes(0.875, np.array([image.size]))[0], False, SIZE, out)
    return out


@pytest.mark.parametrize(
    ("size", "longest", "result"),
    [
        ((500, 375), 400, (400, 300)),
        ((375, 500), 400, (300, 400)),
        ((500, 333), 256, (256, 170)),  # 170.496
        ((500, 334), 256, (256, 171)),  # 171.008
        ((400, 300), 400, (400, 300)),  # already small enough
        ((3, 2), 400, (3, 2)),  # never larger
        ((1000, 1), 10, (10, 1)),  # never empty
        ((501, 501), 500, (500, 500)),
        ((4, 2), 1, (1, 1)),
        ((500, 375), 0, (500, 375)),
    ],
)
def test_the_longer_side_is_limited_and_the_other_is_rounded_to_the_nearest_pixel(size, longest, result):
    assert tuple(decode.shrink_sizes(np.array([size], np.int32), longest)[0]) == result


def test_pixels_equal_those_of_an_image_shrunk_beforehand(recipe):
    index = open_index(recipe.data).train
    assert index.sizes.max() <= LONGEST
    for sample in range(len(index)):
        before = Image.fromarray(decode.decode_image(index.read(sample)))
        np.testing.assert_array_equal(index.load_pixels(sample), np.asarray(shrink_with_pillow(before)))


def test_only_larger_images_are_resampled(recipe):
    original = open_index(recipes.override_recipe(recipe, {"data.shrink": 0}).data).train
    small = open_index(recipe.data).train
    samples = np.arange(len(original))
    large = original.sizes.max(axis=1) > LONGEST
    assert 0 < large.sum() < len(original)
    assert small.needs_shrinking(samples).tolist() == large.tolist()
    for sample in samples[~large].tolist():
        np.testing.assert_array_equal(small.load_pixels(sample), original.load_pixels(sample))


@pytest.mark.parametrize("decoder", ["native", "plain"])
@pytest.mark.parametrize("kind", ["none", "encoded", "decoded"])
def test_evaluation_sees_shrunk_images(recipe, monkeypatch, decoder, kind):
    monkeypatch.setenv("PODSCALE_DECODER", decoder)
    index = open_index(recipe.data).val
    assert index.needs_shrinking(np.arange(len(index))).any()
    index = index if kind == "none" else index.with_cache(kind, np.arange(len(index)))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    for _ in range(2):
        with loader.load_eval_batches(index, recipe, sharding, len(index)) as batches:
            (batch,) = batches
        for sample, pixels in enumerate(np.asarray(batch.images)):
            np.testing.assert_array_equal(pixels, crop_with_pillow(index, sample))


@pytest.mark.heavy
def test_prediction_and_evaluation_of_a_run_see_shrunk_images(recipe, tmp_path, monkeypatch):
    train(recipe, folder=tmp_path / "run", pod=inference.find_pod(virtual="1x1"))
    run = inference.open_run(tmp_path / "run")
    paths = []
    for i, size in enumerate(((64, 40), (9, 12))):
        paths.append(tmp_path / f"{i}.jpg")
        Image.effect_noise(size, 80).save(paths[-1])
    batches, make_predictor = [], inference.steps.make_predictor
    monkeypatch.setattr(
        inference.steps,
        "make_predictor",
        lambda *model: lambda *inputs: batches.append(inputs[-1]) or make_predictor(*model)(*inputs),
    )
    inference.predict(run, [str(path) for path in paths])
    index = index_files(paths)
    for sample, pixels in enumerate(itertools.chain(*batches)):
        np.testing.assert_array_equal(pixels, crop_with_pillow(index, sample))
    indexes, load_eval_batches = [], loader.load_eval_batches
    monkeypatch.setattr(
        loader,
        "load_eval_batches",
        lambda index, *args, **kwargs: indexes.append(index) or load_eval_batches(index, *args, **kwargs),
    )
    inference.evaluate(run, inference.find_pod(virtual="1x1"))
    assert indexes[0].sizes.max() == LONGEST


def test_arrays_are_shrunk_too(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 24, 30, 3), np.uint8)
    file, labels = io.BytesIO(), np.arange(6) % 3
    np.savez(file, train_images=images, train_labels=labels, val_images=images, val_labels=labels)
    (tmp_path / "a.npz").write_bytes(file.getvalue())
    index = open_index(recipes.Data(source="npz", path=str(tmp_path / "a.npz"), shrink=LONGEST)).train
    assert index.sizes.tolist() == [[20, 16]] * 6
    for sample, pixels in enumerate(images):
        np.testing.assert_array_equal(
            index.load_pixels(sample), np.asarray(shrink_with_pillow(Image.fromarray(pixels)))
        )


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (-1, "data.shrink must be 0 or more, not -1"),
        ("-400", "data.shrink must be 0 or more, not -400"),
        ("1.5", "data.shrink must be a whole number, not 1.5"),
        ("half", "data.shrink must be a whole number, not 'half'"),
    ],
)
def test_invalid_values_are_refused(recipe, value, sentence):
    with pytest.raises(UserError) as error:
        recipes.override_recipe(recipe, {"data.shrink": value})
    assert str(error.value) == sentence
