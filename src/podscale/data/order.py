"""Order: which sample, which crop, which flip, at which step and position. Nothing here knows of hosts or devices.

The data set is cut into lanes, sample i into lane i mod K. A lane is an endless stream of passes, each a permutation
of its own samples. Of the B positions of the global batch, the first B/K read lane 0, the next B/K lane 1, and so on;
so whoever owns a block of positions reads only the lanes of that block, and what it reads never depends on who it is.
Crops and flips are keyed by (seed, lane pass, sample).
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podscale import recipe
from podscale.config.suggestions import divisors, suggest_numbers
from podscale.data.random import Stream, permutation, uniform, words
from podscale.errors import UserError

# Passes of neighbouring lanes drift apart by one sample a pass; with this many samples a lane, the drift is no more
# than a 500th of a pass in each pass.
LEAST_SAMPLES_PER_LANE = 500
ATTEMPTS = 10


@dataclass(frozen=True)
class Order:
    """The order in which a recipe sees its training samples.

    >>> order = Order(samples=1000, lanes=2, batch=4, seed=0)
    >>> samples, passes = order.at(steps=0, positions=np.arange(4))
    >>> (samples % 2).tolist(), passes.tolist()
    ([0, 0, 1, 1], [0, 0, 0, 0])
    """

    samples: int
    lanes: int
    batch: int
    seed: int
    _permutation: Callable[[int, int], NDArray[np.int32]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self)

        # Two passes of every lane: a batch lies in one or two of them, and 8 bytes a sample are cheap.
        @functools.lru_cache(maxsize=2 * self.lanes + 2)
        def lane_permutation(lane: int, lane_pass: int) -> NDArray[np.int32]:
            return permutation(seed, Stream.ORDER, (samples - lane + lanes - 1) // lanes, lane, lane_pass)

        seed, samples, lanes = self.seed, self.samples, self.lanes
        object.__setattr__(self, "_permutation", lane_permutation)

    def at(self, steps: ArrayLike, positions: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample ids and lane passes, int64, at steps and positions (arrays that broadcast together)."""
        step, position = np.broadcast_arrays(np.asarray(steps, np.int64), np.asarray(positions, np.int64))
        per_lane = self.batch // self.lanes
        lane = position // per_lane
        lane_length = (self.samples - lane + self.lanes - 1) // self.lanes
        lane_pass, place = np.divmod(step * per_lane + position % per_lane, lane_length)
        sample = np.empty_like(place)
        streams, which = np.unique((lane_pass * self.lanes + lane).ravel(), return_inverse=True)
        by_stream = np.argsort(which.ravel(), kind="stable")
        counts = np.bincount(which.ravel(), minlength=len(streams))
        places, flat = place.ravel(), sample.reshape(-1)
        for stream, chosen in zip(streams.tolist(), np.split(by_stream, np.cumsum(counts)[:-1]), strict=True):
            of_pass, of_lane = divmod(stream, self.lanes)
            flat[chosen] = of_lane + self.lanes * self._permutation(of_lane, of_pass)[places[chosen]]
        return sample, lane_pass


def batches_at(steps: NDArray[np.int64], left_out: Iterable[range]) -> NDArray[np.int64]:
    """The numbers of the batches that these steps take, where some batches are left out: later ones move up.

    >>> batches_at(np.array([3, 4, 5]), [range(4, 10)]).tolist()
    [3, 10, 11]
    """
    numbers = np.array(steps, np.int64)
    for gap in sorted(left_out, key=lambda gap: gap.start):
        numbers += len(gap) * (numbers >= gap.start)
    return numbers


