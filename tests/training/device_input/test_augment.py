"""Augmentation on the device depends on (seed, step, position), and on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podscale import recipe as recipes
from podscale.recipe import replace_scalars
from podscale.training.device_input import augment

N, SIZE, CLASSES = 16, 8, 10


def make_recipe(**changes):
    settings = {"augment." + k: v for k, v in changes.items()}
    return recipes.load_recipe("digits").override({"augment.label_smoothing": 0.0} | settings)


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (N, SIZE, SIZE, 3), np.uint8)
    return images, random.integers(0, CLASSES, N).astype(np.int32)


def prepare_batch(recipe, batch, step=3, positions=None):
    positions = np.arange(N) if positions is None else positions
    return augment.prepare_batch(recipe, *map(jnp.asarray, batch), jnp.int32(step), jnp.asarray(positions), CLASSES)


def test_images_are_normalized_by_mean_and_standard_deviation(batch):
    recipe = recipes.load_recipe("imagefolder").override({"model.precision": "float32"})
    result = augment.normalize(recipe, jnp.asarray(batch[0]))
    expected = (batch[0] / 255.0 - np.array(recipe.data.mean)) / np.array(recipe.data.std)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert augment.normalize(recipe.override({"model.precision": "bfloat16"}), batch[0]).dtype == jnp.bfloat16


def test_smoothed_targets_sum_to_one():
    targets = augment.smooth_labels(jnp.array([0, 3]), 4, 0.1)
    np.testing.assert_allclose(targets, [[0.925, 0.025, 0.025, 0.025], [0.025, 0.025, 0.025, 0.925]], rtol=1e-6)


@pytest.mark.heavy
def test_mixup_blends_neighbors_and_their_targets_by_the_same_share(batch):
    original, targets = prepare_batch(make_recipe(), batch)
    mixed, blended = prepare_batch(make_recipe(mixup=1.0), batch)
    partners = np.arange(N) ^ 1
    for i in range(N):
        j = partners[i]
        share = float(
            np.vdot(mixed[i] - original[j], original[i] - original[j])
            / np.vdot(original[i] - original[j], original[i] - original[j])
        )
        assert 0 <= share <= 1
        np.testing.assert_allclose(mixed[i], share * original[i] + (1 - share) * original[j], atol=1e-4)
        np.testing.assert_allclose(blended[i], share * targets[i] + (1 - share) * targets[j], atol=1e-4)
    assert not np.allclose(mixed, original)


def measure_boxes(original, mixed):
    """Return, for each image, the share of its pixels that are its own; assert that the partner's form a box."""
    partners, shares = np.asarray(original)[np.arange(len(original)) ^ 1], []
    for own, partner, result in zip(np.asarray(original), partners, np.asarray(mixed), strict=True):
        taken = (result == partner).all(-1) & ~(own == partner).all(-1)
        np.testing.assert_array_equal(result[~taken], own[~taken])
        rows, columns = taken.any(1), taken.any(0)
        assert taken.sum() == rows.sum() * columns.sum()
        shares.append(1 - taken.mean())
    return np.array(shares)


@pytest.mark.heavy
def test_cutmix_exchanges_a_box_and_mixes_targets_by_its_area(batch):
    original, targets = prepare_batch(make_recipe(), batch)
    mixed, blended = prepare_batch(make_recipe(cutmix=1.0), batch)
    shares = measure_boxes(original, mixed)
    assert len(np.unique(shares)) > 3
    np.testing.assert_array_equal(shares[0::2], shares[1::2])
    partners = np.asarray(targets)[np.arange(N) ^ 1]
    np.testing.assert_allclose(blended, shares[:, None] * targets + (1 - shares[:, None]) * partners, atol=1e-6)


def test_with_mixup_and_cutmix_every_pair_gets_one_of_them(batch):
    both = prepare_batch(make_recipe(mixup=0.8, cutmix=1.0), batch)
    alone = [prepare_batch(make_recipe(**{name: alpha}), batch) for name, alpha in (("mixup", 0.8), ("cutmix", 1.0))]
    chosen = [[np.allclose(both[0][i], images[i], atol=1e-5) for images, _ in alone] for i in range(0, N, 2)]
    assert all(any(flags) for flags in chosen)
    assert {flags.index(True) for flags in chosen} == {0, 1}
    always = prepare_batch(make_recipe(mixup=0.8, cutmix=1.0, cutmix_chance=1.0), batch)
    np.testing.assert_array_equal(always[0], alone[1][0])


@pytest.mark.heavy
def test_erasing_clears_one_rectangle_with_the_recipes_probability(batch):
    original, _ = prepare_batch(make_recipe(), batch)
    erased, _ = prepare_batch(make_recipe(erase=1.0), batch)
    for before, after in zip(np.asarray(original), np.asarray(erased), strict=True):
        gone = (after == 0).all(-1) & (before != 0).any(-1)
        rows, cols = np.where(gone)
        if len(rows):
            assert gone[rows.min() : rows.max() + 1, cols.min() : cols.max() + 1].all()
        np.testing.assert_array_equal(after[~gone], before[~gone])
    many = jnp.ones((4000, SIZE, SIZE, 3))
    keys = augment.make_position_keys(0, jnp.int32(0), jnp.arange(4000))
    touched = (np.asarray(jax.vmap(augment._erase, (0, 0, None))(keys, many, 0.3)) == 0).any((1, 2, 3)).mean()
    assert 0.25 < touched < 0.32  # a rectangle may be too thin to hold a pixel


