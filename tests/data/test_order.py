"""Which sample, crop and flip at which step: invariants of lanes and positions, and values that must never change."""

import numpy as np
import pytest

from podscale.data.order import MAX_SAMPLES, Order, compute_crop_boxes, compute_eval_boxes
from podscale.errors import UserError
from podscale.plan import Counts, make_plan
from podscale.pod import Pod
from podscale.recipe import Augment, Recipe, override_recipe


def read_lane(order, lane, length):
    """Return the first `length` samples and passes of a lane, position by position."""
    per_lane = order.batch // order.lanes
    offsets = np.arange(length)
    return order.get_samples(offsets // per_lane, lane * per_lane + offsets % per_lane)


@pytest.mark.parametrize(("samples", "lanes", "batch"), [(1000, 1, 32), (1003, 2, 16), (2047, 4, 4)])
def test_each_lane_pass_contains_each_sample_of_the_lane_once(samples, lanes, batch):
    order = Order(samples, lanes, batch, seed=5)
    for lane in range(lanes):
        members = list(range(lane, samples, lanes))
        ids, passes = read_lane(order, lane, 3 * len(members))
        for number in range(3):
            assert sorted(ids[passes == number]) == members
        assert np.all(np.diff(passes) >= 0)
        assert ids[: len(members)].tolist() != ids[len(members) : 2 * len(members)].tolist()


def test_any_split_over_hosts_sees_the_same_samples():
    order = Order(3001, 2, 24, seed=1)
    steps = np.arange(300)[:, None]
    whole = order.get_samples(steps, np.arange(24))
    for hosts in (2, 3, 8):
        parts = [Order(3001, 2, 24, seed=1).get_samples(steps, block) for block in np.split(np.arange(24), hosts)]
        for k in range(2):
            np.testing.assert_array_equal(whole[k], np.concatenate([part[k] for part in parts], axis=1))


def test_a_host_reads_only_the_lanes_of_its_positions():
    order = Order(4000, 8, 32, seed=0)
    ids, _ = order.get_samples(np.arange(500)[:, None], np.arange(8, 16))  # the second quarter: lanes 2 and 3
    assert set(ids.ravel() % 8) == {2, 3}
    assert len(np.unique(ids)) == 1000


def test_a_batch_larger_than_the_data_set_spans_several_passes():
    ids, passes = Order(10, 1, 25, seed=0).get_samples(0, np.arange(25))
    assert passes.tolist() == [0] * 10 + [1] * 10 + [2] * 5
    assert sorted(ids[:10]) == sorted(ids[10:20]) == list(range(10))


def test_order_equals_the_golden_values():
    order = Order(samples=5003, lanes=2, batch=8, seed=42)
    ids, passes = order.get_samples(np.array([[0], [1], [700]]), np.arange(8))
    assert ids.tolist() == GOLDEN_IDS
    assert passes.tolist() == [[0] * 8, [0] * 8, [1] * 8]


def test_crops_and_flips_equal_the_golden_values():
    sizes = np.array([[500, 375], [375, 500], [32, 32], [1000, 20]])
    for crop, expected in GOLDEN_BOXES.items():
        boxes, flips = compute_crop_boxes(
            Augment(crop=crop), 42, [0, 1, 2, 3], [0, 17, 5000, 1281166], sizes, 32, fraction=0.875
        )
        assert boxes.tolist() == expected
        assert flips.tolist() == GOLDEN_FLIPS


def make_recipe(size, epochs):
    """Return a recipe of this batch size that trains this many epochs."""
    return override_recipe(Recipe(), {"batch.size": size, "batch.span": size, "train.epochs": epochs})


def test_steps_round_up_without_decimal_rounding_errors():
    assert make_recipe(128, 1).steps(1000) == 8
    assert make_recipe(128, 0.128).steps(1000) == 1
    assert make_recipe(100, 1.1).steps(1000) == 11
    assert make_plan(make_recipe(128, 1), Pod("cpu", 1, 1), Counts(1000, 1, 10)).steps_per_epoch == 1000 / 128


def test_orders_compare_by_their_fields():
    assert Order(1000, 1, 8, 0) == Order(1000, 1, 8, 0) != Order(1000, 1, 8, 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (999, 2, 8, 0),
            "data.lanes 2 leaves fewer than 500 of 999 images per lane; the most that fits batch.size 8 is 1",
        ),
        ((10_000, 8, 12, 0), "data.lanes 8 does not divide batch.size 12; nearest that do: 6, 12"),
        ((0, 1, 8, 0), "there are no training images to order; check data.path"),
    ],
)
def test_invalid_orders_are_refused(arguments, sentence):
    with pytest.raises(UserError) as error:
        Order(*arguments)
    assert str(error.value) == sentence


def test_one_lane_fits_any_data_set():
    ids, passes = Order(3, 1, 8, 0).get_samples(0, np.arange(8))
    assert passes.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert set(ids) == {0, 1, 2}
    assert make_recipe(8, 2).steps(3) == 1


# --- crops ---------------------------------------------------------------------------------------------------------


