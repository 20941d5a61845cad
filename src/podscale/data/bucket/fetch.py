"""Fetch samples from a bucket before the loader needs them: the order of a whole run is known.

A thread walks through the batches to come, as far ahead as the window (`podscale.data.bucket.window`) has space, and at
most `AHEAD_SAMPLES` or `AHEAD_BATCHES`. It asks for what is neither in memory nor in the disk cache. Neighbouring
ranges of an object are asked for at once. How many requests are in flight adapts (`podscale.data.bucket.workers`): the
number doubles when a batch has to wait, as long as that makes the bytes come faster. Blocks of shards
(`podscale.data.bucket.blocks`) go to the disk cache.
"""

import functools
import threading
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from podscale.data.bucket.files import BucketFiles
from podscale.data.bucket.window import Window
from podscale.data.bucket.workers import RequestCounts

# Looked at before they are needed, at least a batch: all of a long run that is cached would take minutes.
AHEAD_SAMPLES, AHEAD_BATCHES = 2**16, 2**8


class FetchAhead:
    """Fetches the samples of a sequence of batches; `finish_batch` after each batch, `close` at the end.

    Args:
        files: of the split.
        list_batches: returns the samples of each batch; called twice.
        in_progress: how many batches are made at the same time.
    """

    def __init__(
        self, files: BucketFiles, list_batches: Callable[[], Iterable[NDArray[np.int64]]], in_progress: int = 1
    ) -> None:
        self._window, self._list_batches = Window.open(files, in_progress), list_batches
        self._taken: list[list[int]] = []  # by batch
        self._ends = [0]  # samples up to the end of each batch
        self._window.look_ahead(list_batches())
        self._finished, self._changed, self._stop = 0, threading.Condition(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="podscale-ahead", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> RequestCounts:
        return self._window.counts

    def _run(self) -> None:
        for number, samples in enumerate(self._list_batches()):
            with self._changed:
                self._changed.wait_for(functools.partial(self._has_space, number, len(samples)))
            if self._stop.is_set():
                return
            taken = self._window.add(np.unique(samples).tolist(), functools.partial(self._is_over, number))
            with self._changed:
                is_late = self._is_over(number)
                self._taken.append([] if is_late else taken)
                self._ends.append(self._ends[-1] + len(samples))
            if is_late:
                self._window.release(taken)

    def _has_space(self, number: int, count: int) -> bool:
        """Return whether to look at a batch of so many samples, or nobody waits for it any more."""
        if number <= self._finished or self._stop.is_set():
            return True
        if number >= self._finished + AHEAD_BATCHES:
            return False
        return self._ends[number] - self._ends[self._finished] + count <= AHEAD_SAMPLES

    def _is_over(self, number: int) -> bool:
        return self._stop.is_set() or number < self._finished

    def finish_batch(self) -> None:
        """Release what the oldest batch has fetched."""
        with self._changed:
            self._finished += 1
            self._changed.notify_all()
            is_there = self._finished <= len(self._taken)
            taken = self._taken[self._finished - 1] if is_there else []
            if is_there:
                self._taken[self._finished - 1] = []
        self._window.finish_batch(taken)

    def close(self) -> None:
        """End the threads, and drop what was fetched."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        self._window.wake()
        self._thread.join()
        for taken in self._taken[self._finished :]:
            self._window.release(taken)
        self._window.close()
