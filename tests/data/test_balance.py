"""Balanced order: classes equally often, every image of a class once a pass, the same for every split over hosts."""

from contextlib import nullcontext

import numpy as np
import pytest

from podscale.data.balance import BalancedOrder, check_order, make_order
from podscale.data.order import Order
from podscale.errors import UserError
from podscale.recipe import Recipe

GOLDEN = [[54, 922, 998, 4, 849, 187, 251, 633], [696, 688, 936, 460, 407, 889, 327, 667]]
COUNTS = [700, 40, 300, 11]


def make_labels():
    """Return labels of classes of very different sizes, mixed."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))


@pytest.mark.parametrize(("lanes", "batch"), [(1, 6), (2, 16)])
def test_classes_are_equally_frequent_after_every_round_and_images_within_a_class_after_every_pass(lanes, batch):
    labels = make_labels()
    order = BalancedOrder(labels, lanes, batch, seed=3)
    per_lane = batch // lanes
    for lane in range(lanes):
        places = np.arange(3 * 700 * len(COUNTS) // lanes)
        samples, passes = order.get_samples(places // per_lane, lane * per_lane + places % per_lane)
        assert set(samples % lanes) == {lane} or lanes == 1
        rounds = labels[samples].reshape(-1, len(COUNTS))
        assert np.array_equal(np.sort(rounds, axis=1), np.broadcast_to(np.arange(len(COUNTS)), rounds.shape))
        assert len(np.unique(rounds, axis=0)) > 4  # classes come in many orders
        pairs = np.stack([passes, samples], axis=1)
        assert len(np.unique(pairs, axis=0)) == len(pairs)
        for label in range(len(COUNTS)):
            members = set(np.flatnonzero((labels == label) & (np.arange(len(labels)) % lanes == lane)))
            seen = samples[labels[samples] == label]
            for start in range(0, len(seen) - len(members) + 1, len(members)):
                assert set(seen[start : start + len(members)]) == members


def test_any_split_over_hosts_sees_the_same_samples():
    labels, steps = make_labels(), np.arange(300)[:, None]
    whole = BalancedOrder(labels, 2, 24, seed=1).get_samples(steps, np.arange(24))
    for hosts in (2, 3, 8):
        blocks = np.split(np.arange(24), hosts)
        parts = [BalancedOrder(labels, 2, 24, seed=1).get_samples(steps, block) for block in blocks]
        for k in range(2):
            np.testing.assert_array_equal(whole[k], np.concatenate([part[k] for part in parts], axis=1))


def test_seed_changes_the_order_and_values_never_change():
    labels = np.arange(1000) % 3
    samples, passes = BalancedOrder(labels, 2, 8, seed=42).get_samples(np.array([[0], [700]]), np.arange(8))
    assert samples.tolist() == GOLDEN
    assert passes.tolist() == [[0] * 8, [5] * 8]
    other, _ = BalancedOrder(labels, 2, 8, seed=43).get_samples(np.array([[0], [700]]), np.arange(8))
    assert other.tolist() != GOLDEN


def test_class_that_a_lane_lacks_is_named():
    labels = np.zeros(2000, np.int32)
    labels[::2] = 1  # the samples of lane 0
    with pytest.raises(UserError, match=r"lane 0 has none of class 0; use fewer lanes"):
        BalancedOrder(labels, 2, 8, seed=0)


@pytest.mark.parametrize(
    ("lanes", "refused"), [(1, None), (2, "lane 0 has none of class 0"), (8, "leaves fewer than 500")]
)
def test_labels_are_checked_before_an_order_of_them_is_made(lanes, refused):
    labels = np.zeros(2000, np.int32)
    labels[::2] = 1
    recipe = Recipe().override({"data.balance": True, "data.lanes": lanes, "batch.size": 8, "batch.span": 8})
    for check in (check_order, make_order):
        with pytest.raises(UserError, match=refused) if refused else nullcontext():
            check(recipe, labels)


def test_recipe_chooses_the_order_and_older_recipes_keep_their_digest():
    recipe, labels = Recipe(), np.arange(1437) % 10
    assert isinstance(make_order(recipe, labels), Order)
    balanced = recipe.override({"data.balance": True})
    assert isinstance(make_order(balanced, labels), BalancedOrder)
    assert balanced.digest() != recipe.digest() == recipe.override({"data.balance": False}).digest()
