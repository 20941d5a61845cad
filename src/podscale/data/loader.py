"""Loader: from positions of the global batch to arrays on the devices.

Each process makes only the blocks of its own devices, from its own lanes, whose images it may cache in memory. The
positions that a device owns determine the samples of its block (see `order`), so any split over hosts and devices
yields the same global batch.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from podscale.data import crop, picks, randaugment
from podscale.data.bad_images import UNREADABLE, BadImages
from podscale.data.balance import SampleOrder, make_order
from podscale.data.blocks import LocalBlocks, make_eval_blocks
from podscale.data.index.dataset import Index
from podscale.data.order import compute_crop_boxes, compute_eval_boxes, map_steps_to_batches
from podscale.data.prefetch import Batch, Batches
from podscale.data.staging import Staging
from podscale.parallel.inputs import HOST_FED, PICK_NUMBERS, Input
from podscale.plan import Plan
from podscale.recipe import Recipe, find_train_size

SAMPLES_AT_ONCE = 2**20  # of a process, listed at once


def load_train_batches(
    index: Index,
    plan: Plan,
    ranges: Sequence[range],
    sharding: NamedSharding,
    *,
    skip: Sequence[range] = (),
    threads: int | None = None,
    depth: int = 2,
) -> Batches:
    """Return an iterator over training batches, one for each range of steps.

    Args:
        index: the training split.
        plan: says which positions of the global batch each device owns.
        ranges: absolute steps of each batch, at most `plan.steps_per_call`; missing steps at the end are zeros.
        sharding: partitions axis 2 alone.
        skip: batches that no step takes.
        threads: decoding threads; None: one per CPU.
        depth: batches that are ready or in progress at the same time.

    Returns:
        Batches with images [steps_per_call, micro_batches, batch / micro_batches, ...].
    """
    recipe = plan.recipe
    order = make_order(recipe, index.labels)
    blocks = LocalBlocks(sharding, plan.batch_shape, axis=2)
    bad_images = BadImages(index, recipe.data.lanes, recipe.data.bad_share)
    maker = _TrainMaker(index, recipe, order, skip, blocks, _compute_positions(plan, blocks), bad_images, plan.input)
    return Batches(ranges, maker, threads, depth)


def load_eval_batches(
    index: Index,
    recipe: Recipe,
    sharding: NamedSharding,
    images_per_device: int,
    *,
    threads: int | None = None,
    depth: int = 2,
) -> Batches:
    """Return an iterator over batches that contain every example of an index once, in order.

    Args:
        index: the split to evaluate.
        recipe: says how images are cropped.
        sharding: partitions axis 0 alone.
        images_per_device: images of a batch on each device.
        threads: decoding threads; None: one per CPU.
        depth: batches that are ready or in progress at the same time.

    Returns:
        Batches with images [E, ...], where E = images_per_device * devices. Example e*E + d*images_per_device + i is
        image i of device d in batch e. The last batch is padded with zeros whose label is -1; an image that cannot be
        read is zeros, too, with the label UNREADABLE.
    """
    blocks = make_eval_blocks(sharding, images_per_device)
    offsets = np.array(blocks.starts)[:, None] + np.arange(images_per_device)  # [blocks, images]
    first_examples = range(0, len(index), blocks.shape[0])
    bad_images = BadImages(index, recipe.data.lanes, recipe.data.bad_share)
    return Batches(first_examples, _EvalMaker(index, recipe, blocks, offsets, bad_images), threads, depth)


def iterate_train_samples(
    plan: Plan, sharding: NamedSharding, at_once: int = SAMPLES_AT_ONCE
) -> Iterator[NDArray[np.int64]]:
    """Yield all samples that this process ever trains on, in order and in parts: those of the lanes it reads.

    An array of all of them would be large, and slow to write for the first time.
    """
    lanes, count = plan.recipe.data.lanes, plan.counts.train
    positions = _compute_positions(plan, LocalBlocks(sharding, plan.batch_shape, axis=2))
    local_lanes = np.unique(positions // (plan.recipe.batch.size // lanes))
    stride = max(1, at_once // len(local_lanes)) * lanes
    for start in range(0, count, stride):
        rounds = np.arange(start, min(start + stride, count), lanes)  # one sample of every lane each, in order
        samples = (rounds[:, None] + local_lanes).ravel()
        yield samples[: np.searchsorted(samples, count)]


def list_eval_samples(count: int, sharding: NamedSharding, images_per_device: int) -> NDArray[np.int64]:
    """Return those of `count` examples that this process evaluates."""
    blocks = make_eval_blocks(sharding, images_per_device)
    offsets = np.array(blocks.starts)[:, None] + np.arange(images_per_device)
    samples = np.arange(count)
    return samples[np.isin(samples % blocks.shape[0], offsets)]


def load_eval_images(
    index: Index, samples: Sequence[int], recipe: Recipe, pool: Executor | None = None
) -> NDArray[np.uint8]:
    """Return images as evaluation sees them: uint8 [n, size, size, 3].

    Works for any sample of the index, also for those that another process caches.
    """
    index = replace(index, cache=None)
    ids, size = np.asarray(samples, np.int64), recipe.data.image_size
    out = np.empty((len(ids), size, size, 3), np.uint8)
    boxes = compute_eval_boxes(recipe.data.eval_fraction, index.sizes[ids])
    crop.crop_batch(index, ids, boxes, np.zeros(len(ids), bool), out, pool)
    return out


def load_train_images(
    index: Index, recipe: Recipe, step: int, positions: Sequence[int], sharding: NamedSharding
) -> Batch:
    """Return what training sees at these positions of a step's batch: images [1, 1, n, ...] on `sharding`'s device."""
    order = make_order(recipe, index.labels)
    blocks = LocalBlocks(sharding, (1, 1, len(positions)), axis=2)
    bad_images = BadImages(index, recipe.data.lanes, recipe.data.bad_share)
    maker = _TrainMaker(index, recipe, order, (), blocks, np.array(positions, np.int64)[None, None], bad_images)
    with Batches([range(step, step + 1)], maker, threads=None, depth=1) as batches:
        return next(batches)


# --- makers of batches ----------------------------------------------------------------------------------------------


def _compute_positions(plan: Plan, blocks: LocalBlocks) -> NDArray[np.int64]:
    """Return the positions of the global batch that this process fills: [blocks, micro-batches, images]."""
    return np.stack([plan.positions(start // plan.micro_images) for start in blocks.starts])


@dataclass(frozen=True)
class _TrainMaker:
    index: Index
    recipe: Recipe
    order: SampleOrder
    skip: Sequence[range]
    blocks: LocalBlocks
    positions: NDArray[np.int64]  # [blocks, micro-batches, images]
    bad_images: BadImages
    input: Input = HOST_FED

    @property
    def device(self) -> jax.Device:
        return self.blocks.devices[0][0]

    def get_samples(self, steps: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return samples and lane passes [blocks, steps, micro-batches, images]."""
        batches = map_steps_to_batches(np.array(steps), self.skip)
        return self.order.get_samples(batches[:, None, None], self.positions[:, None])

    def list_samples(self, steps: range) -> NDArray[np.int64]:
        return self.get_samples(steps)[0].ravel()

    def make(self, steps: range, pool: Executor, staging: Staging) -> Batch:
        images, labels = self.input.load(_HostBatch(self, steps, pool, staging))
        return Batch(images, labels, len(steps))

    def load_images(self, steps: range, pool: Executor, staging: Staging) -> tuple[jax.Array, jax.Array]:
        """Return cropped images and their labels on the devices."""
        samples, passes = self.get_samples(steps)
        size, blocks, count = find_train_size(self.recipe, steps.start, len(self.index)), len(samples), len(steps)
        if count > self.blocks.block[0] or samples.shape[2:] != self.blocks.block[1:]:
            raise ValueError(f"steps of {samples.shape[1:]} do not fit a call of {self.blocks.block}")
        images = staging.take((blocks, *self.blocks.block, size, size, 3))
        labels = np.zeros((blocks, *self.blocks.block), np.int32)
        images[:, count:] = 0
        # All blocks at once where their memory is contiguous, which it is unless steps are missing.
        for part in [slice(None)] if count == images.shape[1] else [slice(k, k + 1) for k in range(blocks)]:
            out = images[part, :count].reshape(-1, size, size, 3)
            used = self._fill(samples[part].ravel(), passes[part].ravel(), out, pool)
            labels[part, :count] = self.index.labels[used].reshape(labels[part, :count].shape)
        return self.blocks.assemble(images, staging), self.blocks.assemble(labels)

    def load_picks(self, steps: range) -> tuple[jax.Array, jax.Array]:
        """Return picks and their labels on the devices."""
        samples, passes = self.get_samples(steps)
        numbers = np.zeros((len(samples), *self.blocks.block, PICK_NUMBERS), np.int32)
        labels = np.zeros(numbers.shape[:-1], np.int32)
        numbers[:, : len(steps)] = picks.make_picks(self.recipe, self.index, samples, passes)
        labels[:, : len(steps)] = self.index.labels[samples]
        return self.blocks.assemble(numbers), self.blocks.assemble(labels)

    def _fill(
        self, samples: NDArray[np.int64], passes: NDArray[np.int64], out: NDArray, pool: Executor
    ) -> NDArray[np.int64]:
        """Make the images; return the samples that were used, where replacements stand for bad ones."""
        augment, seed, used = self.recipe.augment, self.recipe.train.seed, samples.copy()
        pending = np.arange(len(samples))
        while len(pending):
            used[pending] = [self.bad_images.find_readable(sample) for sample in used[pending].tolist()]
            pending = self._crop(pending, used, passes, out, pool)
        randaugment.augment_batch(out, augment.randaugment, augment.magnitude, seed, passes, used, pool)
        return used

    def _crop(
        self,
        pending: NDArray[np.int64],
        used: NDArray[np.int64],
        passes: NDArray[np.int64],
        out: NDArray,
        pool: Executor,
    ) -> NDArray[np.int64]:
        """Crop into the pending rows of `out`; return the rows whose images turn out to be bad."""
        data, seed, bad = self.recipe.data, self.recipe.train.seed, list[tuple[int, str]]()
        samples, sizes = used[pending], self.index.sizes[used[pending]]
        boxes, flips = compute_crop_boxes(
            self.recipe.augment, seed, passes[pending], samples, sizes, out.shape[-2], fraction=data.eval_fraction
        )
        is_whole = len(pending) == len(out)
        pixels = out if is_whole else np.empty((len(pending), *out.shape[1:]), np.uint8)
        crop.crop_batch(self.index, samples, boxes, flips, pixels, pool, bad)
        if not is_whole:
            out[pending] = pixels
        for row, reason in bad:
            self.bad_images.add(int(samples[row]), reason)
        return pending[sorted(row for row, _ in bad)]


