"""Where the bytes of a container come from: a file on disk, or an object in a bucket."""

import os
from dataclasses import dataclass
from typing import Protocol

from podscale.data.limits import MAX_IMAGE_BYTES
from podscale.errors import UserError
from podscale.storage.bucket_path import BucketPath, explain_store_errors
from podscale.storage.files import open_descriptor
from podscale.storage.store import ObjectInfo


@dataclass(frozen=True)
class BucketContainer:
    """A container in a bucket, as `Format.scan` gets it.

    Attributes:
        path: a shard, or a class folder.
        max_image_bytes: memory that decoding one image may take; images are measured while they are scanned.
        info: of the shard, if it is known without a listing.
    """

    path: BucketPath
    max_image_bytes: int = MAX_IMAGE_BYTES
    info: ObjectInfo | None = None

    def __str__(self) -> str:
        return str(self.path)


class Source(Protocol):
    """Bytes that are read in ranges. A reader keeps `pages` of what it read last.

    Attributes:
        measures: the memory of an image that is measured at once, because its header has been read with its frame;
            0 where headers are read later.
    """

    size: int
    pages: int
    measures: int

    def read(self, start: int, count: int) -> bytes | memoryview:
        """Return at least `count` bytes from `start` on, or as many as there are."""

    def close(self) -> None:
        """Close the file."""


class FileSource:
    """A file on disk. Small reads cost one system call per page."""

    PAGE = 4096
    pages, measures = 1, 0

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = open_descriptor(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; check that it is there and readable") from error
        self.size = os.fstat(self._descriptor).st_size

    def read(self, start: int, count: int) -> bytes:
        try:
            return os.pread(self._descriptor, max(count, self.PAGE), start)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}; copy it again") from error

    def close(self) -> None:
        os.close(self._descriptor)


class BucketSource:
    """An object in a bucket, read by one request per page.

    A page holds the frame of a sample and, mostly, the header of its image. Where samples are so small that the next
    one begins near the end of a page, pages grow: then reading on costs less than another request.
    """

    MIN_PAGE, MAX_PAGE, NEAR = 2**13, 2**20, 2**14
    pages = 4  # a record's start, its end, and an image's long header

    def __init__(self, container: BucketContainer) -> None:
        self._path, self.measures = container.path, container.max_image_bytes
        info = container.info or self._path.stat()
        self.size, self._etag = info.size, info.etag
        self._page, self._start, self._end = self.MIN_PAGE, 0, -self.NEAR

    def read(self, start: int, count: int) -> memoryview:
        is_near = start > self._start and start - self._end < self.NEAR  # what is asked for may begin on the last page
        self._page = min(2 * self._page, self.MAX_PAGE) if is_near else self.MIN_PAGE
        self._start, self._end = start, min(start + max(count, self._page), self.size)
        with explain_store_errors():
            return self._path.store.read_range(self._path.key, start, self._end, self._etag)

    def close(self) -> None:
        pass


def open_source(path: str | BucketContainer) -> Source:
    """Return the bytes of a file or object.

    Raises:
        UserError: it cannot be opened.
    """
    return BucketSource(path) if isinstance(path, BucketContainer) else FileSource(path)
