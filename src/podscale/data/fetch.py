"""Fetch samples from a bucket before the loader needs them: the order of a whole run is known.

A thread walks through the batches to come, as far ahead as the window (`podscale.data.fetch_window`) has space. It asks
for what is neither in memory nor in the disk cache. Neighbouring ranges of an object are asked for at once. How many
requests are in flight adapts (`podscale.data.fetch_workers`): the number doubles when a batch has to wait, as long as
that makes the bytes come faster. Blocks of shards (`podscale.data.fetch_blocks`) go to the disk cache.
"""

import functools
import threading
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from podscale.data.bucket_files import BucketFiles
from podscale.data.fetch_window import Window
from podscale.data.fetch_workers import Counts


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
        self._window.finish_batch(taken)

    def close(self) -> None:
        """End the threads, and drop what was fetched."""
        self._stop.set()
        self._window.wake()
        self._thread.join()
        for taken in self._taken[self._finished :]:
            self._window.release(taken)
        self._window.close()
