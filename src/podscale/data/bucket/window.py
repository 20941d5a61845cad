"""The samples of a bucket that are in memory, or on their way there, because batches need them.

Every sample has one request: it is made by the thread that fetches ahead, or by the first batch that needs the sample
before that thread has come to it, and all others wait for the same answer. Only a sample that takes unusually long is
asked for a second time, and the first answer counts. What was fetched stays in memory until the batches that need it
are made, and until it is written to the disk cache.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.data.bucket.blocks import BlockFetcher
from podscale.data.bucket.disk_cache import DiskCache
from podscale.data.bucket.files import BucketFiles
from podscale.data.bucket.requests import Span, plan_requests
from podscale.data.bucket.workers import MAX_REQUESTS, RequestCounts, RequestPool, Workers, complete
from podscale.errors import UserError

WINDOW_BYTES = 2**28  # fetched or being fetched, and not yet used
HEDGE_THREADS = 8


@dataclass(eq=False)
class _Sample:
    """A sample in the window.

    Attributes:
        data: its bytes, once they are there.
        size: how many bytes of the window it takes.
        users: batches to come that need it, the batches in progress if one of them has asked for it, and the disk
            cache until it is written.
        is_kept: whether the bytes stay here. If not, the first batch that needs them takes them.
    """

    data: "Future[memoryview]"
    size: int
    users: int = 1
    is_kept: bool = True


class Window:
    """The samples of a split that are in memory; used by several threads."""

    def __init__(self, files: BucketFiles, cache: DiskCache | None) -> None:
        self._files, self._cache, self._pool = files, cache, RequestPool()
        self._changed = self._pool.changed
        self._blocks = None if cache is None else BlockFetcher(files, cache, self._pool)
        self._samples: dict[int, _Sample] = {}
        self._bytes = 0
        self._finished = 0  # batches
        self._urgent: deque[tuple[int, int]] = deque()  # sample, and how many batches are finished when it is released
        self._hedges, self._writer = Workers(HEDGE_THREADS, "podscale-hedge"), Workers(1, "podscale-disk-cache")
        self._users, self._in_progress = 0, 1

    @property
    def counts(self) -> RequestCounts:
        return self._pool.counts

    @classmethod
    def open(cls, files: BucketFiles, in_progress: int) -> "Window":
        """Return the window of some files, a new one if they have none.

        Args:
            files: of the split.
            in_progress: how many batches are made at the same time.
        """
        with _opening:
            if files.window is None:
                files.window = cls(files, files.open_cache())
            window: Window = files.window
            window._users, window._in_progress = window._users + 1, max(window._in_progress, in_progress)
            return window

    def close(self) -> None:
        """End the threads once nobody uses the window any more."""
        with _opening:
            self._users -= 1
            if self._users:
                return
            self._files.window = None
        self._pool.close()
        self._hedges.close()
        self._writer.close()
        self._writer.join()

    # --- for the decoder ---

    def locate(
        self, samples: list[int], lengths: NDArray[np.int64]
    ) -> tuple[list[Any], NDArray[np.int64], NDArray[np.int64]]:
        """Return where each sample's bytes are: in memory, or in a file of the disk cache."""
        numbers = np.array(samples, np.int64)
        sources: list[Any] = [None] * len(samples)
        offsets = np.zeros(len(samples), np.int64)
        is_missing = np.ones(len(samples), bool)
        if self._cache is not None and self._blocks is not None:
            is_missing, descriptors, offsets = self._cache.find_all(numbers)
            if is_missing.any():
                self._cache.load_new()
                is_missing, descriptors, offsets = self._cache.find_all(numbers)
            if is_missing.any() and self._blocks.wait_for(numbers[is_missing]):
                is_missing, descriptors, offsets = self._cache.find_all(numbers)
            sources = descriptors.tolist()
        missing = np.flatnonzero(is_missing).tolist()
        for i, entry in zip(missing, self._ask_now([samples[i] for i in missing]), strict=True):
            if isinstance(entry, tuple):
                sources[i], offsets[i] = entry
            else:
                sources[i], offsets[i] = self._wait_for(samples[i], entry), 0
        return sources, offsets, lengths

    def _ask_now(self, samples: list[int]) -> "list[_Sample | tuple[int, int]]":
        """Ask for samples that nobody has asked for, without waiting for space or for a turn.

        They stay until the batches in progress are finished, so that the thread ahead does not ask for them again; if
        there is no space, only the fact that they were asked for stays.

        Returns:
            Each sample's entry, or where it is in the disk cache, to which it may just have been written.
        """
        entries: list[_Sample | tuple[int, int]] = []
        new: list[int] = []
        with self._changed:
            for sample in samples:
                entry = self._samples.get(sample)
                where = None if entry is not None or self._cache is None else self._cache.find(sample)
                if where is not None:
                    entries.append(where)
                    continue
                if entry is None:
                    entry = self._insert(sample, is_kept=self._bytes < WINDOW_BYTES)
                    self._urgent.append((sample, self._finished + self._in_progress))
                    new.append(sample)
                elif entry.data.cancelled():  # taken by another batch, or given up by the thread ahead
                    entry.data = Future()
                    new.append(sample)
                entries.append(entry)
            for span in self._plan(new):
                self._submit(span)
        return entries

    def _wait_for(self, sample: int, entry: _Sample) -> memoryview:
        data = entry.data
        if not data.done():
            self._pool.grow()
            wait([data], timeout=self._pool.patience)
        if data.cancelled() or not data.done():
            self.counts.hedged += 1
            second: Future[memoryview] = Future()
            where = self._files.locate_range(sample)
            self._hedges.submit(lambda: complete(second, lambda: self._files.fetch_range(where)))
            done, _ = wait([second] if data.cancelled() else [data, second], return_when=FIRST_COMPLETED)
            first = next((future for future in done if future.exception() is None), None)
            return (first or (second if data.cancelled() else data)).result()
        if not entry.is_kept:
            entry.data = Future()
            entry.data.cancel()
        return data.result()

    # --- for the thread ahead ---

    def look_ahead(self, batches: Iterable[NDArray[np.int64]]) -> None:
        """Decide which blocks to fetch whole, by the samples of the next batches; it needs a disk cache."""
        if self._blocks is not None:
            self._blocks.look_ahead(batches)

    def add(self, samples: Sequence[int], is_over: Callable[[], bool]) -> list[int]:
        """Ask for samples as soon as there is space, unless it is over; return those to call `release` with.

        A sample that the disk cache should have is not asked for; `locate` reads and verifies it.
        """
        numbers = np.asarray(samples, np.int64)
        if self._cache is not None and self._blocks is not None:
            numbers = numbers[~self._cache.has(numbers)]
            if len(numbers):
                self._cache.load_new()
                numbers = self._blocks.add(numbers[~self._cache.has(numbers)], is_over)
        needed, taken = numbers.tolist(), list[int]()
        for start in range(0, len(needed), MAX_REQUESTS):
            new = self._enter(needed[start : start + MAX_REQUESTS], taken, is_over)
            spans = deque(self._plan(new))
            while spans and self._pool.wait_for_turn(is_over):
                self._submit(spans.popleft())
            self._give_up(spans)
            if is_over():
                break
        return taken

    def _enter(self, samples: list[int], taken: list[int], is_over: Callable[[], bool]) -> list[int]:
        """Enter samples into the window, when there is space for them, and append them to `taken`.

        Returns:
            Those that nobody has asked for; none if it is over.
        """
        lengths, new, cache = self._files.table.lengths, list[int](), self._cache
        with self._changed:
            size = sum(int(lengths[sample]) for sample in samples if sample not in self._samples)
            self._changed.wait_for(lambda: is_over() or not self._bytes or self._bytes + size <= WINDOW_BYTES)
            for sample in [] if is_over() else samples:
                if sample in self._samples:
                    self._samples[sample].users += 1
                elif cache is not None and cache.has(np.array([sample]))[0]:
                    continue  # it has just been written there
                else:
                    self._insert(sample)
                    new.append(sample)
                taken.append(sample)
        return new

    def _give_up(self, spans: Iterable[Span]) -> None:
        """Do not make some requests, unless others have started to wait for their samples."""
        for span in spans:
            with self._changed:
                entries = [self._samples[sample] for sample in span.samples]
                is_needed = any(entry.users > 1 for entry in entries)
                for entry in () if is_needed else entries:
                    entry.data.cancel()
            if is_needed:
                self._submit(span)

    def release(self, samples: Iterable[int]) -> None:
        """Forget samples whose batch is made."""
        with self._changed:
            for sample in samples:
                entry = self._samples[sample]
                entry.users -= 1
                if not entry.users:
                    del self._samples[sample]
                    self._bytes -= entry.size
            self._changed.notify_all()

    def finish_batch(self, samples: Iterable[int]) -> None:
        """Forget samples whose batch is made, and those that batches before it have asked for themselves."""
        with self._changed:
            self._finished += 1
            self.release(samples)
            while self._urgent and self._urgent[0][1] <= self._finished:
                self.release([self._urgent.popleft()[0]])

    def wake(self) -> None:
        """Wake the prefetching thread, so that it checks whether it is over."""
        self._pool.wake()

    # --- requests ---

    def _insert(self, sample: int, is_kept: bool = True) -> _Sample:
        size = int(self._files.table.lengths[sample]) if is_kept else 0
        entry = self._samples[sample] = _Sample(Future(), size, is_kept=is_kept)
        self._bytes += size
        return entry

    def _plan(self, samples: list[int]) -> list[Span]:
        """Return the requests for samples that were entered; if there can be none, who waits for them learns why."""
        try:
            return plan_requests(self._files, samples)
        except UserError as error:
            for sample in samples:
                self._samples[sample].data.set_exception(error)
            return []

    def _submit(self, span: Span) -> None:
        with self._changed:
            entries = [self._samples[sample] for sample in span.samples]
        self._pool.submit(span.where.stop - span.where.start, functools.partial(self._fetch, span, entries))

    def _fetch(self, span: Span, entries: list[_Sample]) -> None:
        """Carry out a request."""
        futures = [entry.data for entry in entries]
        try:
            data = self._files.fetch_range(span.where)
            for sample, entry, future, (first, last) in zip(span.samples, entries, futures, span.bounds, strict=True):
                part = data[first:last] if len(entries) == 1 else memoryview(bytes(data[first:last]))
                self._write(sample, entry, part)
                future.set_result(part)
        except BaseException as error:  # of any kind: who waits for the samples raises it
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    def _write(self, sample: int, entry: _Sample, data: memoryview) -> None:
        """Have a sample written to the disk cache, if it has space; until then the sample stays in the window."""
        cache = self._cache
        if cache is None or not cache.reserve(sample, len(data)):
            return
        with self._changed:
            is_here = self._samples.get(sample) is entry
            entry.users += is_here

        def write() -> None:
            cache.write(sample, data)
            if is_here:
                self.release([sample])

        self._writer.submit(write)


_opening = threading.Lock()
