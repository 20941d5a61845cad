"""Stores: one interface for a local folder and a folder in a bucket.

A store is opened at a location, and its keys are relative to it: `open_store("s3://bucket/runs").read("one/plan.json")`.
Keys have slashes between names, and none at their ends. All stores behave alike:

- what is written is seen whole or not at all;
- `create` and `update` have one winner, however many processes try at the same time; where the request succeeded but
  its answer was lost, they succeed too, if the bytes are the caller's own (see `make_token`);
- an error is an `OSError` whose `strerror` says what is wrong and whose `filename` is the object:
  `FileNotFoundError`, `FileExistsError`, `PermissionError`, `TimeoutError` (the store did not answer properly, and the
  time for repetitions is over), `ObjectChangedError`, or a plain `OSError`.

Stores may be used by many threads. One that has been used must not be used in a forked child, which is refused.
"""

import errno
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from podscale.storage.locations import Location


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows of an object without reading it: key, bytes, and a tag that changes with its content."""

    key: str
    size: int
    etag: str


@dataclass(frozen=True)
class FolderListing:
    """The entries of a folder: names of the folders in it, and its objects, both sorted."""

    folders: tuple[str, ...]
    objects: tuple[ObjectInfo, ...]


class ObjectChangedError(OSError):
    """Raised where an object is not, or no longer, the one that the caller named by its ETag."""

    def __init__(self, name: str, why: str = "it was replaced by another object of this name") -> None:
        super().__init__(errno.ESTALE, why, name)


class Store(Protocol):
    """A folder, local or in a bucket. An `etag` that is given must be the object's; if not: `ObjectChangedError`."""

    @property
    def location(self) -> Location:
        """Where the store's folder is."""

    def read(self, key: str, etag: str = "") -> memoryview:
        """Return all bytes of an object."""

    def read_range(self, key: str, start: int, stop: int, etag: str = "") -> memoryview:
        """Return exactly the bytes from `start` up to `stop` of an object."""

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], etag: str = "") -> list[memoryview]:
        """Return the bytes of many ranges of one object, in their order, by as few requests as is worthwhile.

        The results may share memory: one that is kept keeps its neighbours, too.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below a folder of the store, in no particular order."""

    def list_folder(self, prefix: str = "") -> FolderListing:
        """Return the entries of a folder of the store; empty if there is no such folder."""

    def stat(self, key: str) -> ObjectInfo:
        """Return an object's size and ETag."""

    def write(self, key: str, data: bytes | memoryview) -> str:
        """Write an object, or replace it; return its ETag."""

    def write_file(self, key: str, path: Path) -> str:
        """Write a local file's content, in several parts if it is large; return the object's ETag."""

    def create(self, key: str, data: bytes | memoryview) -> str:
        """Write an object that is not there yet; return its ETag.

        Raises:
            FileExistsError: there is one, and its content is not `data`.
        """

    def update(self, key: str, data: bytes | memoryview, etag: str) -> str:
        """Replace the object that has this ETag; return the new one.

        Raises:
            ObjectChangedError: the object is another one by now, and its content is not `data`.
            FileNotFoundError: there is none.
        """

    def delete(self, key: str) -> None:
        """Delete an object, if it is there."""


def make_token() -> str:
    """Return a unique text, by which a process recognizes an object that it wrote itself."""
    return uuid.uuid4().hex
