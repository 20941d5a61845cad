"""Loader: from positions of the global batch to arrays on the devices, ahead of time and in parallel.

A background thread works through a list of jobs, a few batches ahead of the consumer; a pool of threads decodes. Each
process makes only the blocks of its own devices. Which sample a block holds follows from the positions that its devices
own (see `order`), so any split over hosts and devices yields the same global batch.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, Self

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from podscale.data import decode, randaugment
from podscale.data.index import Index
from podscale.data.order import Order, crop_boxes, eval_boxes
from podscale.plan import Plan
from podscale.recipe import Recipe


@dataclass(frozen=True)
class Batch:
    """Global arrays: `images` uint8 [..., size, size, 3] and `labels` int32 [...].

    `count` is how much of it is real: steps of a training batch, examples of an evaluation batch, over all processes.
    """

    images: jax.Array
    labels: jax.Array
    count: int


def train_batches(
    index: Index,
    plan: Plan,
    ranges: Sequence[range],
    sharding: NamedSharding,
    *,
    threads: int | None = None,
    depth: int = 2,
) -> "Batches":
    """One batch for each range of absolute steps: images [steps_per_call, micro_batches, batch / micro_batches, ...].

    `sharding` cuts axis 2 alone; the plan says which positions each device owns. Steps past a range's end are zeros.
    """
    recipe = plan.recipe
    order = Order(len(index), recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    shards = _Shards(sharding, plan.batch_shape, axis=2)
    positions = np.stack([plan.positions(start // plan.micro_images) for start in shards.starts])
    return Batches(ranges, _TrainJob(index, recipe, order, shards, positions), threads, depth)


def eval_batches(
    index: Index,
    recipe: Recipe,
    sharding: NamedSharding,
    images_per_device: int,
    *,
    threads: int | None = None,
    depth: int = 2,
) -> "Batches":
    """Every example of an index once, in order: images [E, ...] with E = images_per_device * devices.

    `sharding` cuts axis 0 alone. Example e*E + d*images_per_device + i is image i of device d in batch e; the last
    batch is padded with zeros whose label is -1.
    """
    devices = _cuts(sharding, axis=0)
    total = devices * images_per_device
    shards = _Shards(sharding, (total,), axis=0)
    offsets = np.array(shards.starts)[:, None] + np.arange(images_per_device)  # [blocks, images]
    jobs = range(0, len(index), total)
    return Batches(jobs, _EvalJob(index, recipe, shards, offsets), threads, depth)


def eval_pictures(
    index: Index, samples: Sequence[int], recipe: Recipe, pool: Executor | None = None
) -> NDArray[np.uint8]:
    """Pictures as evaluation sees them: uint8 [n, size, size, 3]."""
    chosen, size = np.asarray(samples, np.int64), recipe.data.image_size
    out = np.empty((len(chosen), size, size, 3), np.uint8)
    boxes = eval_boxes(recipe.data.eval_fraction, index.sizes[chosen])
    decode.crop_batch(index, chosen, boxes, np.zeros(len(chosen), bool), size, out, pool)
    return out


# --- blocks and devices --------------------------------------------------------------------------------------------


def _cuts(sharding: NamedSharding, axis: int) -> int:
    """Into how many pieces a sharding cuts an axis."""
    names = sharding.spec[axis] if axis < len(sharding.spec) else None
    names = (names,) if isinstance(names, str) else names or ()
    return int(np.prod([sharding.mesh.shape[name] for name in names], dtype=int))


class _Shards:
    """The blocks of a global array, cut along one axis, that this process has devices for."""

    def __init__(self, sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> None:
        self.sharding, self.shape = sharding, shape
        if sharding.shard_shape(shape) != (*shape[:axis], shape[axis] // _cuts(sharding, axis), *shape[axis + 1 :]):
            raise ValueError(f"{sharding.spec} must cut axis {axis} alone")
        self.extent = shape[axis] // _cuts(sharding, axis)
        places = sharding.addressable_devices_indices_map(shape)
        first = {device: place[axis].start or 0 for device, place in places.items() if place is not None}
        self.starts = sorted(set(first.values()))
        self.devices = [(device, self.starts.index(start)) for device, start in first.items()]

    def assemble(self, blocks: NDArray[Any]) -> jax.Array:
        """The global array made of blocks[k] at starts[k]. The blocks are given away: they must not change again."""
        shape = self.shape + blocks.shape[1 + len(self.shape) :]
        pieces = [jax.device_put(blocks[k], device) for device, k in self.devices]
        return jax.make_array_from_single_device_arrays(shape, self.sharding, pieces)


@dataclass(frozen=True)
class _TrainJob:
    index: Index
    recipe: Recipe
    order: Order
    shards: _Shards
    positions: NDArray[np.int64]  # [blocks, micro-batches, images]

    def __call__(self, steps: range, pool: Executor) -> Batch:
        at = np.array(steps)[:, None, None]
        samples, passes = self.order.at(at, self.positions[:, None])  # [blocks, steps, micro-batches, images]
        size = self.recipe.data.image_size
        images = np.empty((*samples.shape, size, size, 3), np.uint8)
        self._fill(samples.ravel(), passes.ravel(), images.reshape(-1, size, size, 3), pool)
        labels = self.index.labels[samples]
        missing = self.shards.shape[0] - len(steps)
        return Batch(
            self.shards.assemble(_with_zeros(images, missing)),
            self.shards.assemble(_with_zeros(labels, missing)),
            len(steps),
        )

    def _fill(self, samples: NDArray[np.int64], passes: NDArray[np.int64], out: NDArray, pool: Executor) -> None:
        data, augment, seed = self.recipe.data, self.recipe.augment, self.recipe.train.seed
        sizes = self.index.sizes[samples]
        boxes, flips = crop_boxes(augment, seed, passes, samples, sizes, data.image_size, fraction=data.eval_fraction)
        decode.crop_batch(self.index, samples, boxes, flips, data.image_size, out, pool)
        randaugment.apply_batch(out, augment.randaugment, augment.magnitude, seed, passes, samples, pool)


def _with_zeros(blocks: NDArray, missing: int) -> NDArray:
    """`blocks` with so many steps of zeros after the last, on axis 1."""
    if not missing:
        return blocks
    return np.concatenate([blocks, np.zeros((len(blocks), missing, *blocks.shape[2:]), blocks.dtype)], axis=1)


@dataclass(frozen=True)
class _EvalJob:
    index: Index
    recipe: Recipe
    shards: _Shards
    offsets: NDArray[np.int64]  # [blocks, images]

    def __call__(self, first: int, pool: Executor) -> Batch:
        data = self.recipe.data
        examples = first + self.offsets.ravel()
        real = np.flatnonzero(examples < len(self.index))
        samples = examples[real]
        labels = np.full(examples.shape, -1, np.int32)
        labels[real] = self.index.labels[samples]
        images = np.zeros((len(examples), data.image_size, data.image_size, 3), np.uint8)
        # Blocks are in ascending order, so the real examples come first.
        boxes = eval_boxes(data.eval_fraction, self.index.sizes[samples])
        flips = np.zeros(len(samples), bool)
        decode.crop_batch(self.index, samples, boxes, flips, data.image_size, images[: len(samples)], pool)
        blocks = images.reshape(*self.offsets.shape, *images.shape[1:])
        count = min(self.shards.shape[0], len(self.index) - first)
        return Batch(self.shards.assemble(blocks), self.shards.assemble(labels.reshape(self.offsets.shape)), count)


class Maker(Protocol):
    """What makes the batches of a list of jobs."""

    @property
    def index(self) -> Index: ...
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

    def await_room(self) -> bool:
        """Waits until fewer than `depth` batches are ready; False where the consumer wants no more."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or len(self.ready) < self.depth)
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


def _produce(feed: _Feed, jobs: Sequence[Any], make: Callable[[Any, Executor], Batch]) -> None:
    try:
        for job in jobs:
            if not feed.await_room():
                break
            feed.put(make(job, feed.pool))
        feed.end()
    except BaseException as error:  # whatever it is, it belongs to the consumer
        feed.end(error)
    finally:
        feed.pool.shutdown()


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

    def __init__(
        self, jobs: Sequence[Any], make: Callable[[Any, Executor], Batch], threads: int | None, depth: int
    ) -> None:
        self.wait_s = 0.0  # seconds the consumer has waited, in all
        self._feed = _Feed(depth, ThreadPoolExecutor(threads or _cpus(), "podscale-decode"))
        self._thread = threading.Thread(
            target=_produce, args=(self._feed, jobs, make), name="podscale-loader", daemon=True
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


def _cpus() -> int:
    """The CPUs this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