def draw_boxes(n=20_000, width=500, height=375, **augment):
    sizes = np.tile([width, height], (n, 1))
    return compute_crop_boxes(Augment(**augment), 7, np.arange(n) // 100, np.arange(n) % 100, sizes, 224)


def test_resized_crops_are_whole_pixels_inside_the_image():
    boxes, _ = draw_boxes()
    left, top, right, bottom = boxes.T
    assert np.all(boxes == np.floor(boxes))
    assert np.all((left >= 0) & (top >= 0) & (right <= 500) & (bottom <= 375) & (left < right) & (top < bottom))


def test_resized_crops_have_the_configured_areas_and_aspects():
    boxes, _ = draw_boxes(width=400, height=400, max_aspect=1.2, min_area=0.25)  # on a square image most attempts fit
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, aspect = width * height / 400**2, np.log(width / height) / np.log(1.2)
    assert area.min() > 0.248
    assert area.max() <= 1
    assert np.abs(aspect).max() < 1.05
    small = area < 0.6  # every such attempt fits, so these are exactly uniform
    assert abs(area[small].mean() - 0.425) < 0.005
    counts = np.histogram(aspect[small], bins=10, range=(-1, 1))[0] / small.sum()
    assert np.abs(counts - 0.1).max() < 0.015


def test_resized_crops_have_uniform_positions():
    boxes, _ = draw_boxes(min_area=0.1)
    margin = 500 - (boxes[:, 2] - boxes[:, 0])
    position = boxes[margin > 100, 0] / margin[margin > 100]
    counts = np.histogram(position, bins=5, range=(0, 1))[0] / len(position)
    assert np.abs(counts - 0.2).max() < 0.02
    assert position.min() == 0
    assert position.max() == 1


@pytest.mark.parametrize(
    ("size", "box"), [((1000, 12), [492, 0, 508, 12]), ((12, 1000), [0, 492, 12, 508]), ((1, 1), [0, 0, 1, 1])]
)
def test_an_image_that_no_attempt_fits_gives_its_largest_centered_box(size, box):
    boxes, _ = compute_crop_boxes(Augment(min_area=0.5), 0, [0], [0], np.array([size]), 224)
    assert boxes.tolist() == [box]


def test_padded_crops_shift_the_evaluation_box_by_whole_pixels_of_the_result():
    boxes, _ = draw_boxes(crop="padded", padding=2, width=448, height=600)
    shifts = (boxes - np.array([0, 76, 448, 524])) / 2  # one pixel of 224 is two of 448
    assert np.array_equal(shifts[:, :2], shifts[:, 2:])
    values, counts = np.unique(shifts[:, :2], return_counts=True)
    assert values.tolist() == [-2, -1, 0, 1, 2]
    assert np.abs(counts / counts.sum() - 0.2).max() < 0.01


def test_centre_crops_are_the_evaluation_boxes():
    boxes, _ = draw_boxes(n=3, crop="centre")
    assert boxes.tolist() == compute_eval_boxes(1.0, np.array([[500, 375]] * 3)).tolist() == [[62, 0, 437, 375]] * 3


def test_half_of_the_images_are_flipped_and_flips_can_be_turned_off():
    assert abs(draw_boxes()[1].mean() - 0.5) < 0.01
    assert not draw_boxes(flip=False)[1].any()


def test_alternating_flips_are_random_in_the_first_pass_and_then_alternate():
    augment, sizes = Augment(alternate=True), np.array([[32, 32]] * 20_000)
    first, second, third = (
        compute_crop_boxes(augment, 7, [n] * 20_000, np.arange(20_000), sizes, 32)[1] for n in range(3)
    )
    assert abs(first.mean() - 0.5) < 0.01
    assert (first == third).all()
    assert (first != second).all()
    independent = compute_crop_boxes(Augment(), 7, [0] * 20_000, np.arange(20_000), sizes, 32)[1]
    assert (first == independent).all()


def test_flips_are_independent_of_crops():
    boxes, flips = draw_boxes()
    assert abs(np.corrcoef(boxes[:, 0], flips)[0, 1]) < 0.02


def test_an_image_has_the_same_crop_alone_and_in_a_batch():
    sizes = np.random.default_rng(0).integers(20, 400, (64, 2))
    boxes, flips = compute_crop_boxes(Augment(), 3, np.arange(64), np.arange(64)[::-1], sizes, 32)
    for i in range(64):
        alone, flip = compute_crop_boxes(Augment(), 3, [i], [63 - i], sizes[i : i + 1], 32)
        assert alone[0].tolist() == boxes[i].tolist()
        assert flip[0] == flips[i]


def test_aspect_tables_equal_the_power_function():
    from podscale.data.order import _look_up_aspects, _make_aspect_tables

    draws = np.arange(0, 1, 1 / 1024)
    np.testing.assert_allclose(
        _look_up_aspects(_make_aspect_tables(4 / 3), draws), (4 / 3) ** (2 * draws - 1), rtol=1e-13
    )


GOLDEN_IDS = [
    [4572, 154, 4036, 3794, 293, 2731, 585, 3813],
    [712, 924, 274, 3664, 3921, 1853, 2281, 2317],
    [4784, 4838, 796, 2488, 2003, 2893, 3729, 2931],
]
GOLDEN_BOXES = {
    "resized": [
        [47.0, 101.0, 230.0, 300.0],
        [21.0, 138.0, 367.0, 454.0],
        [5.0, 7.0, 21.0, 22.0],
        [486.0, 0.0, 513.0, 20.0],
    ],
    "padded": [
        [116.75, 33.25, 444.75, 361.25],
        [-7.75, 75.75, 320.25, 403.75],
        [0.25, -1.5, 28.25, 26.5],
        [489.3125, 2.6875, 507.3125, 20.6875],
    ],
    "centre": [
        [86.0, 23.0, 414.0, 351.0],
        [23.0, 86.0, 351.0, 414.0],
        [2.0, 2.0, 30.0, 30.0],
        [491.0, 1.0, 509.0, 19.0],
    ],
}
GOLDEN_FLIPS = [True, False, True, True]


def test_more_samples_than_a_permutation_can_number_are_refused():
    Order(MAX_SAMPLES, 1, 4, seed=0)  # nothing is drawn yet
    with pytest.raises(UserError, match=r"2,147,483,648 training images are more than can be ordered, 2,147,483,647"):
        Order(MAX_SAMPLES + 1, 1, 4, seed=0)
