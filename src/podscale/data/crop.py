"""Cropping: parts of many images at once, by the native decoder or the reference implementation, in threads.

All code that needs pixels of an index calls `crop_batch`. An image that cannot be read is an error that names it,
unless the caller passes a list that collects such images.
"""

from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from podscale.data import decode
from podscale.data.index.dataset import Index
from podscale.errors import StorageError, UserError

IMAGES_PER_TASK = 16  # decoding takes about a millisecond per image
ARRAYS_PER_TASK = 1024  # copying takes a microsecond or two per image


def crop_batch(
    index: Index,
    samples: NDArray[np.integer],
    boxes: NDArray[np.float64],
    flips: NDArray[np.bool_],
    out: NDArray[np.uint8],
    pool: Executor | None = None,
    bad: list[tuple[int, str]] | None = None,
) -> None:
    """Crop, resize and flip samples of an index, each as `decode.crop_image` does.

    Args:
        index: the split that the samples belong to.
        samples: samples [n].
        boxes: (left, top, right, bottom) of each, in pixels of the upright image.
        flips: whether to flip each left to right.
        out: receives the pixels [n, size, size, 3].
        pool: threads to work in; None works in this thread.
        bad: collects (position in `samples`, reason) of images that cannot be read; the contents of `out` are
            undefined there.

    Raises:
        UserError: an image cannot be read and there is no list `bad`.
    """
    size = out.shape[1]
    if index.images is not None and _can_copy(boxes, size):
        corners = boxes[:, :2].astype(np.int64)
        images = index.images
        run_in_pool(
            pool,
            lambda part: _copy_windows(images, samples[part], corners[part], flips[part], out[part]),
            len(samples),
            ARRAYS_PER_TASK,
        )
        return

    def crop_part(part: slice) -> None:
        crop = _crop_natively if decode.select_decoder() == "native" else _crop_with_reference
        try:
            crop(index, samples[part], boxes[part], flips[part], size, out[part])
        except UserError as error:
            if bad is None or isinstance(error, StorageError):
                raise
            if part.stop - part.start == 1:
                bad.append((part.start, str(error)))
                return
            for i in range(part.start, part.stop):  # finds out which images are bad
                crop_part(slice(i, i + 1))

    run_in_pool(pool, crop_part, len(samples), IMAGES_PER_TASK)


def _crop_with_reference(
    index: Index,
    samples: NDArray[np.integer],
    boxes: NDArray[np.float64],
    flips: NDArray[np.bool_],
    size: int,
    out: NDArray[np.uint8],
) -> None:
    for i, sample in enumerate(samples.tolist()):
        decode.crop_image(index.load_pixels(sample), boxes[i], bool(flips[i]), size, out[i], index.name(sample))


def _crop_natively(
    index: Index,
    samples: NDArray[np.integer],
    boxes: NDArray[np.float64],
    flips: NDArray[np.bool_],
    size: int,
    out: NDArray[np.uint8],
) -> None:
    """Crop in this thread. The reference implementation does what the native decoder rejects.

    Images that are shrunk first are processed one by one.
    """
    native = decode.native
    assert native is not None
    arrays = index.locate_pixels(samples)
    if arrays is None and index.needs_shrinking(samples).any():
        if len(samples) > 1:
            for part in (slice(i, i + 1) for i in range(len(samples))):
                _crop_natively(index, samples[part], boxes[part], flips[part], size, out[part])
            return
        arrays = index.load_pixels(int(samples[0])).reshape(-1), np.zeros(1, np.int64)
    edges, flip = np.ascontiguousarray(boxes, np.float64), np.ascontiguousarray(flips, np.bool_)
    if arrays is not None:
        memory, offsets = arrays
        sizes = np.ascontiguousarray(index.sizes[samples], np.int32)
        rejected = native.crop_pixels(memory, offsets, sizes, edges, flip, size, out, 1)
    else:
        rejected = native.crop(*index.locate_bytes(samples), edges, flip, size, out, 1, index.max_image_bytes)
    for i, _ in rejected:
        part = slice(i, i + 1)
        _crop_with_reference(index, samples[part], boxes[part], flips[part], size, out[part])


def read_ahead(index: Index, samples: NDArray[np.integer]) -> None:
    """Ask the kernel to read the samples' files ahead of time, unless all of them are in the cache."""
    native = decode.native
    if (
        native is None
        or index.files is None
        or (index.cache is not None and not len(index.cache.find_missing(samples)))
    ):
        return
    for start in range(0, len(samples), ARRAYS_PER_TASK):
        native.advise(*index.files.locate_bytes(samples[start : start + ARRAYS_PER_TASK]))


def run_in_pool(pool: Executor | None, work: Callable[[slice], None], n: int, per_task: int) -> None:
    """Call `work` on every part of 0..n-1, `per_task` long, in the pool's threads.

    The first error cancels the calls that have not started.
    """
    parts = [slice(start, min(start + per_task, n)) for start in range(0, n, per_task)]
    if pool is None or len(parts) == 1:
        for part in parts:
            work(part)
    else:
        for _ in pool.map(work, parts):
            pass


# --- images in memory that need no resize -----------------------------------------------------------------------------


def _can_copy(boxes: NDArray[np.float64], size: int) -> bool:
    """Return whether the boxes are whole pixels of the result's size, so that nothing has to be resampled."""
    sides = boxes[:, 2:] - boxes[:, :2]
    return bool(np.all(sides == size) and np.all(boxes[:, :2] == np.floor(boxes[:, :2])))


def _copy_windows(
    images: NDArray[np.uint8],
    samples: NDArray[np.integer],
    corners: NDArray[np.int64],
    flips: NDArray[np.bool_],
    out: NDArray[np.uint8],
) -> None:
    """Copy windows of `out`'s size at `corners` (left, top), which may extend past the border, where images reflect.

    Gathers whole rows first, then columns at once for all images that share a left edge and a flip, of which a padded
    crop has only a few.
    """
    (n, height, width), size = images.shape[:3], out.shape[1]
    rows = decode.reflect(corners[:, 1:] + np.arange(size), height)  # [samples, size]
    tall = images.reshape(n * height, width * 3)[samples[:, None] * height + rows]  # [samples, size, width * 3]
    groups, group_of = np.unique(corners[:, 0] * 2 + flips, return_inverse=True)
    for group, (left, flip) in enumerate(zip((groups // 2).tolist(), (groups % 2).tolist(), strict=True)):
        columns = decode.reflect(np.arange(left, left + size), width)
        byte_columns = (columns[:: -1 if flip else 1, None] * 3 + np.arange(3)).ravel()
        members = np.flatnonzero(group_of == group)
        out[members] = tall[members].take(byte_columns, axis=2).reshape(len(members), size, size, 3)
