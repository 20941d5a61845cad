"""Write WebDataset shards (tar files) such that the same samples always give the same bytes.

A sample is two members, `KEY.jpg` (or .png, .webp, .ppm) and `KEY.cls` with its label, a number; `classes.txt` beside
the shards names the classes. Members have no time, no owner, and names that need no extension of the tar format. A
shard is written under a temporary name and renamed once it is complete and on disk.
"""

import io
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podscale.data.index.containers.container import CLASSES_FILE, parse_class_names
from podscale.data.index.containers.tar import BLOCK
from podscale.errors import UserError
from podscale.storage.files import write_atomically

MAX_SHARDS = 10**5  # five digits, so that names sort like numbers
MAX_STEM_BYTES = 80  # a tar header holds names of 100 bytes


class Shard:
    """A shard that is being written; `abandon` removes it."""

    def __init__(self, path: Path) -> None:
        self.path, self.samples, self.bytes = path, 0, 0
        self._part = path.with_name(path.name + ".part")
        with explain_write_errors(path):
            self._file = self._part.open("wb")
            self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)

    def add(self, key: str, extension: str, data: bytes, label: int) -> None:
        """Add an image and its label."""
        with explain_write_errors(self.path):
            for name, content in ((f"{key}.{extension}", data), (f"{key}.cls", b"%d" % label)):
                member = tarfile.TarInfo(name)  # no time (1970) and no owner
                member.size = len(content)
                self._tar.addfile(member, io.BytesIO(content))
        self.samples += 1
        self.bytes += count_sample_bytes(data)

    def finish(self) -> None:
        """Complete the shard and rename it to its final name."""
        with explain_write_errors(self.path):
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.bytes = self._part.stat().st_size
            os.replace(self._part, self.path)

    def abandon(self) -> None:
        """Remove the incomplete shard."""
        self._file.close()
        self._part.unlink(missing_ok=True)


def count_sample_bytes(data: bytes) -> int:
    """Return the bytes that an image and its label take in a shard."""
    return BLOCK + len(data) + -len(data) % BLOCK + 2 * BLOCK


def format_shard_name(split: str, number: int) -> str:
    """Return the name of a split's shard.

    >>> format_shard_name("train", 17)
    'train-00017.tar'
    """
    if number >= MAX_SHARDS:
        raise UserError(f"the {split} images need more than {MAX_SHARDS:,} shards; make them larger with --shard-mib")
    return f"{split}-{number:05}.tar"


def make_key(sample: int, name: str) -> str:
    """Return a sample's key in its shard: its number, and its original name so that a person can recognize it.

    >>> make_key(17, "photos/train/cat/my cat.2.jpeg"), make_key(18, "")
    ('00000017-my_cat_2', '00000018')
    """
    stem = re.sub(r"[^\w-]+", "_", posixpath.splitext(posixpath.basename(name))[0])
    short = stem.encode()[:MAX_STEM_BYTES].decode(errors="ignore")
    return f"{sample:08}-{short}" if short else f"{sample:08}"


def write_classes(folder: Path, classes: tuple[str, ...]) -> None:
    """Write the list of classes beside the shards."""
    path = folder / CLASSES_FILE
    with explain_write_errors(path):
        write_atomically(path, format_class_list(classes))


def format_class_list(classes: tuple[str, ...]) -> str:
    """Return the text of the list of classes; refuse names that it cannot hold."""
    for name in classes:
        if parse_class_names(f"{name}\n") != (name,) or not name.isprintable():
            raise UserError(f"the class name {name!r} cannot be a line of {CLASSES_FILE}; rename the class")
    return "".join(f"{name}\n" for name in classes)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a one-sentence `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; fix this and run the same command again to continue"
        ) from error
