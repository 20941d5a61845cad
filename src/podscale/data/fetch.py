"""Fetch samples from a bucket before the loader needs them: the order of a whole run is known.

A thread walks through the batches to come, as far ahead as `WINDOW_BYTES` allow, and asks for what is neither in memory
nor in the disk cache. Neighbouring ranges of an object are asked for at once. How many requests are in flight adapts:
the number doubles when a batch has to wait, as long as that makes the bytes come faster. What a batch has fetched stays
in memory until the batch is made. A sample that is waited for unusually long is asked for a second time, and the first
answer counts.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.data.bucket_files import BucketFiles, ByteRange
from podscale.data.disk_cache import DiskCache
from podscale.storage.cloud import merge_ranges

WINDOW_BYTES = 2**28  # fetched or being fetched, and not yet used
MIN_REQUESTS, MAX_REQUESTS = 16, 128  # in flight
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
        self._changed = threading.Condition()
        self._bytes, self._in_flight, self._limit = 0, 0, MIN_REQUESTS
        self._pace = _Pace()
        self._workers, self._hedges = (
            _Workers(MAX_REQUESTS, "podscale-fetch"),
            _Workers(HEDGE_THREADS, "podscale-hedge"),
        )
        self._writer = _Workers(1, "podscale-disk-cache")
        self._users = 0
        self.counts = Counts()

    # --- for the decoder ---

    def locate(
        self, samples: list[int], lengths: NDArray[np.int64]
    ) -> tuple[list[Any], NDArray[np.int64], NDArray[np.int64]]:
        """Return where each sample's bytes are: in memory, or in a file of the disk cache."""
        sources: list[Any] = [None] * len(samples)
        offsets = np.zeros(len(samples), np.int64)
        missing = []
        for i, sample in enumerate(samples):
            entry = self._samples.get(sample)
            place = self._cache.find(sample) if entry is None and self._cache is not None else None
            if place is not None:
                sources[i], offsets[i] = place
            elif entry is not None:
                sources[i] = self._wait_for(sample, entry)
            else:
                missing.append(i)
        if missing:
            for i, data in zip(missing, self._files.fetch_all([samples[i] for i in missing]), strict=True):
                sources[i] = data
        return sources, offsets, lengths

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
        self._hedges.submit(
            lambda: _complete(second, lambda: self._files.fetch_range(self._files.locate_range(sample)))
        )
        done, _ = wait([entry.data, second], return_when=FIRST_COMPLETED)
        first = next((future for future in done if future.exception() is None), None)
        return (first or entry.data).result()

    # --- for the thread ahead ---

    def add(self, samples: Sequence[int], is_over: Callable[[], bool]) -> list[int]:
        """Ask for samples as soon as there is space, unless it is over; return those to call `release` with.

        A sample in the disk cache is not asked for.
        """
        wanted = [sample for sample in samples if self._cache is None or self._cache.find(sample) is None]
        taken: list[int] = []
        for start in range(0, len(wanted), MAX_REQUESTS):
            part = wanted[start : start + MAX_REQUESTS]
            new = self._enter(part, is_over)
            if new is None:
                break
            taken += part
            for span in plan_requests(self._files, new):
                if not self._wait_for_turn(is_over):
                    break  # a batch that needs one of the others after all asks for it again
                self._workers.submit(functools.partial(self._fetch, span))
        return taken

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
            if is_over():
                return False
            self._in_flight += 1
            return True

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

    def _fetch(self, span: "Span") -> None:
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
            with self._changed:
                self._in_flight -= 1
                self.counts.requests += 1
                self.counts.bytes += span.where.stop - span.where.start
                self._pace.add(time.monotonic() - start, span.where.stop - span.where.start)
                self._changed.notify_all()

    def _grow(self) -> None:
        """Allow more requests in flight because a batch has to wait; fewer again if that did not help."""
        with self._changed:
            self._limit = self._pace.choose_limit(self._limit)
            self._changed.notify_all()


_opening = threading.Lock()


class _Workers:
    """Daemon threads that run functions, made as they are needed: one that waits for a store must not delay the end."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle, self._lock = 0, threading.Lock()

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        with self._lock:
            if self._idle or len(self._threads) == self._most:
                return
            self._threads.append(threading.Thread(target=self._work, name=self._name, daemon=True))
            self._threads[-1].start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            task = self._tasks.get()
            with self._lock:
                self._idle -= 1
            if task is None:
                return
            task()

    def close(self) -> None:
        """End the threads after what was submitted."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()


def _complete(future: "Future[memoryview]", work: Callable[[], memoryview]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # of any kind: who waits raises it
        future.set_exception(error)


@dataclass
class _Pace:
    """How fast bytes come: what decides how many requests are in flight."""

    usual_wait: float = 0.0  # seconds of a request, smoothed
    bytes: int = 0
    since: float = field(default_factory=time.monotonic)
    best: float = 0.0  # bytes per second under the limit before

    def add(self, seconds: float, count: int) -> None:
        self.usual_wait = seconds if not self.usual_wait else 0.9 * self.usual_wait + 0.1 * seconds
        self.bytes += count

    def choose_limit(self, limit: int) -> int:
        """Return the next limit: twice the present one if the last increase made bytes come faster by a tenth."""
        elapsed = time.monotonic() - self.since
        if elapsed < max(4 * self.usual_wait, 0.1) or not self.bytes:
            return limit
        rate, self.bytes, self.since = self.bytes / elapsed, 0, time.monotonic()
        if rate < 1.1 * self.best:
            self.best = max(self.best * 0.95, rate)
            return limit
        self.best = rate
        return min(2 * limit, MAX_REQUESTS)


# --- which ranges to ask for -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """One request: a range of an object, the samples in it, and the bounds of each within the range."""

    where: ByteRange
    samples: list[int]
    bounds: list[tuple[int, int]]


def plan_requests(files: BucketFiles, samples: Iterable[int]) -> list[Span]:
    """Return the requests that fetch some samples, in the order in which the samples are needed."""
    by_object: dict[tuple[str, str], list[tuple[int, ByteRange]]] = {}
    for sample in samples:
        where = files.locate_range(sample)
        by_object.setdefault((where.key, where.etag), []).append((sample, where))
    spans = []
    for (key, etag), wanted in by_object.items():
        ranges = [(where.start, where.stop) for _, where in wanted]
        for start, stop, members in merge_ranges(ranges):
            bounds = [(ranges[i][0] - start, ranges[i][1] - start) for i in members]
            spans.append(Span(ByteRange(key, etag, start, stop), [wanted[i][0] for i in members], bounds))
    return spans


# --- ahead of a loader -----------------------------------------------------------------------------------------------


class FetchAhead:
    """Fetches the samples of a sequence of batches; `finish_batch` after each batch, `close` at the end."""

    def __init__(self, files: BucketFiles, batches: Iterable[NDArray[np.int64]]) -> None:
        self._window, self._batches = Window.open(files), batches
        self._taken: list[list[int]] = []  # by batch
        self._finished, self._lock, self._stop = 0, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="podscale-ahead", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counts:
        return self._window.counts

    def _run(self) -> None:
        for number, samples in enumerate(self._batches):
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
