"""Pictures that belong to no data set: files, folders and lists of them, on their way to a trained model.

All batches have one shape, so that the model is compiled once; the last one is padded. A picture that cannot be read
takes nothing away from the others: its place is zeros, and why is told.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from numpy.typing import NDArray

from podscale.data import crop
from podscale.data.bad_images import BadPictures
from podscale.data.index.containers.container import visible
from podscale.data.index.containers.folder import EXTENSIONS
from podscale.data.index.dataset import NO_PICTURES, Index, files_index
from podscale.data.order import eval_boxes
from podscale.data.prefetch import Batch, Batches
from podscale.data.staging import Staging
from podscale.errors import UserError
from podscale.recipe import Recipe

LIST = "-"  # a list of paths on stdin
MOST_AT_ONCE = 64  # pictures of a batch
ENDINGS = (*EXTENSIONS, ".ppm")


def listed(paths: Sequence[str | os.PathLike[str]], stdin: TextIO | None = None) -> list[str]:
    """The picture files that are meant: a file is itself, a folder all pictures in it and below it, sorted by name;
    `-` is a list on stdin, one path a line.

    What is named here and is not there is refused at once. What a list or a folder names is found out about later.
    """
    found: list[str] = []
    for path in (os.fspath(path) for path in paths):
        if path == LIST:
            lines = (line.rstrip("\r\n") for line in stdin or sys.stdin)
            found += [name for line in lines if line for name in (_below(line) if os.path.isdir(line) else [line])]
        elif os.path.isdir(path):
            inside = list(_below(path))
            if not inside:
                raise UserError(f"the folder {path} holds no pictures ({' '.join(ENDINGS)})")
            found += inside
        elif os.path.isfile(path):
            found.append(path)
        else:
            raise UserError(f"there is no picture file {path}; check the path")
    if not found:
        raise UserError("no pictures are named; name files or folders, or - for a list of them on stdin")
    return found


def _below(folder: str) -> Iterator[str]:
    for entry in sorted(visible(Path(folder)), key=lambda entry: entry.name):
        path = os.path.join(folder, entry.name)
        if entry.is_dir(follow_symlinks=False):
            yield from _below(path)
        elif entry.name.lower().endswith(ENDINGS) and entry.is_file():
            yield path


@dataclass(frozen=True)
class Pictures:
    """The batches of a list of files, and what became of those that cannot be read: number in the list -> why."""

    names: Sequence[str]
    recipe: Recipe
    device: Any
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def index(self) -> Index:
        return NO_PICTURES.train  # there is none for all of them: each batch makes its own

    @property
    def bad(self) -> BadPictures:
        return BadPictures(self.index, lanes=1, share=0.0)  # those of data sets; `problems` are ours

    @property
    def at_once(self) -> int:
        """Pictures of a batch: no more than there are, rounded up to a power of two.

        >>> Pictures(["a.jpg"] * 5, Recipe(), None).at_once
        8
        """
        return min(MOST_AT_ONCE, 1 << (len(self.names) - 1).bit_length())

    def batches(self) -> Batches:
        """All pictures in order, as evaluation sees them, made ahead of time: images uint8 [at_once, size, size, 3]."""
        return Batches(range(0, len(self.names), self.at_once), self, threads=None, depth=3)

    def ahead(self, _: int) -> NDArray[np.int64]:
        return np.zeros(0, np.int64)

    def make(self, first: int, pool: Executor, staging: Staging) -> Batch:
        names, size = self.names[first : first + self.at_once], self.recipe.data.image_size
        images = staging.take((self.at_once, size, size, 3))
        images[len(names) :] = 0
        try:
            self._read(names, images[: len(names)], pool)
        except UserError:  # one of them; the others are as good as ever
            for _ in pool.map(lambda i: self._read_or_note(first + i, images[i : i + 1]), range(len(names))):
                pass
        array = jax.device_put(images, self.device)
        staging.sent(images, array)
        labels = np.full(self.at_once, -1, np.int32)
        return Batch(array, jax.device_put(labels, self.device), len(names))

    def _read(self, names: Sequence[str], out: NDArray[np.uint8], pool: Executor | None) -> None:
        index = files_index(names).shrunk(self.recipe.data.shrink)
        samples, data = np.arange(len(names)), self.recipe.data
        boxes = eval_boxes(data.eval_fraction, index.sizes)
        crop.crop_batch(index, samples, boxes, np.zeros(len(names), bool), data.image_size, out, pool)

    def _read_or_note(self, number: int, out: NDArray[np.uint8]) -> None:
        try:
            self._read([self.names[number]], out, None)
        except UserError as error:
            out[...] = 0
            self.problems[number] = str(error)