@pytest.mark.heavy
@pytest.mark.parametrize("parts", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 8])
def test_any_split_of_the_batch_is_augmented_alike(batch, parts):
    recipe = make_recipe(mixup=0.4, erase=0.5)
    whole = prepare_batch(recipe, batch)
    for part in np.split(np.arange(N), parts):
        piece = prepare_batch(recipe, (batch[0][part], batch[1][part]), positions=part)
        for ours, theirs in zip(piece, whole, strict=True):
            np.testing.assert_allclose(ours, theirs[part], atol=1e-6)


def test_every_step_and_seed_draws_other_random_numbers(batch):
    recipe = make_recipe(mixup=0.4, erase=0.5)
    here, later = prepare_batch(recipe, batch, step=3)[0], prepare_batch(recipe, batch, step=4)[0]
    other = prepare_batch(recipe.override({"train.seed": 1}), batch, step=3)[0]
    assert not np.allclose(here, later)
    assert not np.allclose(here, other)


def test_six_views_are_an_image_its_shifts_and_their_flips():
    images = np.random.default_rng(0).integers(0, 256, (2, 6, 7, 3), np.uint8)
    result = augment.make_views(jnp.asarray(images), 6)
    wide = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    recipe = [images, wide[:, :-2, :-2], wide[:, 2:, 2:]]
    shares = {}
    for share, view in result:
        for number, original in enumerate(recipe):
            for side, image in enumerate((original, original[:, :, ::-1])):
                if np.array_equal(view, image):
                    shares[number, side] = share
    assert shares == {(0, 0): 1 / 4, (0, 1): 1 / 4} | {(n, side): 1 / 8 for n in (1, 2) for side in (0, 1)}
    assert [share for share, _ in augment.make_views(images, 2)] == [1 / 2, 1 / 2]
    assert np.array_equal(augment.make_views(images, 2)[1][1], images[:, :, ::-1])
    assert augment.make_views(images, 1)[0][1] is images


# --- brightness and contrast ---------------------------------------------------------------------------------------


def fit_colors(recipe, batch, **more):
    """Return factor and offset by which every image differs from its normalized self, by least squares."""
    plain, _ = prepare_batch(make_recipe(), batch, **more)
    changed, _ = prepare_batch(recipe, batch, **more)
    return np.array([np.polyfit(np.ravel(a), np.ravel(b), 1) for a, b in zip(plain, changed, strict=True)])


def test_brightness_and_contrast_shift_and_then_scale_all_pixels_of_an_image(batch):
    recipe = make_recipe(brightness=0.3, contrast=0.2)
    plain, _ = prepare_batch(make_recipe(), batch)
    changed, _ = prepare_batch(recipe, batch)
    colors = fit_colors(recipe, batch)
    for before, after, (factor, offset) in zip(plain, changed, colors, strict=True):
        np.testing.assert_allclose(after, before * factor + offset, atol=1e-4)
        assert abs(factor - 1) <= 0.2 + 1e-4
        assert abs(offset / factor) <= 0.3 + 1e-4  # the shift comes first
    assert np.ptp(colors[:, 0]) > 0.1
    assert np.ptp(colors[:, 1]) > 0.1


def test_brightness_alone_keeps_the_contrast_and_contrast_alone_has_no_shift(batch):
    assert np.abs(fit_colors(make_recipe(brightness=0.3), batch)[:, 0] - 1).max() < 1e-4
    assert np.abs(fit_colors(make_recipe(contrast=0.3), batch)[:, 1]).max() < 1e-4


def test_colors_depend_on_seed_step_and_position_alone(batch):
    recipe = make_recipe(brightness=0.3, contrast=0.2)
    whole, _ = prepare_batch(recipe, batch)
    for part in np.split(np.arange(N), 4):
        piece, _ = prepare_batch(recipe, (batch[0][part], batch[1][part]), positions=part)
        np.testing.assert_array_equal(piece, whole[part])
    for other in (prepare_batch(recipe, batch, step=4), prepare_batch(recipe.override({"train.seed": 1}), batch)):
        assert not np.allclose(other[0], whole)


def test_a_seed_that_is_an_argument_draws_as_the_recipes(batch):
    recipe = make_recipe(brightness=0.3, contrast=0.2, erase=0.5)
    arguments = (*map(jnp.asarray, batch), jnp.int32(3), jnp.arange(N), CLASSES)

    @jax.jit
    def prepare(seed):
        return augment.prepare_batch(replace_scalars(recipe, {"train.seed": seed}), *arguments)

    expected = jax.jit(lambda: augment.prepare_batch(recipe.override({"train.seed": 5}), *arguments))()
    for ours, constant in zip(prepare(np.uint32(5)), expected, strict=True):
        np.testing.assert_allclose(ours, constant, rtol=1e-6, atol=1e-6)
