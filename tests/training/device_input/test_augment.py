"""What happens to pictures on the device depends on (seed, step, position), and on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale import recipe as recipes
from podscale.training.device_input import augment

N, SIZE, CLASSES = 16, 8, 10


def recipe(**changes):
    settings = {"augment." + k: v for k, v in changes.items()}
    return recipes.load("digits").override({"augment.label_smoothing": 0.0} | settings)


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (N, SIZE, SIZE, 3), np.uint8)
    return images, random.integers(0, CLASSES, N).astype(np.int32)


def prepared(wanted, batch, step=3, positions=None):
    positions = np.arange(N) if positions is None else positions
    return augment.prepare(wanted, *map(jnp.asarray, batch), jnp.int32(step), jnp.asarray(positions), CLASSES)


def test_normalization_takes_out_mean_and_deviation(batch):
    wanted = recipes.load("imagefolder").override({"model.precision": "float32"})
    found = augment.normalize(wanted, jnp.asarray(batch[0]))
    expected = (batch[0] / 255.0 - np.array(wanted.data.mean)) / np.array(wanted.data.std)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert augment.normalize(wanted.override({"model.precision": "bfloat16"}), batch[0]).dtype == jnp.bfloat16


def test_smoothed_targets_sum_to_one():
    targets = augment.smooth(jnp.array([0, 3]), 4, 0.1)
    np.testing.assert_allclose(targets, [[0.925, 0.025, 0.025, 0.025], [0.025, 0.025, 0.025, 0.925]], rtol=1e-6)


def test_mixing_blends_neighbours_and_their_targets_by_the_same_share(batch):
    plain, targets = prepared(recipe(), batch)
    mixed, blended = prepared(recipe(mixup=1.0), batch)
    partners = np.arange(N) ^ 1
    for i in range(N):
        j = partners[i]
        share = float(
            np.vdot(mixed[i] - plain[j], plain[i] - plain[j]) / np.vdot(plain[i] - plain[j], plain[i] - plain[j])
        )
        assert 0 <= share <= 1
        np.testing.assert_allclose(mixed[i], share * plain[i] + (1 - share) * plain[j], atol=1e-4)
        np.testing.assert_allclose(blended[i], share * targets[i] + (1 - share) * targets[j], atol=1e-4)
    assert not np.allclose(mixed, plain)


def test_erasing_clears_one_rectangle_with_the_given_chance(batch):
    plain, _ = prepared(recipe(), batch)
    erased, _ = prepared(recipe(erase=1.0), batch)
    for before, after in zip(np.asarray(plain), np.asarray(erased), strict=True):
        gone = (after == 0).all(-1) & (before != 0).any(-1)
        rows, cols = np.where(gone)
        if len(rows):
            assert gone[rows.min() : rows.max() + 1, cols.min() : cols.max() + 1].all()
        np.testing.assert_array_equal(after[~gone], before[~gone])
    many = jnp.ones((4000, SIZE, SIZE, 3))
    keys = augment.position_keys(0, jnp.int32(0), jnp.arange(4000))
    touched = (np.asarray(jax.vmap(augment._erase, (0, 0, None))(keys, many, 0.3)) == 0).any((1, 2, 3)).mean()
    assert 0.25 < touched < 0.32  # a rectangle may be too thin to hold a pixel


@pytest.mark.parametrize("parts", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 8])
def test_any_split_of_the_batch_sees_the_same_things(batch, parts):
    wanted = recipe(mixup=0.4, erase=0.5)
    whole = prepared(wanted, batch)
    for part in np.split(np.arange(N), parts):
        piece = prepared(wanted, (batch[0][part], batch[1][part]), positions=part)
        for ours, theirs in zip(piece, whole, strict=True):
            np.testing.assert_allclose(ours, theirs[part], atol=1e-6)


def test_every_step_and_seed_draws_anew(batch):
    wanted = recipe(mixup=0.4, erase=0.5)
    here, later = prepared(wanted, batch, step=3)[0], prepared(wanted, batch, step=4)[0]
    other = prepared(wanted.override({"train.seed": 1}), batch, step=3)[0]
    assert not np.allclose(here, later)
    assert not np.allclose(here, other)


def test_six_views_are_a_picture_and_its_neighbours_from_both_sides():
    images = np.random.default_rng(0).integers(0, 256, (2, 6, 7, 3), np.uint8)
    found = augment.views(jnp.asarray(images), 6)
    wide = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    wanted = [images, wide[:, :-2, :-2], wide[:, 2:, 2:]]
    shares = {}
    for share, view in found:
        for number, plain in enumerate(wanted):
            for side, picture in enumerate((plain, plain[:, :, ::-1])):
                if np.array_equal(view, picture):
                    shares[number, side] = share
    assert shares == {(0, 0): 1 / 4, (0, 1): 1 / 4} | {(n, side): 1 / 8 for n in (1, 2) for side in (0, 1)}
    assert [share for share, _ in augment.views(images, 2)] == [1 / 2, 1 / 2]
    assert np.array_equal(augment.views(images, 2)[1][1], images[:, :, ::-1])
    assert augment.views(images, 1)[0][1] is images
