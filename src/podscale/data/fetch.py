"""Fetch samples from a bucket before the loader needs them: the order of a whole run is known.

A thread walks through the batches to come, as far ahead as `WINDOW_BYTES` allow, and asks for what is neither in memory
nor in the disk cache. Neighbouring ranges of an object are asked for at once. How many requests are in flight adapts:
the number doubles when a batch has to wait, as long as that makes the bytes come faster. What a batch has fetched stays
in memory until the batch is made. A sample that is waited for unusually long is asked for a second time, and the first
answer counts. Blocks of shards (`podscale.data.requests`) go to the disk cache, and batches read them there.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.data.bucket_files import BucketFiles
from podscale.data.disk_cache import DiskCache
from podscale.data.fetch_workers import MAX_REQUESTS, MIN_REQUESTS, Pace, Workers, complete
from podscale.data.requests import HORIZON_BYTES, Blocks, Span, find_blocks, plan_requests

WINDOW_BYTES = 2**28  # fetched or being fetched, and not yet used
HEDGE_S, HEDGE_FACTOR = 1.0, 8.0  # a second request after this long, or after so many times the usual wait
HEDGE_THREADS = 8


@dataclass(eq=False)
class _Sample:
    """A sample in the window: its bytes, once they are there, and the number of batches that need it."""

    data: "Future[memoryview]"
    size: int
    users: int = 1


@dataclass
class Counts:
    """What was fetched: requests, bytes, and second requests for samples that were slow to come."""

    requests: int = 0
    bytes: int = 0
    hedged: int = 0


class Window:
    """The samples of a split that are in memory because batches to come need them; used by several threads."""

    def __init__(self, files: BucketFiles, cache: DiskCache | None) -> None:
        self._files, self._cache = files, cache
        self._samples: dict[int, _Sample] = {}
        self._blocks: Blocks | None = None
        self._block_futures: dict[int, Future[None]] = {}  # of blocks that were asked for
        self._changed = threading.Condition()
        self._bytes, self._in_flight, self._limit = 0, 0, MIN_REQUESTS
        self._pace = Pace()
        self._workers, self._hedges = (
            Workers(MAX_REQUESTS, "podscale-fetch"),
            Workers(HEDGE_THREADS, "podscale-hedge"),
        )
        self._writer = Workers(1, "podscale-disk-cache")
        self._users = 0
        self.counts = Counts()

    # --- for the decoder ---

    def locate(
        self, samples: list[int], lengths: NDArray[np.int64]
    ) -> tuple[list[Any], NDArray[np.int64], NDArray[np.int64]]:
        """Return where each sample's bytes are: in memory, or in a file of the disk cache."""
        numbers = np.array(samples, np.int64)
        sources: list[Any] = [None] * len(samples)
        offsets = np.zeros(len(samples), np.int64)
        is_missing = np.ones(len(samples), bool)
        if self._cache is not None:
            is_missing, descriptors, offsets = self._cache.find_all(numbers)
            if is_missing.any() and self._wait_for_blocks(numbers[is_missing]):
                is_missing, descriptors, offsets = self._cache.find_all(numbers)
            sources = descriptors.tolist()
        absent = []
        for i in np.flatnonzero(is_missing).tolist():
            entry = self._samples.get(samples[i])
            if entry is None:
                absent.append(i)
            else:
                sources[i] = self._wait_for(samples[i], entry)
        if absent:
            with self._changed:
                self.counts.requests += len(absent)
                self.counts.bytes += sum(int(lengths[i]) for i in absent)
            for i, data in zip(absent, self._files.fetch_all([samples[i] for i in absent]), strict=True):
                sources[i] = data
        return sources, offsets, lengths

    def _wait_for_blocks(self, samples: NDArray[np.int64]) -> bool:
        """Wait for blocks that hold some samples, unless that takes unusually long; return whether there are any."""
        blocks = [] if self._blocks is None else np.unique(self._blocks.numbers[samples]).tolist()
        blocks = [block for block in blocks if block >= 0]
        for block in blocks:
            future = self._ask_for_block(block)
            if not future.done():
                self._grow()
                patience = max(HEDGE_S, HEDGE_FACTOR * self._pace.usual_wait)
                if not wait([future], timeout=patience).done:
                    self.counts.hedged += 1
                    continue
            future.result()
        return bool(blocks)

    def _wait_for(self, sample: int, entry: _Sample) -> memoryview:
        if entry.data.done():
            return entry.data.result()
        self._grow()
        patience = max(HEDGE_S, HEDGE_FACTOR * self._pace.usual_wait)
        done, _ = wait([entry.data], timeout=patience)
        if done:
            return entry.data.result()
        self.counts.hedged += 1
        second: Future[memoryview] = Future()
        self._hedges.submit(lambda: complete(second, lambda: self._files.fetch_range(self._files.locate_range(sample))))
        done, _ = wait([entry.data, second], return_when=FIRST_COMPLETED)
        first = next((future for future in done if future.exception() is None), None)
        return (first or entry.data).result()

    # --- for the thread ahead ---

    def add(self, samples: Sequence[int], is_over: Callable[[], bool]) -> list[int]:
        """Ask for samples as soon as there is space, unless it is over; return those to call `release` with.

        A sample in the disk cache is not asked for.
        """
        numbers = np.asarray(samples, np.int64)
        if self._cache is not None:
            numbers = numbers[self._cache.find_all(numbers)[0]]
        if self._blocks is not None:
            numbers = self._add_blocks(self._blocks, numbers, is_over)
        wanted, taken = numbers.tolist(), list[int]()
        for start in range(0, len(wanted), MAX_REQUESTS):
            part = wanted[start : start + MAX_REQUESTS]
            new = self._enter(part, is_over)
            if new is None:
                break
            taken += part
            for span in plan_requests(self._files, new):
                if not self._wait_for_turn(is_over):
                    break  # a batch that needs one of the others after all asks for it again
                with self._changed:
                    self._in_flight += 1
                self._workers.submit(functools.partial(self._fetch, span))
        return taken

    def look_ahead(self, batches: Iterable[NDArray[np.int64]]) -> None:
        """Decide which blocks to fetch whole, by the samples of the next batches; it needs a disk cache."""
        if self._cache is None or self._blocks is not None:
            return
        is_needed, size = np.zeros(len(self._files.table), bool), 0
        for samples in batches:
            new = np.unique(samples)
            new = new[~is_needed[new]]
            new = new[self._cache.find_all(new)[0]]
            is_needed[new] = True
            size += int(self._files.table.lengths[new].sum())
            if size > HORIZON_BYTES:
                break
        if self._cache.has_space(size):
            self._blocks = find_blocks(self._files, np.flatnonzero(is_needed))

    def _add_blocks(self, blocks: Blocks, samples: NDArray[np.int64], is_over: Callable[[], bool]) -> NDArray[np.int64]:
        """Ask for blocks; return samples that are in none, or in one that the cache had no space for."""
        dropped = []
        for block in np.unique(blocks.numbers[samples]).tolist():
            future = self._block_futures.get(block)
            if future is not None and future.done():
                dropped.append(block)
            elif future is None and block >= 0 and self._wait_for_turn(is_over):
                self._ask_for_block(block)
        return samples[np.isin(blocks.numbers[samples], [-1, *dropped])]

    def _ask_for_block(self, block: int) -> "Future[None]":
        """Return the future of a block, which is asked for unless it was before."""
        with self._changed:
            future = self._block_futures.get(block)
            if future is None:
                future = self._block_futures[block] = Future()
                self._in_flight += 1
                self._workers.submit(functools.partial(self._fetch_block, block))
        return future

    def _enter(self, samples: list[int], is_over: Callable[[], bool]) -> list[int] | None:
        """Enter samples into the window, when there is space for them; return the new ones; None if it is over."""
        lengths = self._files.table.lengths
        with self._changed:
            size = sum(int(lengths[sample]) for sample in samples if sample not in self._samples)
            self._changed.wait_for(lambda: is_over() or not self._bytes or self._bytes + size <= WINDOW_BYTES)
            if is_over():
                return None
            new = []
            for sample in samples:
                if sample in self._samples:
                    self._samples[sample].users += 1
                else:
                    self._samples[sample] = _Sample(Future(), int(lengths[sample]))
                    self._bytes += int(lengths[sample])
                    new.append(sample)
            return new

    def _wait_for_turn(self, is_over: Callable[[], bool]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: is_over() or self._in_flight < self._limit)
            return not is_over()

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

    def wake(self) -> None:
        """Let the thread ahead look again whether it is over."""
        with self._changed:
            self._changed.notify_all()

    @classmethod
    def open(cls, files: BucketFiles) -> "Window":
        """Return the window of some files, a new one if they have none."""
        with _opening:
            if files.window is None:
                files.window = cls(files, files.open_cache())
            window: Window = files.window
            window._users += 1
            return window

    def close(self) -> None:
        """End the threads once nobody uses the window any more."""
        with _opening:
            self._users -= 1
            if self._users:
                return
            self._files.window = None
        self._workers.close()
        self._hedges.close()
        self._writer.close()
        self._writer.join()

    # --- in the pool ---

    def _fetch(self, span: Span) -> None:
        start = time.monotonic()
        entries = [(sample, self._samples.get(sample)) for sample in span.samples]
        try:
            data = self._files.fetch_range(span.where)
            for (sample, entry), (first, last) in zip(entries, span.bounds, strict=True):
                part = data[first:last] if len(entries) == 1 else memoryview(bytes(data[first:last]))
                if entry is not None:
                    entry.data.set_result(part)
                if self._cache is not None and self._cache.reserve(sample, len(part)):
                    self._writer.submit(functools.partial(self._cache.write, sample, part))
        except BaseException as error:  # of any kind: who waits for the samples raises it
            for _, entry in entries:
                if entry is not None and not entry.data.done():
                    entry.data.set_exception(error)
        finally:
            self._finish_request(span, time.monotonic() - start)

    def _fetch_block(self, block: int) -> None:
        """Fetch a block into the disk cache; if that is full, its samples are fetched when they are needed."""
        blocks, cache = self._blocks, self._cache
        assert blocks is not None
        assert cache is not None
        start, span = time.monotonic(), blocks.make_span(self._files, block)

        def fetch() -> None:
            cache.write_block(span.samples, self._files.fetch_range(span.where), span.bounds)

        complete(self._block_futures[block], fetch)
        self._finish_request(span, time.monotonic() - start)

    def _finish_request(self, span: Span, seconds: float) -> None:
        with self._changed:
            size = span.where.stop - span.where.start
            self._in_flight -= 1
            self.counts.requests += 1
            self.counts.bytes += size
            self._pace.add(seconds, size)
            self._changed.notify_all()

    def _grow(self) -> None:
        """Allow more requests in flight because a batch has to wait; fewer again if that did not help."""
        with self._changed:
            self._limit = self._pace.choose_limit(self._limit)
            self._changed.notify_all()


