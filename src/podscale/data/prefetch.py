"""Prefetching: batches made ahead of time, in parallel, by any maker of batches.

A background thread works through a list of requests, a few batches ahead of the consumer; a pool of threads decodes.
Meanwhile the kernel is asked to read the files of the next batch.
"""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from podscale.data import crop
from podscale.data.bad_images import BadImages
from podscale.data.bucket.fetch import FetchAhead
from podscale.data.bucket.files import BucketFiles
from podscale.data.index.dataset import Index
from podscale.data.staging import Staging
from podscale.processes.host import count_usable_cores

CONCURRENT_BATCHES = 2  # in progress at the same time


@dataclass(frozen=True)
class Batch:
    """Global arrays of a training or evaluation batch.

    Attributes:
        images: uint8 [..., size, size, 3]; or picks, int32 [..., 4], where the images are on the devices (see `picks`).
        labels: int32 [...].
        count: how much is real, over all processes: steps of a training batch, examples of an evaluation batch.
    """

    images: jax.Array
    labels: jax.Array
    count: int


Request_contra = TypeVar("Request_contra", contravariant=True)


class BatchMaker(Protocol[Request_contra]):
    """Makes the batches of a list of requests. A request is a range of steps, or the number of a first example."""

    @property
    def index(self) -> Index: ...
    @property
    def bad_images(self) -> BadImages: ...
    @property
    def device(self) -> jax.Device:
        """One of the devices that the batches are transferred to."""

    def list_samples(self, request: Request_contra, /) -> NDArray[np.int64]:
        """Return the samples that a request needs."""

    def make(self, request: Request_contra, pool: Executor, staging: Staging, /) -> Batch:
        """Make the batch of a request."""


# --- the thread ahead of the consumer ------------------------------------------------------------------------------


class _BatchQueue:
    """A bounded queue that both sides can close.

    It has all that the thread needs, and no reference to the iterator above it, which can thus be garbage-collected.
    """

    def __init__(self, depth: int, pool: ThreadPoolExecutor) -> None:
        self.depth, self.pool = depth, pool
        self.ready: deque[Batch] = deque()
        self.error: BaseException | None = None
        self.is_closed = False  # no more batches will be put
        self.condition = threading.Condition()

    def wait_for_space(self, in_progress: int) -> bool:
        """Wait until fewer than `depth` batches are ready or in progress; return False if no more are needed."""
        with self.condition:
            self.condition.wait_for(lambda: self.is_closed or len(self.ready) + in_progress < self.depth)
            return not self.is_closed

    def put(self, batch: Batch) -> None:
        with self.condition:
            if not self.is_closed:
                self.ready.append(batch)
            self.condition.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """Close the queue because the producer is done or has failed; batches that are ready stay."""
        with self.condition:
            if not self.is_closed:
                self.is_closed, self.error = True, error
            self.condition.notify_all()

    def abandon(self) -> None:
        """Close the queue because the consumer needs no more batches, and drop those that are ready.

        Takes no lock but its own, which is reentrant: a garbage collection may call this at any point of any thread.
        """
        with self.condition:
            self.is_closed, self.error = True, None
            self.ready.clear()
            self.condition.notify_all()

    def get(self) -> Batch | BaseException | None:
        """Return the next batch; at the end what the producer raised, once, or None."""
        with self.condition:
            self.condition.wait_for(lambda: self.is_closed or self.ready)
            if self.ready:
                batch = self.ready.popleft()
                self.condition.notify_all()
                return batch
            error, self.error = self.error, None
            return error


def _produce(queue: _BatchQueue, requests: Sequence[Request_contra], maker: BatchMaker[Request_contra]) -> None:
    """Make batches, two at once: while one's last images are decoded, the next keeps the other threads busy."""
    staging = Staging(maker.device)
    executor = ThreadPoolExecutor(CONCURRENT_BATCHES, "podscale-batch")
    in_progress: deque[Future[Batch]] = deque()
    fetch: FetchAhead | None = None

    def finish_oldest() -> None:
        queue.put(in_progress.popleft().result())
        if fetch is not None:
            fetch.finish_batch()

    try:
        fetch = _fetch_ahead(requests, maker)
        for i, request in enumerate(requests):
            if not queue.wait_for_space(len(in_progress)):
                break
            for later in requests[i + 1 : i + 2] if fetch is None else ():
                queue.pool.submit(crop.read_ahead, maker.index, maker.list_samples(later))
            in_progress.append(executor.submit(maker.make, request, queue.pool, staging))
            if len(in_progress) == CONCURRENT_BATCHES:
                finish_oldest()
        while in_progress:
            finish_oldest()
        queue.finish()
    except BaseException as error:  # of any kind: the consumer raises it
        queue.finish(error)
    finally:
        queue.pool.shutdown(wait=False, cancel_futures=True)  # after an error, the batch beside it is of no use
        executor.shutdown()
        queue.pool.shutdown()
        if fetch is not None:
            fetch.close()
        staging.close()


def _fetch_ahead(requests: Sequence[Request_contra], maker: BatchMaker[Request_contra]) -> FetchAhead | None:
    """Start to fetch the samples of all requests from their bucket; None if they are on disk or in memory."""
    index = maker.index
    if not isinstance(index.files, BucketFiles):
        return None

    def list_batches() -> Iterator[NDArray[np.int64]]:
        for request in requests:
            samples = maker.list_samples(request)
            yield samples if index.cache is None else index.cache.find_missing(samples)

    return FetchAhead(index.files, list_batches, CONCURRENT_BATCHES)


_open_batches: "weakref.WeakSet[Batches]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads before the devices' runtime shuts down."""
    for batches in list(_open_batches):
        batches.close()


class Batches:
    """An iterator over batches made ahead of time; at most `depth` are ready or in progress.

    `close`, the end of a `with` block, exhaustion and garbage collection each end its threads.

    Attributes:
        wait_s: seconds that the consumer has waited, in total.
        bad_images: unreadable images so far.
    """

    def __init__(
        self, requests: Sequence[Request_contra], maker: BatchMaker[Request_contra], threads: int | None, depth: int
    ) -> None:
        self.wait_s = 0.0
        self.bad_images = maker.bad_images
        self._queue = _BatchQueue(depth, ThreadPoolExecutor(threads or count_usable_cores(), "podscale-decode"))
        self._thread = threading.Thread(
            target=_produce, args=(self._queue, requests, maker), name="podscale-loader", daemon=True
        )
        self._finalizer = weakref.finalize(self, self._queue.abandon)
        self._finalizer.atexit = False
        _open_batches.add(self)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        batch = self._queue.get()
        self.wait_s += time.perf_counter() - start
        if isinstance(batch, Batch):
            return batch
        self._thread.join()
        raise StopIteration if batch is None else batch

    def close(self) -> None:
        """End the threads and drop the batches they made."""
        self._queue.abandon()
        self._queue.pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
