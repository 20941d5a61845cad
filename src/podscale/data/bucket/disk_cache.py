"""Cache on local disk of samples from a bucket, shared by the processes of a host and kept over restarts.

It is in the user's cache folder, in a folder per state of a data set, named by its URL and ETags. A process appends
what it fetches to a file of its own (`SPLIT-TOKEN.pack`) and then an entry to another (`SPLIT-TOKEN.entries`); it reads
the files of all, and looks for new entries before it fetches anything. An entry is used only if its bytes are all there
and their XXH3 is right, which is checked once per process, when a batch needs it, so a killed process or a damaged disk
costs a request and never a pixel.

All data sets together take at most half of the disk space that would be free without them, or $PODSCALE_DISK_CACHE_GIB
(0: no cache). Folders of other data sets that no process uses are removed first, the oldest first. Within a data set
nothing is evicted: a pass visits each sample once, so an evicted sample would be needed as soon as any that stayed.
"""

import fcntl
import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.errors import UserError
from podscale.storage.files import open_descriptor
from podscale.storage.user_cache import get_user_cache, make_private_folder

LIMIT_VARIABLE = "PODSCALE_DISK_CACHE_GIB"
FREE_SHARE = 0.5
MAX_QUEUED_BYTES = 2**26  # that wait to be written; while the disk is slower than the bucket, some are not cached
BYTES_PER_CHECK = 2**26  # written between two measurements of the space that all processes take
WRITE_BYTES = 2**18  # of one call: larger ones took up to ten times the CPU time on ext4
ENTRY = np.dtype([("sample", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("digest", "<u8"), ("check", "<u4")])


class DiskCache:
    """The cached samples of one split.

    Args:
        folder: of the data set.
        split: its name.
        numbers: of each sample in the whole split: a part of it has the same cache.
        lengths: bytes of each sample.
        limit: bytes that all data sets together may take.
    """

    def __init__(
        self, folder: Path, split: str, numbers: NDArray[np.int64], lengths: NDArray[np.int64], limit: int
    ) -> None:
        self._folder, self._split, self._limit = folder, split, limit
        self._numbers, self._lengths = numbers, lengths
        make_private_folder(folder, check_parents=False)
        self._descriptors: list[int] = []
        # Not at exit: threads may still read when the process ends.
        weakref.finalize(self, _close_all, self._descriptors).atexit = False
        self._descriptors.append(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        _remove_unusable(folder, self._descriptors[0])
        fcntl.flock(self._descriptors[0], fcntl.LOCK_SH)  # in use: not to be removed
        os.utime(folder)
        self._packs: list[int] = []  # descriptors
        n = len(lengths)
        self._pack, self._offsets = np.full(n, -1, np.int32), np.zeros(n, np.int64)
        self._digests, self._is_verified = np.zeros(n, np.uint64), np.zeros(n, bool)
        self._order = np.argsort(numbers, kind="stable")
        self._files: dict[str, tuple[int, int]] = {}  # by file of entries: its pack, and how many bytes were read
        self._own: _PackWriter | None = None
        self._used = _measure_used(folder.parent)
        self._is_full = False
        self._queued_bytes, self._lock, self._loading = 0, threading.Lock(), threading.Lock()
        self.load_new()

    def load_new(self) -> None:
        """Load the entries that other processes have added since the last call."""
        with self._loading:
            for path in sorted(self._folder.glob(f"{self._split}-*.entries")):
                if self._own is None or path.name != self._own.name:
                    with suppress(OSError):
                        self._load(path)

    def has(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which samples have an entry; nothing is read, so `find` may still find one damaged."""
        return self._pack[samples] >= 0

    def find_all(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Return which samples are not cached, and of the others descriptors and offsets, as `find` does."""
        for sample in samples[(self._pack[samples] >= 0) & ~self._is_verified[samples]].tolist():
            self.find(sample)
        with self._lock:
            packs = np.where(self._is_verified[samples], self._pack[samples], -1)
            descriptors = np.array([*self._packs, -1], np.int64)[packs]  # the last one where there is no pack
            return packs < 0, descriptors, self._offsets[samples]

    def find(self, sample: int) -> tuple[int, int] | None:
        """Return the descriptor of the file that holds a sample, and its offset there; None if it is not cached."""
        with self._lock:
            if self._pack[sample] < 0:
                return None
            descriptor, offset = self._packs[self._pack[sample]], int(self._offsets[sample])
            if self._is_verified[sample]:
                return descriptor, offset
        try:
            data = os.pread(descriptor, int(self._lengths[sample]), offset)
        except OSError:
            data = b""
        is_intact = len(data) == self._lengths[sample] and compute_digest(data) == self._digests[sample]
        with self._lock:
            if not self._is_verified[sample]:  # else another thread has just written it
                self._is_verified[sample] = is_intact
                if not is_intact:
                    self._pack[sample] = -1
        return (descriptor, offset) if is_intact else None

    def count(self) -> int:
        """Return the number of cached samples."""
        return int((self._pack >= 0).sum())

    def reserve(self, sample: int, size: int) -> bool:
        """Return whether to write a sample by calling `write`; False while too many bytes wait to be written."""
        with self._lock:
            if self._is_full or self._pack[sample] >= 0 or self._queued_bytes + size > MAX_QUEUED_BYTES:
                return False
            self._queued_bytes += size
            return True

    def write(self, sample: int, data: memoryview) -> None:
        """Write a sample that `reserve` was called for; one thread at a time. A full disk ends the caching, no more."""
        try:
            self._write(sample, data)
        except OSError:
            self._is_full = True
        with self._lock:
            self._queued_bytes -= len(data)

    def has_space(self, size: int) -> bool:
        """Return whether so many bytes more may be written."""
        unchecked = 0 if self._own is None else self._own.unchecked
        return not self._is_full and self._used + unchecked + size <= self._limit

    def write_block(self, samples: list[int], data: memoryview, bounds: list[tuple[int, int]]) -> None:
        """Write neighbouring samples at once, with what lies between them; by any thread.

        Args:
            samples: those in the block.
            data: the block.
            bounds: of each sample within it.
        """
        try:
            self._append(np.array(samples, np.int64), data, bounds)
        except OSError:
            self._is_full = True

    def _write(self, sample: int, data: memoryview) -> None:
        if self._pack[sample] < 0:
            self._append(np.array([sample]), data, [(0, len(data))])

    def _append(self, samples: NDArray[np.int64], data: memoryview, bounds: list[tuple[int, int]]) -> None:
        with self._lock:
            pack = self._take_space(len(data))
        if pack is None:
            return
        writer, start = pack
        digests = [compute_digest(data[first:last]) for first, last in bounds]
        offsets = start + np.array([first for first, _ in bounds], np.int64)
        writer.write(start, data, self._numbers[samples], offsets, self._lengths[samples], digests)
        with self._lock:
            self._offsets[samples], self._digests[samples] = offsets, np.array(digests, np.uint64)
            self._is_verified[samples] = True
            self._pack[samples] = self._packs.index(writer.descriptor)

    def _take_space(self, size: int) -> "tuple[_PackWriter, int] | None":
        """Return the pack to write to and the offset there; None if the cache is full."""
        if self._own is None:
            self._own = _PackWriter(self._folder, self._split)
            self._packs.append(self._own.descriptor)
            self._descriptors += [self._own.descriptor, self._own.entries]
        if self._own.unchecked > BYTES_PER_CHECK:
            self._used, self._own.unchecked = _measure_used(self._folder.parent), 0
        if not self.has_space(size):
            self._is_full = True
            return None
        return self._own, self._own.take(size)

    def _load(self, path: Path) -> None:
        """Load the entries of a file that were not loaded yet, are whole and lie within its pack."""
        pack, start = self._files.get(path.name, (-1, 0))
        if path.stat().st_size - start < ENTRY.itemsize:
            return
        entries, stop = _read_entries(path, start)
        if pack < 0:
            descriptor = open_descriptor(path.with_suffix(".pack"))
            self._descriptors.append(descriptor)
            with self._lock:
                pack = len(self._packs)
                self._packs.append(descriptor)
        self._files[path.name] = pack, stop
        at = np.minimum(np.searchsorted(self._numbers, entries["sample"], sorter=self._order), len(self._order) - 1)
        samples = self._order[at]
        is_whole = (self._numbers[samples] == entries["sample"]) & (entries["length"] == self._lengths[samples])
        ends = entries["offset"] + entries["length"]
        is_whole &= (entries["offset"] >= 0) & (ends <= os.fstat(self._packs[pack]).st_size)
        with self._lock:
            is_new = is_whole & (self._pack[samples] < 0)
            samples, entries = samples[is_new], entries[is_new]
            self._offsets[samples], self._digests[samples] = entries["offset"], entries["digest"]
            self._pack[samples] = pack


class _PackWriter:
    """The pack that this process appends to."""

    def __init__(self, folder: Path, split: str) -> None:
        path = folder / f"{split}-{uuid.uuid4().hex}.pack"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.name = path.with_suffix(".entries").name  # of the file of entries
        self.descriptor = os.open(path, flags, 0o600)
        self.entries = os.open(path.with_suffix(".entries"), flags | os.O_APPEND, 0o600)
        self._end = self.unchecked = 0

    def take(self, size: int) -> int:
        """Return the offset of space for so many bytes."""
        offset = self._end
        self._end += size
        self.unchecked += size
        return offset

    def write(
        self,
        start: int,
        data: memoryview,
        numbers: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        digests: list[int],
    ) -> None:
        """Write bytes, then the entries of the samples in them."""
        at = 0
        while at < len(data):
            at += os.pwrite(self.descriptor, data[at : at + WRITE_BYTES], start + at)
        entries = np.zeros(len(numbers), ENTRY)
        entries["sample"], entries["offset"], entries["length"], entries["digest"] = numbers, offsets, lengths, digests
        entries["check"] = _compute_check(entries)
        os.write(self.entries, entries.tobytes())


def compute_digest(data: bytes | memoryview) -> int:
    """Return the XXH3 of some bytes, which takes a twentieth of the time of zlib's CRC-32.

    >>> f"{compute_digest(b''):x}"
    '2d06800538d394c2'
    """
    import xxhash

    return xxhash.xxh3_64_intdigest(data)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read_entries(path: Path, start: int = 0) -> tuple[NDArray[Any], int]:
    """Return the whole entries of a file from an offset on, and where they end."""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    size = len(content) // ENTRY.itemsize * ENTRY.itemsize
    entries = np.frombuffer(content[:size], ENTRY)
    return entries[entries["check"] == _compute_check(entries)], start + size


def _remove_unusable(folder: Path, lock: int) -> None:
    """Remove packs without a whole entry, such as those of an earlier version, unless a process uses the folder.

    Args:
        folder: of a data set.
        lock: descriptor of its lock, which is not held.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    for path in folder.glob("*.pack"):
        with suppress(OSError):
            entries = path.with_suffix(".entries")
            if not entries.exists() or not len(_read_entries(entries)[0]):
                path.unlink()
                entries.unlink(missing_ok=True)


def _compute_check(entries: NDArray[Any]) -> NDArray[np.uint32]:
    """Return a checksum per entry, which a truncated or overwritten entry does not match."""
    mixed = np.zeros(len(entries), np.uint64)
    for name in ("sample", "offset", "length", "digest"):
        mixed = (mixed ^ entries[name].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def open_disk_cache(
    fingerprint: str, split: str, numbers: NDArray[np.int64], lengths: NDArray[np.int64]
) -> DiskCache | None:
    """Return the cache of a split of a data set; None where there is to be none, or can be none.

    Args:
        fingerprint: of the data set's state.
        split: its name.
        numbers: of the samples in the whole split.
        lengths: bytes of each sample.

    Raises:
        UserError: $PODSCALE_DISK_CACHE_GIB is no number.
    """
    base = get_user_cache("data")
    folder = base / fingerprint[:32]
    try:
        make_private_folder(base, check_parents=False)
        limit = _choose_limit(base)
        if not limit:
            return None
        others = _sum_sizes(path for path in folder.glob("*.pack") if not path.name.startswith(f"{split}-"))
        _remove_unused(base, folder.name, limit - int(lengths.sum()) - others)
        return DiskCache(folder, split, numbers, lengths, limit)
    except OSError:  # no disk to write to
        return None


def explain_missing_cache() -> str:
    """Return why fetched samples cannot be kept on disk; empty if they can, or are not to be.

    Raises:
        UserError: $PODSCALE_DISK_CACHE_GIB is no number.
    """
    base = get_user_cache("data")
    try:
        make_private_folder(base, check_parents=False)
        is_full = not _choose_limit(base) and not os.environ.get(LIMIT_VARIABLE)
    except OSError as error:
        return str(error) if error.strerror is None else f"cannot write {base}: {error.strerror}"
    return f"the disk of {base} is full" if is_full else ""


def _choose_limit(base: Path) -> int:
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return int(FREE_SHARE * (shutil.disk_usage(base).free + _measure_used(base)))
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < 2**30:
        raise UserError(f"{LIMIT_VARIABLE} is {text}; it must be a number of GiB, or 0 for no cache")
    return int(limit * 2**30)


def _measure_used(base: Path) -> int:
    """Return the bytes that the packs of all data sets take."""
    return _sum_sizes(base.glob("*/*.pack"))


def _sum_sizes(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_size
    return total


def _remove_unused(base: Path, keep: str, target: int) -> None:
    """Remove other data sets that no process uses, the oldest first, until they take no more than `target` bytes."""
    folders = [path for path in base.iterdir() if path.name != keep and (path / "lock").is_file()]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime):
        if _measure_used(base) - _sum_sizes((base / keep).glob("*.pack")) <= target:
            return
        with (folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
