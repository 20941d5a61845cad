"""Images that belong to no data set: files, folders and lists of them, in batches for a trained model.

All batches have one shape, so that the model is compiled once; the last one is padded. An image that cannot be read
does not affect the others: its pixels are zeros, and the reason is recorded.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import jax
import numpy as np
from numpy.typing import NDArray

from podscale.data import crop
from podscale.data.bad_images import BadImages
from podscale.data.index.containers.entries import is_file, is_folder, list_visible
from podscale.data.index.containers.folder import EXTENSIONS
from podscale.data.index.dataset import NO_IMAGES, Index, index_files
from podscale.data.order import compute_eval_boxes
from podscale.data.prefetch import Batch, Batches
from podscale.data.staging import Staging
from podscale.errors import UserError
from podscale.recipe import Recipe

STDIN = "-"  # stands for a list of paths on stdin
MAX_BATCH_SIZE = 64  # images of a batch
SUFFIXES = (*EXTENSIONS, ".ppm")


def list_image_files(paths: Sequence[str | os.PathLike[str]], stdin: TextIO | None = None) -> list[str]:
    """Return the image files that the paths name.

    A path given here must exist. What a folder or a list contains is checked only when it is read.

    Args:
        paths: files; folders, for all images in them and below, sorted by name; `-` for a list on stdin, one path per
            line.
        stdin: where the list comes from; None: the process's stdin.

    Raises:
        UserError: a path does not exist, a folder has no images, or there are no images at all.
    """
    names: list[str] = []
    for path in (os.fspath(path) for path in paths):
        if path == STDIN:
            lines = (line.rstrip("\r\n") for line in stdin or sys.stdin)
            names += [
                name for line in lines if line for name in (_walk_images(line) if os.path.isdir(line) else [line])
            ]
        elif os.path.isdir(path):
            in_folder = list(_walk_images(path))
            if not in_folder:
                raise UserError(f"the folder {path} holds no images ({' '.join(SUFFIXES)})")
            names += in_folder
        elif os.path.isfile(path):
            names.append(path)
        else:
            raise UserError(f"there is no image file {path}; check the path")
    if not names:
        raise UserError("no images are named; name files or folders, or - for a list of them on stdin")
    return names


def _walk_images(folder: str) -> Iterator[str]:
    for entry in sorted(list_visible(Path(folder)), key=lambda entry: entry.name):
        path = os.path.join(folder, entry.name)
        if is_folder(entry) and not os.path.islink(path):
            yield from _walk_images(path)
        elif entry.name.lower().endswith(SUFFIXES) and is_file(entry):
            yield path


@dataclass(frozen=True)
class ImageFiles:
    """The batches of a list of files.

    Attributes:
        problems: why a file cannot be read, by its number in the list.
    """

    names: Sequence[str]
    recipe: Recipe
    device: jax.Device
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def index(self) -> Index:
        return NO_IMAGES.train  # there is no index of all files: each batch makes its own

    @property
    def bad_images(self) -> BadImages:
        return BadImages(self.index, lanes=1, share=0.0)  # stays empty: `problems` lists the files

    @property
    def batch_size(self) -> int:
        """Images of a batch: no more than there are, rounded up to a power of two.

        >>> ImageFiles(["a.jpg"] * 5, Recipe(), None).batch_size
        8
        """
        return min(MAX_BATCH_SIZE, 1 << (len(self.names) - 1).bit_length())

    def make_batches(self) -> Batches:
        """Return batches of all images in order, as evaluation sees them: uint8 [batch_size, size, size, 3]."""
        return Batches(range(0, len(self.names), self.batch_size), self, threads=None, depth=3)

    def list_samples(self, _: int) -> NDArray[np.int64]:
        return np.zeros(0, np.int64)

    def make(self, first: int, pool: Executor, staging: Staging) -> Batch:
        names, size = self.names[first : first + self.batch_size], self.recipe.data.image_size
        images = staging.take((self.batch_size, size, size, 3))
        images[len(names) :] = 0
        try:
            self._read(names, images[: len(names)], pool)
        except UserError:  # at least one is bad: each is read by itself
            for _ in pool.map(lambda i: self._read_or_record(first + i, images[i : i + 1]), range(len(names))):
                pass
        array = jax.device_put(images, self.device)
        staging.reuse_after(images, array)
        labels = np.full(self.batch_size, -1, np.int32)
        return Batch(array, jax.device_put(labels, self.device), len(names))

    def _read(self, names: Sequence[str], out: NDArray[np.uint8], pool: Executor | None) -> None:
        index = index_files(names, self.recipe.data.max_image_bytes).limit_size(self.recipe.data.shrink)
        samples, data = np.arange(len(names)), self.recipe.data
        boxes = compute_eval_boxes(data.eval_fraction, index.sizes)
        crop.crop_batch(index, samples, boxes, np.zeros(len(names), bool), out, pool)

    def _read_or_record(self, number: int, out: NDArray[np.uint8]) -> None:
        try:
            self._read([self.names[number]], out, None)
        except UserError as error:
            out[...] = 0
            self.problems[number] = str(error)
