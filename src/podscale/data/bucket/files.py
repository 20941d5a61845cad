"""Read the bytes of a table's samples from a bucket, by ranges of its objects.

Samples that the loader will need are fetched ahead of time (`podscale.data.bucket.fetch`); others when they are
requested. An object that is not the one that was indexed, by its ETag, is refused.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.data.bucket.disk_cache import DiskCache, open_disk_cache
from podscale.data.files import Files
from podscale.data.index.containers.container import Reader
from podscale.data.index.containers.sources import BucketContainer
from podscale.data.index.table import Strings, Table
from podscale.data.limits import MAX_IMAGE_BYTES
from podscale.errors import StorageError, UserError
from podscale.storage.bucket_path import BucketPath
from podscale.storage.store import ObjectChangedError, ObjectInfo

DIRECT_THREADS = 16  # requests at once for samples that nobody has asked for ahead of time


@dataclass(frozen=True, eq=False)
class BucketSplit:
    """Where a split's samples are.

    Attributes:
        root: folder of the data set.
        fingerprint: of the data set's URL and all its ETags.
        name: "train" or "val".
        etags: of each container if they are packed, else of each sample.
        numbers: of each sample in the whole split.
    """

    root: BucketPath
    fingerprint: str
    name: str
    etags: Strings
    numbers: NDArray[np.int64]


@dataclass(frozen=True)
class ByteRange:
    """A range of an object, of a certain version."""

    key: str
    etag: str
    start: int
    stop: int


class BucketFiles(Files):
    """Reader of the samples of a table in a bucket; see `Files`."""

    threads = 64  # they wait for answers

    def __init__(self, table: Table, packed: bool, split: BucketSplit, max_image_bytes: int = MAX_IMAGE_BYTES) -> None:
        super().__init__(str(split.root), table, packed, max_image_bytes)
        self.split, self.store = split, split.root.store
        self.window: Any = None  # samples that are fetched ahead; see `podscale.data.bucket.fetch`
        self._cache: DiskCache | None = None

    def select(self, samples: NDArray[np.integer]) -> "BucketFiles":
        etags = self.split.etags if self.packed else self.split.etags.select(samples)
        split = replace(self.split, etags=etags, numbers=self.split.numbers[samples])
        return BucketFiles(self.table.select(samples), self.packed, split, self.max_image_bytes)

    def with_table(self, table: Table) -> "BucketFiles":
        return BucketFiles(table, self.packed, self.split, self.max_image_bytes)

    def read(self, sample: int) -> bytes:
        (source,), offsets, lengths = self.locate_bytes(np.array([sample]))
        start, stop = int(offsets[0]), int(offsets[0] + lengths[0])
        return os.pread(source, stop - start, start) if isinstance(source, int) else bytes(source[start:stop])

    def locate_bytes(self, samples: NDArray[np.integer]) -> tuple[list[Any], NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's source (memory, or the descriptor of a file in the disk cache), offset and length."""
        numbers, lengths = samples.tolist(), self.table.lengths[samples]
        window = self.window
        if window is not None:
            return window.locate(numbers, lengths)
        return self.fetch_all(numbers), np.zeros(len(numbers), np.int64), lengths

    def open_cache(self) -> DiskCache | None:
        """Return the disk cache of these samples; None if there is to be none."""
        if self._cache is None:
            self._cache = open_disk_cache(
                self.split.fingerprint, self.split.name, self.split.numbers, self.table.lengths
            )
        return self._cache

    def locate_range(self, sample: int) -> ByteRange:
        """Return where a sample is in the bucket."""
        start = int(self.table.offsets[sample])
        stop = start + int(self.table.lengths[sample])
        container = int(self.table.files[sample])
        if self.packed:
            return ByteRange(self.table.paths[container], self.split.etags[container], start, stop)
        name = self.table.names[sample]
        if "/" in name or "\0" in name:
            raise UserError(f"the index of {self.root} names a file {name!r}; remove the index")
        folder = os.path.normpath(self.table.paths[container])
        return ByteRange(f"{folder}/{name}".removeprefix("./"), self.split.etags[sample], start, stop)

    def fetch_range(self, where: ByteRange) -> memoryview:
        """Return bytes of an object.

        Raises:
            UserError: the object is missing.
            StorageError: the store fails, or the object is not the one that was indexed.
        """
        try:
            return self.store.read_range(where.key, where.start, where.stop, where.etag)
        except FileNotFoundError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}; put it back or remove it") from error
        except ObjectChangedError as error:
            raise StorageError(
                f"cannot read {error.filename}: it was replaced after it was indexed; restore it, or start again to "
                "rebuild the index"
            ) from error
        except OSError as error:
            raise StorageError(f"cannot read {error.filename}: {error.strerror}") from error

    def fetch_all(self, samples: list[int]) -> list[memoryview]:
        """Return the bytes of some samples, fetched at once."""
        ranges = [self.locate_range(sample) for sample in samples]
        if len(ranges) == 1:
            return [self.fetch_range(ranges[0])]
        with ThreadPoolExecutor(DIRECT_THREADS, "podscale-fetch") as pool:
            return list(pool.map(self.fetch_range, ranges))

    def measure_one(self, sample: int) -> tuple[tuple[int, int], int]:
        where, length = self.locate_range(sample), int(self.table.lengths[sample])
        stop = where.stop if self.packed else length
        path = replace(self.split.root, key=where.key)
        container = BucketContainer(path, self.max_image_bytes, ObjectInfo(where.key, stop, where.etag))
        with Reader(container) as reader:
            header = reader.read_image_header(where.start, length, self.name(sample))
        return (header.width, header.height), length

    def _check_container(self, sample: int) -> None:
        """A shard that cannot be read is found when it is scanned."""

    def _measure_length(self, sample: int) -> int:
        return int(self.table.lengths[sample])
