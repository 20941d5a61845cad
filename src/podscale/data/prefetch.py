"""Batches made ahead of time, in parallel, by whatever makes one from a job.

A background thread works through a list of jobs, a few batches ahead of the consumer; a pool of threads decodes. The
kernel is told of the files of the batch after, so that it reads them meanwhile.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, Self

import jax
import numpy as np
from numpy.typing import NDArray

from podscale.data import crop
from podscale.data.bad_images import BadPictures
from podscale.data.index.dataset import Index
from podscale.data.staging import Staging

AT_ONCE = 2  # batches in the making


@dataclass(frozen=True)
class Batch:
    """Global arrays: `images` uint8 [..., size, size, 3] and `labels` int32 [...].

    Where the pictures live on the devices, `images` are picks of them, int32 [..., 4] (see `resident`).
    `count` is how much of it is real: steps of a training batch, examples of an evaluation batch, over all processes.
    """

    images: jax.Array
    labels: jax.Array
    count: int


class Maker(Protocol):
    """What makes the batches of a list of jobs."""

    @property
    def index(self) -> Index: ...
    @property
    def bad(self) -> BadPictures: ...
    @property
    def device(self) -> Any:
        """One of those that the batches go to."""

    def ahead(self, job: Any, /) -> NDArray[np.int64]:
        """The samples that a job needs."""

    def make(self, job: Any, pool: Executor, staging: Staging, /) -> Batch: ...


# --- the thread ahead of the consumer ------------------------------------------------------------------------------


class _Feed:
    """A bounded queue that both sides can end. Holds what the thread needs, and never the iterator above it."""

    def __init__(self, depth: int, pool: ThreadPoolExecutor) -> None:
        self.depth, self.pool = depth, pool
        self.ready: deque[Batch] = deque()
        self.error: BaseException | None = None
        self.ended = False  # nothing more will be put
        self.changed = threading.Condition()

    def await_room(self, making: int) -> bool:
        """Waits until fewer than `depth` batches are ready or in the making; False where nobody wants more."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or len(self.ready) + making < self.depth)
            return not self.ended

    def put(self, batch: Batch) -> None:
        with self.changed:
            if not self.ended:
                self.ready.append(batch)
            self.changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """The producer is done, or has failed; what is ready stays."""
        with self.changed:
            if not self.ended:
                self.ended, self.error = True, error
            self.changed.notify_all()

    def abandon(self) -> None:
        """The consumer wants no more. Takes no lock but its own, which is reentrant: a garbage collection may come
        here in the middle of anything, in any thread."""
        with self.changed:
            self.ended, self.error = True, None
            self.ready.clear()
            self.changed.notify_all()

    def get(self) -> Batch | BaseException | None:
        """The next batch; at the end what the producer raised, once, or None."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or self.ready)
            if self.ready:
                batch = self.ready.popleft()
                self.changed.notify_all()
                return batch
            error, self.error = self.error, None
            return error


def _produce(feed: _Feed, jobs: Sequence[Any], maker: Maker) -> None:
    """Makes batches, two at once: while the last pictures of one are decoded, the next keeps the other threads busy."""
    staging = Staging(maker.device)
    makers = ThreadPoolExecutor(AT_ONCE, "podscale-batch")
    making: deque[Future[Batch]] = deque()
    try:
        for i, job in enumerate(jobs):
            if not feed.await_room(len(making)):
                break
            for later in jobs[i + 1 : i + 2]:
                feed.pool.submit(crop.advise, maker.index, maker.ahead(later))
            making.append(makers.submit(maker.make, job, feed.pool, staging))
            if len(making) == AT_ONCE:
                feed.put(making.popleft().result())
        while making:
            feed.put(making.popleft().result())
        feed.end()
    except BaseException as error:  # whatever it is, it belongs to the consumer
        feed.end(error)
    finally:
        feed.pool.shutdown(wait=False, cancel_futures=True)  # after an error, the batch beside it has no use
        makers.shutdown()
        feed.pool.shutdown()
        staging.close()


_running: "weakref.WeakSet[Batches]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends the threads before the devices' runtime goes away under them."""
    for batches in list(_running):
        batches.close()


class Batches:
    """An iterator over batches made ahead of time; at most `depth` are ready or in the making.

    `close`, the end of a `with` block, exhaustion and garbage collection each end its threads.
    """

    def __init__(self, jobs: Sequence[Any], maker: Maker, threads: int | None, depth: int) -> None:
        self.wait_s = 0.0  # seconds the consumer has waited, in all
        self.bad = maker.bad
        self._feed = _Feed(depth, ThreadPoolExecutor(threads or cpus(), "podscale-decode"))
        self._thread = threading.Thread(
            target=_produce, args=(self._feed, jobs, maker), name="podscale-loader", daemon=True
        )
        self._finalizer = weakref.finalize(self, self._feed.abandon)
        self._finalizer.atexit = False
        _running.add(self)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        batch = self._feed.get()
        self.wait_s += time.perf_counter() - began
        if isinstance(batch, Batch):
            return batch
        self._thread.join()
        raise StopIteration if batch is None else batch

    def close(self) -> None:
        """Ends the threads and drops what they made."""
        self._feed.abandon()
        self._feed.pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cpus() -> int:
    """The CPUs this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
