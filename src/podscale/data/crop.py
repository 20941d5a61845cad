"""Cropping: parts of many pictures at once, natively or plainly, in threads.

Everything that wants pixels of an index comes through `crop_batch`. A picture that cannot be read is an error that
names it, unless the caller keeps a list of such pictures and makes do without them.
"""

from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from podscale.data import decode
from podscale.data.decode import MAX_PIXELS
from podscale.data.index.dataset import Index
from podscale.errors import UserError

PICTURES_PER_TASK = 16  # decoding takes a millisecond a picture
ARRAYS_PER_TASK = 1024  # copying takes a microsecond or two


def crop_batch(
    index: Index,
    samples: NDArray[np.integer],
    boxes: NDArray[np.float64],
    flips: NDArray[np.bool_],
    size: int,
    out: NDArray[np.uint8],
    pool: Executor | None = None,
    bad: list[tuple[int, str]] | None = None,
) -> None:
    """`decode.crop` for each of `samples` of an index, into out [n, size, size, 3], in parallel where there is a pool.

    Where there is a list `bad`, a picture that cannot be read is added to it, as its place in `samples` and why, and
    its part of `out` holds anything; else it is an error.
    """
    if index.images is not None and _needs_no_resize(boxes, size):
        corners = boxes[:, :2].astype(np.int64)
        images = index.images
        spread(
            pool,
            lambda part: _copy_windows(images, samples[part], corners[part], flips[part], out[part]),
            len(samples),
            ARRAYS_PER_TASK,
        )
        return

    def part_of(part: slice) -> None:
        work = _crop_natively if decode.decoder() == "native" else _crop_plainly
        try:
            work(index, samples[part], boxes[part], flips[part], size, out[part])
        except UserError as error:
            if bad is None:
                raise
            if part.stop - part.start == 1:
                bad.append((part.start, str(error)))
                return
            for i in range(part.start, part.stop):  # which one is it?
                part_of(slice(i, i + 1))

    spread(pool, part_of, len(samples), PICTURES_PER_TASK)


def _crop_plainly(
    index: Index,
    samples: NDArray[np.integer],
    boxes: NDArray[np.float64],
    flips: NDArray[np.bool_],
    size: int,
    out: NDArray[np.uint8],
) -> None:
    for i, sample in enumerate(samples.tolist()):
        decode.crop(index.pixels(sample), boxes[i], bool(flips[i]), size, out[i], index.name(sample))


def _crop_natively(
    index: Index,
    samples: NDArray[np.integer],
    boxes: NDArray[np.float64],
    flips: NDArray[np.bool_],
    size: int,
    out: NDArray[np.uint8],
) -> None:
    """In this thread; pictures that the native decoder leaves in the plain way, those to be shrunk one by one."""
    native = decode.native
    assert native is not None
    arrays = index.arrays(samples)
    if arrays is None and index.shrinks(samples).any():
        if len(samples) > 1:
            for part in (slice(i, i + 1) for i in range(len(samples))):
                _crop_natively(index, samples[part], boxes[part], flips[part], size, out[part])
            return
        arrays = index.pixels(int(samples[0])).reshape(-1), np.zeros(1, np.int64)
    edges, mirrored = np.ascontiguousarray(boxes, np.float64), np.ascontiguousarray(flips, np.bool_)
    if arrays is not None:
        memory, places = arrays
        sizes = np.ascontiguousarray(index.sizes[samples], np.int32)
        left = native.crop_pixels(memory, places, sizes, edges, mirrored, size, out, 1)
    else:
        left = native.crop(*index.sources(samples), edges, mirrored, size, out, 1, MAX_PIXELS)
    for i, _ in left:
        part = slice(i, i + 1)
        _crop_plainly(index, samples[part], boxes[part], flips[part], size, out[part])


def advise(index: Index, samples: NDArray[np.integer]) -> None:
    """Has the kernel read the pictures' files ahead of time, as far as it can; what is kept in memory needs none."""
    native = decode.native
    if native is None or index.files is None or (index.cache is not None and not len(index.cache.missing(samples))):
        return
    for start in range(0, len(samples), ARRAYS_PER_TASK):
        native.advise(*index.files.sources(samples[start : start + ARRAYS_PER_TASK]))


def spread(pool: Executor | None, work: Callable[[slice], None], n: int, per_task: int) -> None:
    """`work` on every part of 0..n-1, in the pool's threads; the first error stops what has not begun."""
    parts = [slice(start, min(start + per_task, n)) for start in range(0, n, per_task)]
    if pool is None or len(parts) == 1:
        for part in parts:
            work(part)
    else:
        for _ in pool.map(work, parts):
            pass


# --- pictures in memory that need no resize ---------------------------------------------------------------------------


def _needs_no_resize(boxes: NDArray[np.float64], size: int) -> bool:
    sides = boxes[:, 2:] - boxes[:, :2]
    return bool(np.all(sides == size) and np.all(boxes[:, :2] == np.floor(boxes[:, :2])))


def _copy_windows(
    images: NDArray[np.uint8],
    samples: NDArray[np.integer],
    corners: NDArray[np.int64],
    flips: NDArray[np.bool_],
    out: NDArray[np.uint8],
) -> None:
    """Windows of `out`'s size at `corners` (left, top), which may reach past the border, where images reflect.

    Rows are gathered whole; columns then in one go for all pictures that share a left edge and a mirroring, of which
    a padded crop has but a few.
    """
    (n, height, width), size = images.shape[:3], out.shape[1]
    rows = decode.reflect(corners[:, 1:] + np.arange(size), height)  # [samples, size]
    tall = images.reshape(n * height, width * 3)[samples[:, None] * height + rows]  # [samples, size, width * 3]
    kinds, which = np.unique(corners[:, 0] * 2 + flips, return_inverse=True)
    for kind, (left, flip) in enumerate(zip((kinds // 2).tolist(), (kinds % 2).tolist(), strict=True)):
        columns = decode.reflect(np.arange(left, left + size), width)
        taken = (columns[:: -1 if flip else 1, None] * 3 + np.arange(3)).ravel()
        members = np.flatnonzero(which == kind)
        out[members] = tall[members].take(taken, axis=2).reshape(len(members), size, size, 3)
