"""Entries of folders on disk and in buckets: what finding a data set asks of either."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from podscale.errors import UserError
from podscale.storage.bucket_path import BucketPath
from podscale.storage.files import describe_kind, read_text

Folder = Path | BucketPath


class Entry(Protocol):
    """An entry of a folder: `os.DirEntry`, or one of a bucket."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _BucketEntry:
    name: str
    path: str
    is_folder: bool

    def is_file(self) -> bool:
        return not self.is_folder

    def is_dir(self) -> bool:
        return self.is_folder


def list_visible(folder: Folder) -> list[Entry]:
    """Return the entries of a folder that are not hidden."""
    return [entry for entry in list_entries(folder) if not entry.name.startswith(".")]


def list_entries(folder: Folder) -> list[Entry]:
    """Return all entries of a folder."""
    if isinstance(folder, BucketPath):
        listing = folder.list()
        names = [(name, True) for name in listing.folders]
        names += [(info.key.rpartition("/")[2], False) for info in listing.objects]
        return [_BucketEntry(name, f"{folder}/{name}", is_folder) for name, is_folder in names]
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise UserError(f"cannot list the folder {folder}: {error.strerror}; check its permissions") from error


def list_ahead(folder: Folder, names: list[str]) -> None:
    """List folders in a folder of a bucket, many at once, because each will be asked for; on disk this does nothing."""
    if isinstance(folder, BucketPath):
        folder.list_many(names)


def is_file(entry: Entry) -> bool:
    """Return whether an entry is a regular file or a link to one; a link to itself is neither a file nor a folder."""
    return _follow_link(entry.is_file, entry.path)


def is_folder(entry: Entry) -> bool:
    """Return whether an entry is a folder or a link to one."""
    return _follow_link(entry.is_dir, entry.path)


def _follow_link(ask: Callable[[], bool], path: str) -> bool:
    try:
        return ask()
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def describe_entry(entry: Entry) -> str:
    """Return a sentence about an entry that is no file."""
    try:
        kind = describe_kind(os.stat(entry.path).st_mode) if isinstance(entry, os.DirEntry) else "a folder"
    except OSError:
        kind = "a link that leads to nothing"
    return f"{entry.path} is {kind}, not a file, and is ignored; replace or remove it"


def stat_file(path: Folder) -> tuple[int, int | str]:
    """Return a file's size in bytes and its modification time in nanoseconds, or the ETag of an object in a bucket."""
    if isinstance(path, BucketPath):
        info = path.stat()
        return info.size, info.etag
    try:
        result = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check that it is there and readable") from error
    return result.st_size, result.st_mtime_ns


def stat_folder(path: Folder) -> int | list[tuple[str, int, str]]:
    """Return a folder's modification time; of a folder in a bucket, all its objects, their sizes and ETags."""
    if isinstance(path, BucketPath):
        return [(info.key, info.size, info.etag) for info in path.list().objects]
    return int(stat_file(path)[1])


def read_file_text(path: Folder, max_bytes: int) -> str:
    """Return the text of a file or object, as `read_text` does.

    Raises:
        OSError, UnicodeDecodeError: as `read_text`.
    """
    if not isinstance(path, BucketPath):
        return read_text(path, max_bytes)
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if path.stat().size > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return path.read().tobytes().decode("utf-8")