@dataclass(frozen=True)
class _HostBatch:
    """The batch of one call, as a kind of input asks for it."""

    maker: _TrainMaker
    steps: range
    pool: Executor
    staging: Staging

    def load_images(self) -> tuple[jax.Array, jax.Array]:
        return self.maker.load_images(self.steps, self.pool, self.staging)

    def load_picks(self) -> tuple[jax.Array, jax.Array]:
        return self.maker.load_picks(self.steps)


@dataclass(frozen=True)
class _EvalMaker:
    index: Index
    recipe: Recipe
    blocks: LocalBlocks
    offsets: NDArray[np.int64]  # [blocks, images]
    bad_images: BadImages

    @property
    def device(self) -> jax.Device:
        return self.blocks.devices[0][0]

    def list_samples(self, first: int) -> NDArray[np.int64]:
        """Return the real examples; blocks are in ascending order, so they come before any that are missing."""
        examples = first + self.offsets.ravel()
        return examples[examples < len(self.index)]

    def make(self, first: int, pool: Executor, staging: Staging) -> Batch:
        data, samples = self.recipe.data, self.list_samples(first)
        images = staging.take((*self.offsets.shape, data.image_size, data.image_size, 3))
        labels = np.full(self.offsets.shape, -1, np.int32)
        flat = images.reshape(-1, *images.shape[2:])
        flat[len(samples) :], labels.reshape(-1)[: len(samples)] = 0, self.index.labels[samples]
        boxes = compute_eval_boxes(data.eval_fraction, self.index.sizes[samples])
        flips = np.zeros(len(samples), bool)
        bad = list[tuple[int, str]]()
        crop.crop_batch(self.index, samples, boxes, flips, flat[: len(samples)], pool, bad)
        for row, reason in bad:
            self.bad_images.add(int(samples[row]), reason)
            flat[row], labels.reshape(-1)[row] = 0, UNREADABLE
        count = min(self.blocks.shape[0], len(self.index) - first)
        return Batch(self.blocks.assemble(images, staging), self.blocks.assemble(labels), count)
