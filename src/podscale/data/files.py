"""Read the bytes of a table's samples, from loose files or from containers that stay open.

Nothing read here is trusted: a file whose length differs from the table, or a range that exceeds its container, raises
a one-sentence `UserError` that says what to do.
"""

import errno
import io
import os
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from podscale.data import decode
from podscale.data.index.table import Strings, Table
from podscale.data.limits import MAX_IMAGE_BYTES
from podscale.errors import StorageError, UserError
from podscale.storage.files import open_descriptor, open_regular
from podscale.storage.range_file import RangeFile

THREADS = 16  # they mostly wait for the disk
IMAGES_PER_TASK = 256
# Called during a scan of a data set with (unit that is counted, number done, total number).
Progress = Callable[[str, int, int], None]


class Files:
    """Reader of the samples of a table whose paths are below `root`: class folders, or container files if `packed`.

    Containers are opened on first use and closed when this object is garbage collected, so it must outlive the use of
    the descriptors that `locate_bytes` returns.
    """

    def __init__(self, root: str, table: Table, packed: bool, max_image_bytes: int = MAX_IMAGE_BYTES) -> None:
        self.root, self.table, self.packed = root, table, packed
        self.max_image_bytes = max_image_bytes  # memory that decoding one image may take
        self._containers: dict[int, tuple[int, int]] = {}  # index in table.paths -> descriptor, size in bytes
        self._lock = threading.Lock()
        # Not at exit: threads may still read when the process ends.
        weakref.finalize(self, _close_containers, self._containers).atexit = False

    threads = THREADS  # that read headers

    def select(self, samples: NDArray[np.integer]) -> "Files":
        """Return a reader of these samples, numbered from 0."""
        return self.with_table(self.table.select(samples))

    def with_table(self, table: Table) -> "Files":
        """Return a reader of other samples of the same data set."""
        return Files(self.root, table, self.packed, self.max_image_bytes)

    def name(self, sample: int) -> str:
        """Return the file's path; in a container, its path and the sample's name there, or its offset."""
        path = self._join_root(int(self.table.files[sample]))
        if len(self.table.names):
            return os.path.join(path, self.table.names[sample])
        return f"{path} at byte {self.table.offsets[sample]}"

    def read(self, sample: int) -> bytes:
        """Return a sample's encoded bytes."""
        length = int(self.table.lengths[sample])
        if self.packed:
            (descriptor,), offsets, _ = self.locate_bytes(np.array([sample]))
            return self._read_range(int(descriptor), int(offsets[0]), length, sample)
        path = self._get_file_path(sample)
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size == length:
                    return file.read(length)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; replace or remove it") from error
        raise UserError(
            f"cannot read {path}: it has {size} bytes but had {length} when it was indexed; "
            "restore the old file, or run `touch` on its folder to rebuild the index"
        )

    def locate_bytes(
        self, samples: NDArray[np.integer]
    ) -> tuple[list[str | int], NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's source (a path, or the descriptor of an open container), its offset and its length."""
        offsets, lengths = self.table.offsets[samples], self.table.lengths[samples]
        if not self.packed:
            return [self._get_file_path(sample) for sample in samples.tolist()], offsets, lengths
        containers = [self._open(number) for number in self.table.files[samples].tolist()]
        out_of_bounds = np.flatnonzero(offsets + lengths > np.array([size for _, size in containers], np.int64))
        if len(out_of_bounds):
            raise self._make_truncation_error(int(samples[out_of_bounds[0]]))
        return [descriptor for descriptor, _ in containers], offsets, lengths

    def measure(
        self, progress: Progress | None = None, *, tolerant: bool = False
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Read all image headers in parallel.

        Args:
            progress: called with how many are done.
            tolerant: an image whose header cannot be read has size 0 x 0.

        Returns:
            Width and height of each sample, int32 [n, 2], and its encoded bytes, int64 [n].

        Raises:
            UserError: a sample is not an image, unless tolerant; or a container cannot be read.
        """
        n = len(self.table)
        sizes, lengths = np.zeros((n, 2), np.int32), np.array(self.table.lengths, np.int64)

        def measure_range(start: int) -> int:
            stop = min(start + IMAGES_PER_TASK, n)
            for sample in range(start, stop):
                self._check_container(sample)
                try:
                    sizes[sample], lengths[sample] = self.measure_one(sample)
                except UserError as error:
                    if not tolerant or isinstance(error, StorageError):
                        raise
                    lengths[sample] = lengths[sample] if self.packed else self._measure_length(sample)
            return stop - start

        done = 0
        with ThreadPoolExecutor(self.threads, "podscale-header") as pool:
            for count in pool.map(measure_range, range(0, n, IMAGES_PER_TASK)):
                done += count
                if progress is not None:
                    progress("images", done, n)
        return sizes, lengths

    def measure_one(self, sample: int) -> tuple[tuple[int, int], int]:
        """Return width and height of a sample, by its header, and its encoded bytes.

        Raises:
            UserError: it cannot be read, or is not an image.
        """
        name = self.name(sample)
        if self.packed:
            (descriptor,), offsets, lengths = self.locate_bytes(np.array([sample]))
            window = RangeFile(lambda at, count: os.pread(int(descriptor), count, at), int(offsets[0]), int(lengths[0]))
            header = decode.read_header(io.BufferedReader(window, 4096), name, self.max_image_bytes)
            return (header.width, header.height), int(lengths[0])
        try:
            with open_regular(self._get_file_path(sample)) as file:
                header = decode.read_header(file, name, self.max_image_bytes)
                return (header.width, header.height), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}; replace or remove it") from error

    def _check_container(self, sample: int) -> None:
        """Refuse a sample whose container cannot be read, which is never tolerated."""
        if self.packed:
            self.locate_bytes(np.array([sample]))

    def _measure_length(self, sample: int) -> int:
        try:
            return os.stat(self._get_file_path(sample)).st_size
        except OSError:
            return 0

    def _get_file_path(self, sample: int) -> str:
        """Return a loose file's path. A name in a stored table must not lead out of its folder."""
        folder, name = self.table.paths[self.table.files[sample]], self.table.names[sample]
        if (folder and "/" in name) or "\0" in name:
            raise UserError(f"the index of {self.root} names a file {name!r}; remove the index")
        return os.path.join(self.root, folder, name)

    def _join_root(self, number: int) -> str:
        path = self.table.paths[number]
        return os.path.join(self.root, os.path.normpath(path) if path else "")

    def _open(self, number: int) -> tuple[int, int]:
        with self._lock:
            if number not in self._containers:
                descriptor = _open_container(self._join_root(number))
                self._containers[number] = descriptor, os.fstat(descriptor).st_size
            return self._containers[number]

    def _read_range(self, descriptor: int, offset: int, length: int, sample: int) -> bytes:
        data = os.pread(descriptor, length, offset)
        while len(data) < length:  # the kernel returns at most 2 GiB per call
            more = os.pread(descriptor, length - len(data), offset + len(data))
            if not more:
                raise self._make_truncation_error(sample)
            data += more
        return data

    def _make_truncation_error(self, sample: int) -> UserError:
        path = self._join_root(int(self.table.files[sample]))
        return UserError(f"{path} is shorter than when it was indexed; write it whole and start again")


def open_loose_files(paths: Sequence[str], max_image_bytes: int = MAX_IMAGE_BYTES) -> Files:
    """Return files at any paths, without labels, not yet measured."""
    n = len(paths)
    zeros = np.zeros(n, np.int64)
    table = Table(
        np.full(n, -1, np.int32),
        np.zeros((n, 2), np.int32),
        zeros.astype(np.int32),
        zeros,
        zeros,
        Strings.from_names(paths),
        ("",),
    )
    return Files("", table, packed=False, max_image_bytes=max_image_bytes)


def _open_container(path: str) -> int:
    try:
        try:
            return open_descriptor(path)
        except OSError as error:
            if error.errno != errno.EMFILE or not _raise_descriptor_limit():
                raise
            return open_descriptor(path)
    except OSError as error:
        hint = "raise `ulimit -n`" if error.errno == errno.EMFILE else "check that it is there and readable"
        raise UserError(f"cannot open {path}: {error.strerror}; {hint}") from error


def _raise_descriptor_limit() -> bool:
    """Raise this process's limit on open files to its maximum: each container of a data set needs a descriptor.

    Returns:
        Whether the limit could be raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


def _close_containers(containers: dict[int, tuple[int, int]]) -> None:
    for descriptor, _ in containers.values():
        os.close(descriptor)
