"""Order: which sample, which crop, which flip, at which step and position. Nothing here depends on hosts or devices.

The data set is split into lanes, sample i into lane i mod K. A lane is an endless stream of passes, each a permutation
of its samples. Of the B positions of the global batch, the first B/K read lane 0, the next B/K lane 1, and so on. So
the host that owns a block of positions reads only the lanes of that block, and the same samples as any other host
would. Crops and flips are keyed by (seed, lane pass, sample).
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podscale import recipe
from podscale.config.suggestions import list_divisors, suggest_numbers
from podscale.data.random import Stream, draw_permutation, draw_uint32, draw_uniform
from podscale.errors import UserError

# Passes of neighboring lanes drift apart by one sample per pass; with this many samples per lane, the drift is at most
# a 500th of a pass in each pass.
MIN_SAMPLES_PER_LANE = 500
MAX_SAMPLES = 2**31 - 1  # a sample's number is 32 bits of a counter, and signed in a permutation
SMALL = 2**20  # samples of which more passes are kept in memory than a batch usually needs
ATTEMPTS = 10


@dataclass(frozen=True)
class Order:
    """The order in which a recipe sees its training samples.

    >>> order = Order(samples=1000, lanes=2, batch=4, seed=0)
    >>> samples, passes = order.get_samples(steps=0, positions=np.arange(4))
    >>> (samples % 2).tolist(), passes.tolist()
    ([0, 0, 1, 1], [0, 0, 0, 0])
    """

    samples: int
    lanes: int
    batch: int
    seed: int
    _permutation: Callable[[int, int], NDArray[np.int32]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_lanes(self.samples, self.lanes, self.batch)

        # Two passes of every lane, 8 bytes per sample: a batch of a large data set lies in one or two of them.
        @functools.lru_cache(maxsize=2 * self.lanes + (2 if self.samples < SMALL else 0))
        def lane_permutation(lane: int, lane_pass: int) -> NDArray[np.int32]:
            return draw_permutation(seed, Stream.ORDER, (samples - lane + lanes - 1) // lanes, lane, lane_pass)

        seed, samples, lanes = self.seed, self.samples, self.lanes
        object.__setattr__(self, "_permutation", lane_permutation)

    def get_samples(self, steps: ArrayLike, positions: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sample ids and lane passes, int64, at steps and positions (arrays that broadcast together)."""
        step, position = np.broadcast_arrays(np.asarray(steps, np.int64), np.asarray(positions, np.int64))
        per_lane = self.batch // self.lanes
        lane = position // per_lane
        lane_length = (self.samples - lane + self.lanes - 1) // self.lanes
        lane_pass, offset = np.divmod(step * per_lane + position % per_lane, lane_length)
        sample = np.empty_like(offset)
        offsets, flat = offset.ravel(), sample.reshape(-1)
        for stream, members in iterate_groups((lane_pass * self.lanes + lane).ravel()):
            stream_pass, stream_lane = divmod(stream, self.lanes)
            permuted = self._permutation(stream_lane, stream_pass)[offsets[members]]
            flat[members] = stream_lane + self.lanes * permuted
        return sample, lane_pass


