"""Balanced order: every class equally often, however many images it has (`data.balance`).

The stream of a lane (see `order.py`) is divided into rounds. A round has one place for each class, in a new random
order. In round r every class gives its r-th image: the images of a class in this lane are an endless stream of passes,
each a permutation of them. So after every round all classes have been seen equally often, and within a class no image
comes twice before all others came once. As in `order.py`, everything is a function of (seed, step, position).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podscale.data.order import Order, check_lanes, iterate_groups
from podscale.data.random import Stream, draw_permutation
from podscale.errors import UserError
from podscale.recipe import Recipe

MAX_CACHED = 1 << 16  # permutations of classes that are kept


@runtime_checkable
class SampleOrder(Protocol):
    """The sample at each step and position."""

    def get_samples(self, steps: ArrayLike, positions: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sample ids, and how often each was seen before: no pair comes twice."""


def make_order(recipe: Recipe, labels: NDArray[np.integer]) -> SampleOrder:
    """Return the order in which a recipe sees training samples with these labels."""
    settings = recipe.data.lanes, recipe.batch.size, recipe.train.seed
    return BalancedOrder(labels, *settings) if recipe.data.balance else Order(len(labels), *settings)


def check_order(recipe: Recipe, labels: NDArray[np.integer]) -> None:
    """Raise a `UserError` if training samples with these labels cannot be ordered as the recipe says."""
    check_lanes(len(labels), recipe.data.lanes, recipe.batch.size)
    if recipe.data.balance:
        _count_by_lane(labels, recipe.data.lanes)


def _count_by_lane(labels: NDArray[np.integer], lanes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a number for lane and class of each sample, and how many samples have each number [lanes, classes].

    Raises:
        UserError: a lane has no sample of some class.
    """
    classes = int(labels.max()) + 1
    keys = np.arange(len(labels)) % lanes * classes + np.asarray(labels, np.int64)
    counts = np.bincount(keys, minlength=lanes * classes)
    if missing := np.flatnonzero(counts == 0).tolist():
        lane, label = divmod(missing[0], classes)
        raise UserError(
            f"data.balance needs training images of every class in each of {lanes} data.lanes, but lane {lane} has "
            f"none of class {label}; use fewer lanes, or leave out the class"
        )
    return keys, counts.reshape(lanes, classes)


def _argsort_digits(keys: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Return the stable order of keys in [0, limit), by their digits of 16 bits: time grows linearly with the keys.

    >>> _argsort_digits(np.array([70_000, 3, 70_000, 4]), 2**17).tolist()
    [1, 3, 0, 2]
    """
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(16, limit.bit_length(), 16):
        order = order[np.argsort((keys[order] >> shift).astype(np.uint16), kind="stable")]
    return order


@dataclass(frozen=True, eq=False)
class BalancedOrder:
    """An order in which every class is equally frequent in every lane.

    Args:
        labels: the class of each training sample.
        lanes: into which the data set is split.
        batch: the global batch.
        seed: of the permutations.

    Raises:
        UserError: a lane has no sample of some class.

    >>> order = BalancedOrder(np.array([0] * 990 + [1] * 10), lanes=1, batch=4, seed=0)
    >>> samples, passes = order.get_samples(steps=np.arange(100)[:, None], positions=np.arange(4))
    >>> int((samples >= 990).sum()), int(passes.max())
    (200, 19)
    """

    labels: NDArray[np.integer]
    lanes: int
    batch: int
    seed: int
    _members: NDArray[np.int64] = field(init=False, repr=False)  # samples by lane and class
    _starts: NDArray[np.int64] = field(init=False, repr=False)  # of each class in them [lanes, classes]
    _counts: NDArray[np.int64] = field(init=False, repr=False)  # [lanes, classes]
    _permutation: Callable[[Stream, int, int, int], NDArray[np.int32]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_lanes(len(self.labels), self.lanes, self.batch)
        keys, counts = _count_by_lane(np.asarray(self.labels), self.lanes)
        fields = {
            "_members": _argsort_digits(keys, counts.size),
            "_starts": (np.cumsum(counts) - counts.ravel()).reshape(counts.shape),
            "_counts": counts,
            "_permutation": functools.lru_cache(MAX_CACHED)(functools.partial(draw_permutation, self.seed)),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def get_samples(self, steps: ArrayLike, positions: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sample ids and passes over their classes, int64, at steps and positions (they broadcast together)."""
        step, position = np.broadcast_arrays(np.asarray(steps, np.int64), np.asarray(positions, np.int64))
        per_lane, classes = self.batch // self.lanes, self._counts.shape[1]
        lane = position.ravel() // per_lane
        numbers, places = np.divmod((step * per_lane + position % per_lane).ravel(), classes)  # of rounds, and in them
        label = np.empty_like(numbers)
        for key, members in iterate_groups(numbers * self.lanes + lane):
            number, of_lane = divmod(key, self.lanes)
            label[members] = self._permutation(Stream.ROUND, classes, of_lane, number)[places[members]]
        passes, offsets = np.divmod(numbers, self._counts[lane, label])
        rank = np.empty_like(numbers)
        for key, members in iterate_groups((passes * self.lanes + lane) * classes + label):
            lane_pass, of_class = divmod(key, self.lanes * classes)
            count = int(self._counts.flat[of_class])
            rank[members] = self._permutation(Stream.CLASS, count, of_class, lane_pass)[offsets[members]]
        samples = self._members[self._starts[lane, label] + rank]
        return samples.reshape(step.shape), passes.reshape(step.shape)