def _check(order: Order) -> None:
    if order.samples < 1:
        raise UserError("there are no training pictures to order; check data.path")
    if order.batch % order.lanes:
        hint = suggest_numbers(order.lanes, divisors(order.batch))
        raise UserError(f"data.lanes {order.lanes} does not divide batch.size {order.batch}; {hint}")
    most = max(1, order.samples // LEAST_SAMPLES_PER_LANE)
    if order.lanes > most:
        largest = max(d for d in divisors(order.batch) if d <= most)
        raise UserError(
            f"data.lanes {order.lanes} leaves fewer than {LEAST_SAMPLES_PER_LANE} of {order.samples} pictures a lane; "
            f"the most that fits batch.size {order.batch} is {largest}"
        )


# --- crops ---------------------------------------------------------------------------------------------------------


def crop_boxes(
    augment: recipe.Augment,
    seed: int,
    passes: ArrayLike,
    samples: ArrayLike,
    sizes: NDArray[np.int32],
    image_size: int,
    *,
    fraction: float = 1.0,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """What training takes of each picture: boxes float64 [n, 4] and whether to mirror, bool [n].

    A box is (left, top, right, bottom) in pixels of the source after EXIF orientation; `sizes` is int [n, 2], width
    and height. `fraction` is evaluation's share of the shorter side (`data.eval_fraction`).

    - "resized": area uniform in [min_area, 1] of the picture, aspect log-uniform in [1/max_aspect, max_aspect], whole
      pixels, uniform place; the first of ten attempts that fits, else the largest centred box of allowed aspect
      (Szegedy et al., "Going Deeper with Convolutions", 2015, section 6).
    - "padded": evaluation's box, shifted by whole pixels of the result in [-padding, padding] on each axis. Such a box
      may lie partly outside the picture: what it finds there is the picture reflected at its border.
    - "centre": evaluation's box.
    """
    passes, samples = np.asarray(passes), np.asarray(samples)
    if augment.crop == "resized":
        boxes = _resized_boxes(augment, seed, passes, samples, sizes)
    else:
        boxes = eval_boxes(fraction, sizes)
    if augment.crop == "padded":
        boxes += _shifts(augment.padding, seed, passes, samples, boxes, image_size)
    return boxes, _mirrored(augment, seed, passes, samples)


def _mirrored(augment: recipe.Augment, seed: int, passes: NDArray, samples: NDArray) -> NDArray[np.bool_]:
    """Whether to mirror each picture in its pass: as drawn for it, or by turns after the first pass's draw.

    Two passes that take turns show a picture from both sides for certain, where draws do so half of the time.
    """
    if not augment.flip:
        return np.zeros(len(samples), bool)
    drawn_in = np.zeros_like(passes) if augment.alternate else passes
    drawn: NDArray[np.bool_] = words(seed, Stream.FLIP, drawn_in, samples)[:, 0] >> np.uint32(31) == 1
    return drawn ^ (passes % 2 == 1) if augment.alternate else drawn


def eval_boxes(fraction: float, sizes: NDArray[np.int32]) -> NDArray[np.float64]:
    """Evaluation's crop: the centred square whose side is `fraction` of the shorter side, in whole pixels.

    The side rounds to the nearest pixel and an odd rest goes right and below, so that a square that already has
    the model's size is taken without resampling.

    >>> eval_boxes(0.875, np.array([[256, 300]])).tolist()
    [[16.0, 38.0, 240.0, 262.0]]
    """
    whole = np.asarray(sizes, np.float64)
    side = np.maximum(np.floor(fraction * whole.min(axis=1) + 0.5), 1.0)
    return _centred(whole, np.stack([side, side], axis=1))


def _centred(sizes: NDArray[np.float64], extents: NDArray[np.float64]) -> NDArray[np.float64]:
    start = np.floor((sizes - extents) / 2)
    return np.concatenate([start, start + extents], axis=1)


def _shifts(
    padding: int, seed: int, passes: NDArray, samples: NDArray, boxes: NDArray[np.float64], image_size: int
) -> NDArray[np.float64]:
    draws = uniform(seed, Stream.SHIFT, passes, samples)[:, :2]
    pixels = np.floor(draws * (2 * padding + 1)) - padding
    shift = pixels * ((boxes[:, 2:] - boxes[:, :2]) / image_size)
    return np.concatenate([shift, shift], axis=1)


def _resized_boxes(
    augment: recipe.Augment, seed: int, passes: NDArray, samples: NDArray, sizes: NDArray[np.int32]
) -> NDArray[np.float64]:
    whole = np.asarray(sizes, np.float64)
    boxes = _largest_boxes(whole, augment.max_aspect)
    left = np.arange(len(whole))  # who has not had an attempt that fits
    aspects = _aspect_tables(augment.max_aspect)
    for attempt in range(ATTEMPTS):
        draws = uniform(seed, Stream.CROP, passes[left], samples[left], attempt)
        area = whole[left].prod(axis=1) * (augment.min_area + draws[:, 0] * (1 - augment.min_area))
        aspect = _log_uniform(aspects, draws[:, 1])
        extents = np.floor(np.sqrt(np.stack([area * aspect, area / aspect], axis=1)) + 0.5)
        fits = np.all((extents >= 1) & (extents <= whole[left]), axis=1)
        corner = np.floor(draws[:, 2:] * (whole[left] - extents + 1))
        boxes[left[fits]] = np.concatenate([corner, corner + extents], axis=1)[fits]
        left = left[~fits]
        if not len(left):
            break
    return boxes


def _largest_boxes(whole: NDArray[np.float64], max_aspect: float) -> NDArray[np.float64]:
    limit = np.floor(whole[:, ::-1] * max_aspect + 0.5)  # width by height, height by width
    return _centred(whole, np.maximum(np.minimum(whole, limit), 1.0))


@functools.lru_cache(maxsize=8)
def _aspect_tables(limit: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """limit**(2x - 1) for x in 256ths, and limit**(2x) for x in 65536ths below one 256th.

    Made of square roots and products alone, which every machine rounds alike; a library's `exp` is not.
    """
    powers, roots = [1.0], limit * limit
    factors = []
    for _ in range(16):
        roots = math.sqrt(roots)
        factors.append(roots)
    coarse, fine = powers, powers
    for high, low in zip(factors[:8], factors[8:], strict=True):
        coarse = [value * factor for value in coarse for factor in (1.0, high)]
        fine = [value * factor for value in fine for factor in (1.0, low)]
    return np.array(coarse) / limit, np.array(fine)


def _log_uniform(tables: tuple[NDArray[np.float64], NDArray[np.float64]], draws: NDArray) -> NDArray[np.float64]:
    step = np.floor(draws * 65536).astype(np.int64)
    return tables[0][step >> 8] * tables[1][step & 255]