def iterate_groups(keys: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield every distinct key, in ascending order, and the places where it stands in a flat array.

    >>> [(key, places.tolist()) for key, places in iterate_groups(np.array([7, 5, 7]))]
    [(5, [1]), (7, [0, 2])]
    """
    distinct, group_of = np.unique(keys, return_inverse=True)
    places = np.argsort(group_of, kind="stable")
    counts = np.bincount(group_of, minlength=len(distinct))
    yield from zip(distinct.tolist(), np.split(places, np.cumsum(counts)[:-1]), strict=True)


def map_steps_to_batches(steps: NDArray[np.int64], skip: Iterable[range]) -> NDArray[np.int64]:
    """Return the numbers of the batches that these steps take, where the batches in `skip` are left out.

    >>> map_steps_to_batches(np.array([3, 4, 5]), [range(4, 10)]).tolist()
    [3, 10, 11]
    """
    numbers = np.array(steps, np.int64)
    for gap in sorted(skip, key=lambda gap: gap.start):
        numbers += len(gap) * (numbers >= gap.start)
    return numbers


def check_lanes(samples: int, lanes: int, batch: int) -> None:
    """Raise a `UserError` if this many training samples cannot be ordered in `lanes` lanes for batches of `batch`.

    >>> check_lanes(samples=1000, lanes=2, batch=4)
    """
    if samples < 1:
        raise UserError("there are no training images to order; check data.path")
    if samples > MAX_SAMPLES:
        raise UserError(f"{samples:,} training images are more than can be ordered, {MAX_SAMPLES:,}; use fewer")
    if batch % lanes:
        hint = suggest_numbers(lanes, list_divisors(batch))
        raise UserError(f"data.lanes {lanes} does not divide batch.size {batch}; {hint}")
    most = max(1, samples // MIN_SAMPLES_PER_LANE)
    if lanes > most:
        largest = max(d for d in list_divisors(batch) if d <= most)
        raise UserError(
            f"data.lanes {lanes} leaves fewer than {MIN_SAMPLES_PER_LANE} of {samples} images per lane; "
            f"the most that fits batch.size {batch} is {largest}"
        )


# --- crop boxes ----------------------------------------------------------------------------------------------------


def compute_crop_boxes(
    augment: recipe.Augment,
    seed: int,
    passes: ArrayLike,
    samples: ArrayLike,
    sizes: NDArray[np.int32],
    image_size: int,
    *,
    fraction: float = 1.0,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return what training takes of each image: boxes float64 [n, 4] and whether to flip, bool [n].

    A box is (left, top, right, bottom) in pixels of the upright image.

    - "resized": area uniform in [min_area, 1] of the image, aspect log-uniform in [1/max_aspect, max_aspect], whole
      pixels, uniform position; the first of ten attempts that fits, else the largest centered box of allowed aspect
      (Szegedy et al., "Going Deeper with Convolutions", 2015, section 6).
    - "padded": evaluation's box, shifted by whole pixels of the result in [-padding, padding] on each axis. Such a box
      may lie partly outside the image, where the image is reflected at its border.
    - "centre": evaluation's box.

    Args:
        augment: the recipe's augmentation.
        seed: the recipe's seed.
        passes: lane pass of each sample [n].
        samples: sample ids [n].
        sizes: width and height of each upright image, int [n, 2].
        image_size: side of the result.
        fraction: evaluation's share of the shorter side (`data.eval_fraction`).
    """
    passes, samples = np.asarray(passes), np.asarray(samples)
    if augment.crop == "resized":
        boxes = _draw_resized_boxes(augment, seed, passes, samples, sizes)
    else:
        boxes = compute_eval_boxes(fraction, sizes)
    if augment.crop == "padded":
        boxes += _draw_shifts(augment.padding, seed, passes, samples, boxes, image_size)
    return boxes, _draw_flips(augment, seed, passes, samples)


def _draw_flips(augment: recipe.Augment, seed: int, passes: NDArray, samples: NDArray) -> NDArray[np.bool_]:
    """Return whether to flip each image in its pass: drawn for each pass, or alternating after the first pass's draw.

    Two alternating passes always show an image from both sides; independent draws do so half of the time.
    """
    if not augment.flip:
        return np.zeros(len(samples), bool)
    counters = np.zeros_like(passes) if augment.alternate else passes
    flips: NDArray[np.bool_] = draw_uint32(seed, Stream.FLIP, counters, samples)[:, 0] >> np.uint32(31) == 1
    return flips ^ (passes % 2 == 1) if augment.alternate else flips


def compute_eval_boxes(fraction: float, sizes: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return evaluation's boxes: the centered square whose side is `fraction` of the shorter side, in whole pixels.

    The side is rounded to the nearest pixel, and an odd remaining pixel is on the right or at the bottom, so that a
    square image of the model's size is copied without resampling.

    >>> compute_eval_boxes(0.875, np.array([[256, 300]])).tolist()
    [[16.0, 38.0, 240.0, 262.0]]
    """
    whole = np.asarray(sizes, np.float64)
    side = np.maximum(np.floor(fraction * whole.min(axis=1) + 0.5), 1.0)
    return _center_boxes(whole, np.stack([side, side], axis=1))


def _center_boxes(sizes: NDArray[np.float64], extents: NDArray[np.float64]) -> NDArray[np.float64]:
    start = np.floor((sizes - extents) / 2)
    return np.concatenate([start, start + extents], axis=1)


def _draw_shifts(
    padding: int, seed: int, passes: NDArray, samples: NDArray, boxes: NDArray[np.float64], image_size: int
) -> NDArray[np.float64]:
    draws = draw_uniform(seed, Stream.SHIFT, passes, samples)[:, :2]
    pixels = np.floor(draws * (2 * padding + 1)) - padding
    shift = pixels * ((boxes[:, 2:] - boxes[:, :2]) / image_size)
    return np.concatenate([shift, shift], axis=1)


def _draw_resized_boxes(
    augment: recipe.Augment, seed: int, passes: NDArray, samples: NDArray, sizes: NDArray[np.int32]
) -> NDArray[np.float64]:
    whole = np.asarray(sizes, np.float64)
    boxes = _compute_largest_boxes(whole, augment.max_aspect)
    pending = np.arange(len(whole))  # images without an attempt that fits
    aspects = _make_aspect_tables(augment.max_aspect)
    for attempt in range(ATTEMPTS):
        draws = draw_uniform(seed, Stream.CROP, passes[pending], samples[pending], attempt)
        area = whole[pending].prod(axis=1) * (augment.min_area + draws[:, 0] * (1 - augment.min_area))
        aspect = _look_up_aspects(aspects, draws[:, 1])
        extents = np.floor(np.sqrt(np.stack([area * aspect, area / aspect], axis=1)) + 0.5)
        fits = np.all((extents >= 1) & (extents <= whole[pending]), axis=1)
        corner = np.floor(draws[:, 2:] * (whole[pending] - extents + 1))
        boxes[pending[fits]] = np.concatenate([corner, corner + extents], axis=1)[fits]
        pending = pending[~fits]
        if not len(pending):
            break
    return boxes


def _compute_largest_boxes(whole: NDArray[np.float64], max_aspect: float) -> NDArray[np.float64]:
    limit = np.floor(whole[:, ::-1] * max_aspect + 0.5)  # of the width by the height, and the reverse
    return _center_boxes(whole, np.maximum(np.minimum(whole, limit), 1.0))


@functools.lru_cache(maxsize=8)
def _make_aspect_tables(limit: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return limit**(2x - 1) for x in 256ths, and limit**(2x) for x in 65536ths below one 256th.

    Computed from square roots and products alone, which every machine rounds alike; a library's `exp` does not.
    """
    root, factors = limit * limit, []
    for _ in range(16):
        root = math.sqrt(root)
        factors.append(root)
    coarse, fine = [1.0], [1.0]
    for high, low in zip(factors[:8], factors[8:], strict=True):
        coarse = [value * factor for value in coarse for factor in (1.0, high)]
        fine = [value * factor for value in fine for factor in (1.0, low)]
    return np.array(coarse) / limit, np.array(fine)


def _look_up_aspects(tables: tuple[NDArray[np.float64], NDArray[np.float64]], draws: NDArray) -> NDArray[np.float64]:
    step = np.floor(draws * 65536).astype(np.int64)
    return tables[0][step >> 8] * tables[1][step & 255]