_opening = threading.Lock()


# --- ahead of a loader -----------------------------------------------------------------------------------------------


class FetchAhead:
    """Fetches the samples of a sequence of batches; `finish_batch` after each batch, `close` at the end.

    Args:
        files: of the split.
        list_batches: returns the samples of each batch; called twice.
    """

    def __init__(self, files: BucketFiles, list_batches: Callable[[], Iterable[NDArray[np.int64]]]) -> None:
        self._window, self._list_batches = Window.open(files), list_batches
        self._taken: list[list[int]] = []  # by batch
        self._window.look_ahead(list_batches())
        self._finished, self._lock, self._stop = 0, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="podscale-ahead", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counts:
        return self._window.counts

    def _run(self) -> None:
        for number, samples in enumerate(self._list_batches()):
            if self._stop.is_set():
                return
            taken = self._window.add(np.unique(samples).tolist(), functools.partial(self._is_over, number))
            with self._lock:
                is_late = self._is_over(number)
                self._taken.append([] if is_late else taken)
            if is_late:
                self._window.release(taken)

    def _is_over(self, number: int) -> bool:
        return self._stop.is_set() or number < self._finished

    def finish_batch(self) -> None:
        """Release what the oldest batch has fetched."""
        with self._lock:
            self._finished += 1
            is_there = self._finished <= len(self._taken)
            taken = self._taken[self._finished - 1] if is_there else []
            if is_there:
                self._taken[self._finished - 1] = []
        self._window.release(taken)

    def close(self) -> None:
        """End the threads, and drop what was fetched."""
        self._stop.set()
        self._window.wake()
        self._thread.join()
        for taken in self._taken[self._finished :]:
            self._window.release(taken)
        self._window.close()
