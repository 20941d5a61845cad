"""Shards: WebDataset's tar files, written so that the same samples always give the same bytes.

A sample is two members, `KEY.jpg` (or .png, .webp, .ppm) and `KEY.cls` with its label, a number; `classes.txt` beside
the shards names the classes. Members have no time, no owner, and names that need no extension of the tar format. A
shard is written under another name and renamed once it is whole and on the disk.
"""

import io
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podscale.data.index.containers.container import CLASSES_FILE, class_names
from podscale.data.index.containers.tar import BLOCK
from podscale.errors import UserError
from podscale.storage.files import write_atomically

MOST_SHARDS = 10**5  # names of five digits, so that their order is that of the numbers
MOST_STEM_BYTES = 80  # a tar header holds names of 100


class Shard:
    """A shard in the making; `abandon` leaves nothing of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.samples, self.bytes = path, 0, 0
        self._part = path.with_name(path.name + ".part")
        with writing(path):
            self._file = self._part.open("wb")
            self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)

    def add(self, key: str, extension: str, data: bytes, label: int) -> None:
        """A picture and its label."""
        with writing(self.path):
            for name, content in ((f"{key}.{extension}", data), (f"{key}.cls", b"%d" % label)):
                member = tarfile.TarInfo(name)  # of the year 1970 and of nobody
                member.size = len(content)
                self._tar.addfile(member, io.BytesIO(content))
        self.samples += 1
        self.bytes += sample_bytes(data)

    def finish(self) -> None:
        """Makes the shard appear, whole."""
        with writing(self.path):
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.bytes = self._part.stat().st_size
            os.replace(self._part, self.path)

    def abandon(self) -> None:
        """Removes what there is of it."""
        self._file.close()
        self._part.unlink(missing_ok=True)


def sample_bytes(data: bytes) -> int:
    """What a picture and its label take in a shard."""
    return BLOCK + len(data) + -len(data) % BLOCK + 2 * BLOCK


def shard_name(split: str, number: int) -> str:
    """What the shards of a split are called.

    >>> shard_name("train", 17)
    'train-00017.tar'
    """
    if number >= MOST_SHARDS:
        raise UserError(f"the {split} pictures need more than {MOST_SHARDS:,} shards; make them larger by --shard-mib")
    return f"{split}-{number:05}.tar"


def key_of(sample: int, name: str) -> str:
    """What a sample is called in its shard: by its number, and by what a person may know it by.

    >>> key_of(17, "photos/train/cat/my cat.2.jpeg"), key_of(18, "")
    ('00000017-my_cat_2', '00000018')
    """
    stem = re.sub(r"[^\w-]+", "_", posixpath.splitext(posixpath.basename(name))[0])
    short = stem.encode()[:MOST_STEM_BYTES].decode(errors="ignore")
    return f"{sample:08}-{short}" if short else f"{sample:08}"


def write_classes(folder: Path, classes: tuple[str, ...]) -> None:
    """The list of classes beside the shards."""
    path = folder / CLASSES_FILE
    with writing(path):
        write_atomically(path, class_list(classes))


def class_list(classes: tuple[str, ...]) -> str:
    """The text of that list; refuses names that it cannot hold."""
    for name in classes:
        if class_names(f"{name}\n") != (name,) or not name.isprintable():
            raise UserError(f"the class name {name!r} cannot be a line of {CLASSES_FILE}; rename the class")
    return "".join(f"{name}\n" for name in classes)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what a file system refuses into one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; once it can, the same command goes on") from error
