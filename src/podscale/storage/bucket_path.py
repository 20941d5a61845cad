"""Paths in buckets, with as much of pathlib's interface as finding a data set takes. Listings are asked for once.

A path and all paths derived from it see one state of the bucket: that of the moment when each folder was first listed.
A store that fails is a `StorageError`.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from podscale.errors import StorageError
from podscale.storage.locations import Location
from podscale.storage.store import FolderListing, ObjectInfo, Store

LISTING_THREADS = 32  # they wait for answers


@dataclass(frozen=True)
class BucketPath:
    """A folder or an object of a store.

    Attributes:
        store: the store, opened at the data set's folder.
        key: the path in it.
        listings: the folders that were listed so far, shared by all derived paths.
    """

    store: Store = field(compare=False, repr=False)
    location: Location
    key: str = ""
    listings: dict[str, FolderListing] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "BucketPath":
        return replace(self, key=self.key.rpartition("/")[0])

    def __truediv__(self, name: str) -> "BucketPath":
        return replace(self, key=f"{self.key}/{name}".strip("/"))

    def __str__(self) -> str:
        return str(self.location.join(self.key))

    def list(self) -> FolderListing:
        """Return the entries of this folder; none if there is no such folder."""
        if self.key not in self.listings:
            with explain_store_errors():
                self.listings[self.key] = self.store.list_folder(self.key)
        return self.listings[self.key]

    def list_many(self, names: Sequence[str]) -> None:
        """List folders in this one at once, many at a time; later questions about them need no request."""
        missing = [name for name in names if (self / name).key not in self.listings]
        if missing:
            with ThreadPoolExecutor(min(LISTING_THREADS, len(missing)), "podscale-list") as pool:
                for _ in pool.map(lambda name: (self / name).list(), missing):
                    pass

    def is_dir(self) -> bool:
        """Return whether there is anything in this folder."""
        listing = self.list()
        return bool(listing.folders or listing.objects)

    def is_file(self) -> bool:
        return bool(self.key) and any(info.key == self.key for info in self.parent.list().objects)

    def stat(self) -> ObjectInfo:
        """Return the object's size and ETag, as its folder's listing had them."""
        for info in self.parent.list().objects:
            if info.key == self.key:
                return info
        with explain_store_errors():
            return self.store.stat(self.key)

    def read(self) -> memoryview:
        """Return the object's bytes, if it is still the one that was listed."""
        with explain_store_errors():
            return self.store.read(self.key, self.stat().etag)


@contextmanager
def explain_store_errors() -> Iterator[None]:
    """Turn an error of a store into a `StorageError`: no image and no shard is to blame."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read {error.filename}: {error.strerror}") from error
