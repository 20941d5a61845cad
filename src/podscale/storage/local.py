"""A local folder as a store. Files are written under temporary names and renamed; an ETag is a file's state on disk."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from podscale.storage.files import name_file, open_regular
from podscale.storage.locations import Location
from podscale.storage.store import FolderListing, ObjectChangedError, ObjectInfo

PART = ".podscale-part-"  # starts the names of files that are being written; they are never listed
LOCK = ".podscale-lock"  # locked while a file is compared and replaced


class LocalStore:
    """A folder of the file system; see `Store`."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._root = Path(location.key).expanduser()

    # --- reading ---

    def read(self, key: str, etag: str = "") -> memoryview:
        with self._open(key, etag) as file:
            return memoryview(file.read())

    def read_range(self, key: str, start: int, stop: int, etag: str = "") -> memoryview:
        return self.read_ranges(key, [(start, stop)], etag)[0]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], etag: str = "") -> list[memoryview]:
        parts = []
        with self._open(key, etag) as file:
            for start, stop in ranges:
                file.seek(start)
                parts.append(memoryview(file.read(stop - start)))
                if len(parts[-1]) < stop - start:
                    raise OSError(errno.EIO, f"it ends before byte {stop}", str(self._path(key)))
        return parts

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        listing = self.list_folder(prefix)
        yield from listing.objects
        for name in listing.folders:
            yield from self.list(f"{prefix}/{name}".strip("/"))

    def list_folder(self, prefix: str = "") -> FolderListing:
        folders, objects = [], []
        try:
            with os.scandir(self._path(prefix)) as entries:
                for entry in entries:
                    key = f"{prefix}/{entry.name}".strip("/")
                    if entry.is_dir():
                        folders.append(entry.name)
                    elif entry.is_file() and not entry.name.startswith((PART, LOCK)):
                        with suppress(FileNotFoundError):  # removed since it was listed
                            objects.append(self.stat(key))
        except (FileNotFoundError, NotADirectoryError):
            pass
        return FolderListing(tuple(sorted(folders)), tuple(sorted(objects, key=lambda info: info.key)))

    def stat(self, key: str) -> ObjectInfo:
        return _describe(key, os.stat(self._path(key)))

    # --- writing ---

    def write(self, key: str, data: bytes | memoryview) -> str:
        return self._replace(key, lambda file: file.write(data))

    def write_file(self, key: str, path: Path) -> str:
        def copy(file: IO[bytes]) -> None:
            with open_regular(path) as source:
                while piece := source.read(2**20):
                    file.write(piece)

        return self._replace(key, copy)

    def create(self, key: str, data: bytes | memoryview) -> str:
        with self._write_part(key, lambda file: file.write(data)) as part:
            os.link(part, self._path(key))  # unlike a rename, refuses to replace a file
        return self.stat(key).etag

    def update(self, key: str, data: bytes | memoryview, etag: str) -> str:
        path = self._path(key)
        with (path.parent / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.stat(key).etag != etag:
                raise ObjectChangedError(str(path))
            return self.write(key, data)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    # ---

    def _path(self, key: str) -> Path:
        if ".." in key.split("/") or key.startswith("/"):
            raise OSError(errno.EINVAL, "a key must not lead out of its store", key)
        return self._root / key

    def _open(self, key: str, etag: str) -> IO[bytes]:
        file = open_regular(self._path(key))
        if etag and _describe(key, os.fstat(file.fileno())).etag != etag:
            file.close()
            raise ObjectChangedError(str(self._path(key)))
        return file

    def _replace(self, key: str, fill: Callable[[IO[bytes]], object]) -> str:
        with self._write_part(key, fill) as part:
            info = _describe(key, part.stat())  # a rename changes none of it
            os.replace(part, self._path(key))
        return info.etag

    @contextmanager
    def _write_part(self, key: str, fill: Callable[[IO[bytes]], object]) -> Iterator[Path]:
        """Write a file beside an object, under a temporary name; remove it at the end, unless it was renamed."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with name_file(path), tempfile.NamedTemporaryFile(dir=path.parent, prefix=PART, delete=False) as file:
            part = Path(file.name)
            try:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644)
                yield part
            finally:
                part.unlink(missing_ok=True)


def _describe(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}")
