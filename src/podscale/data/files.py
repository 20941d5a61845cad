"""Files: the bytes of a table's samples, from loose files or out of containers that stay open.

Nothing read here is trusted: a file that is not as long as the table says, or a range that leaves its container, is
refused in one sentence that says what to do.
"""

import errno
import io
import os
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.data import decode
from podscale.data.index.table import Strings, Table
from podscale.errors import UserError

THREADS = 16  # they mostly wait for the disk
PICTURES_PER_TASK = 256
# What the scan of a data set tells: what is being counted, how many are done, and of how many.
Progress = Callable[[str, int, int], None]


class Files:
    """Reads the samples of a table whose places are below `root`: folders, or containers if `packed`.

    Containers are opened when first needed and closed when this object is gone, so it must outlive the use of the
    descriptors that `sources` gives out.
    """

    def __init__(self, root: str, table: Table, packed: bool) -> None:
        self.root, self.table, self.packed = root, table, packed
        self._opened: dict[int, tuple[int, int]] = {}  # place -> descriptor, bytes of the container
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._opened).atexit = False  # threads may still read when the process ends

    def name(self, sample: int) -> str:
        """The file's path; in a container its path and what the sample is called there, or where it is."""
        place = self._place(int(self.table.files[sample]))
        if len(self.table.names):
            return os.path.join(place, self.table.names[sample])
        return f"{place} at byte {self.table.offsets[sample]}"

    def read(self, sample: int) -> bytes:
        """A sample's bytes."""
        length = int(self.table.lengths[sample])
        if self.packed:
            (descriptor,), offsets, _ = self.sources(np.array([sample]))
            return self._read_range(int(descriptor), int(offsets[0]), length, sample)
        path = self._path(sample)
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found == length:
                    return file.read(length)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; replace or remove it") from error
        raise UserError(
            f"cannot read {path}: it has {found} bytes but had {length} when it was indexed; "
            "put the old file back, or touch its folder to have it indexed again"
        )

    def sources(self, samples: NDArray[np.integer]) -> tuple[list[str | int], NDArray[np.int64], NDArray[np.int64]]:
        """For each sample a path, or the descriptor of an open container, and its bytes there: offsets and lengths."""
        offsets, lengths = self.table.offsets[samples], self.table.lengths[samples]
        if not self.packed:
            return [self._path(sample) for sample in samples.tolist()], offsets, lengths
        opened = [self._container(place) for place in self.table.files[samples].tolist()]
        past = np.flatnonzero(offsets + lengths > np.array([size for _, size in opened], np.int64))
        if len(past):
            raise self._shorter(int(samples[past[0]]))
        return [descriptor for descriptor, _ in opened], offsets, lengths

    def measure(self, progress: Progress | None = None) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Sizes [n, 2] and bytes [n] of all samples, by their headers, in parallel; refuses what is no picture."""
        n = len(self.table)
        sizes, lengths = np.zeros((n, 2), np.int32), np.array(self.table.lengths, np.int64)

        def part(start: int) -> int:
            stop = min(start + PICTURES_PER_TASK, n)
            for sample in range(start, stop):
                sizes[sample], lengths[sample] = self._measure_one(sample)
            return stop - start

        done = 0
        with ThreadPoolExecutor(THREADS, "podscale-header") as pool:
            for count in pool.map(part, range(0, n, PICTURES_PER_TASK)):
                done += count
                if progress is not None:
                    progress("pictures", done, n)
        return sizes, lengths

    def _measure_one(self, sample: int) -> tuple[tuple[int, int], int]:
        name = self.name(sample)
        if self.packed:
            (descriptor,), offsets, lengths = self.sources(np.array([sample]))
            window = _Window(int(descriptor), int(offsets[0]), int(lengths[0]))
            header = decode.read_header(io.BufferedReader(window, 4096), name)
            return (header.width, header.height), int(lengths[0])
        try:
            with open(self._path(sample), "rb") as file:
                header = decode.read_header(file, name)
                return (header.width, header.height), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}; replace or remove it") from error

    def _path(self, sample: int) -> str:
        """A loose file's path. What a stored table calls a file in a folder never leads out of it."""
        place, name = self.table.places[self.table.files[sample]], self.table.names[sample]
        if (place and "/" in name) or "\0" in name:
            raise UserError(f"the index of {self.root} names a file {name!r}; remove the index")
        return os.path.join(self.root, place, name)

    def _place(self, place: int) -> str:
        found = self.table.places[place]
        return os.path.join(self.root, os.path.normpath(found) if found else "")

    def _container(self, place: int) -> tuple[int, int]:
        with self._lock:
            if place not in self._opened:
                descriptor = _open(self._place(place))
                self._opened[place] = descriptor, os.fstat(descriptor).st_size
            return self._opened[place]

    def _read_range(self, descriptor: int, offset: int, length: int, sample: int) -> bytes:
        data = os.pread(descriptor, length, offset)
        while len(data) < length:  # the kernel gives at most 2 GiB at once
            more = os.pread(descriptor, length - len(data), offset + len(data))
            if not more:
                raise self._shorter(sample)
            data += more
        return data

    def _shorter(self, sample: int) -> UserError:
        place = self._place(int(self.table.files[sample]))
        return UserError(f"{place} is shorter than when it was indexed; write it whole and start again")


class _Window(io.RawIOBase):
    """A range of an open file as a file of its own."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise ValueError("a place before the start")
        self._at = origin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._length - self._at), 0)
        data = os.pread(self._descriptor, count, self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def loose(paths: Sequence[str]) -> Files:
    """Files anywhere, of no class, not yet measured."""
    n = len(paths)
    zeros = np.zeros(n, np.int64)
    table = Table(
        np.full(n, -1, np.int32),
        np.zeros((n, 2), np.int32),
        zeros.astype(np.int32),
        zeros,
        zeros,
        Strings.of(paths),
        ("",),
    )
    return Files("", table, packed=False)


def _open(path: str) -> int:
    try:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EMFILE or not _more_descriptors():
                raise
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        hint = "raise `ulimit -n`" if error.errno == errno.EMFILE else "check that it is there and readable"
        raise UserError(f"cannot open {path}: {error.strerror}; {hint}") from error


def _more_descriptors() -> bool:
    """Raises this process's limit on open files as far as it may; a data set of many containers needs one each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


def _close(opened: dict[int, tuple[int, int]]) -> None:
    for descriptor, _ in opened.values():
        os.close(descriptor)
