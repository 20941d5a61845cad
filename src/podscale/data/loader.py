"""Loader: from positions of the global batch to arrays on the devices.

Each process makes only the blocks of its own devices, from its own lanes, which it may keep in memory. Which sample a
block holds follows from the positions that its devices own (see `order`), so any split over hosts and devices yields
the same global batch.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from podscale.data import crop, picks, randaugment
from podscale.data.bad_images import UNREADABLE, BadPictures
from podscale.data.blocks import Blocks, eval_blocks
from podscale.data.index.dataset import Index
from podscale.data.order import Order, batches_at, crop_boxes, eval_boxes
from podscale.data.prefetch import Batch, Batches
from podscale.data.staging import Staging
from podscale.plan import Plan
from podscale.recipe import Recipe


def train_batches(
    index: Index,
    plan: Plan,
    ranges: Sequence[range],
    sharding: NamedSharding,
    *,
    left_out: Sequence[range] = (),
    threads: int | None = None,
    depth: int = 2,
) -> "Batches":
    """One batch for each range of absolute steps: images [steps_per_call, micro_batches, batch / micro_batches, ...].

    `sharding` cuts axis 2 alone; the plan says which positions each device owns. Steps past a range's end are zeros.
    `left_out` are batches that no step takes.
    """
    recipe = plan.recipe
    order = Order(len(index), recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    shards = Blocks(sharding, plan.batch_shape, axis=2)
    bad = BadPictures(index, recipe.data.lanes, recipe.data.bad_share)
    kind = _PickJob if plan.resident else _TrainJob
    job = kind(index, recipe, order, left_out, shards, _positions(plan, shards), bad)
    return Batches(ranges, job, threads, depth)


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
    batch is padded with zeros whose label is -1. A picture that cannot be read is zeros, too, labelled UNREADABLE.
    """
    shards = eval_blocks(sharding, images_per_device)
    offsets = np.array(shards.starts)[:, None] + np.arange(images_per_device)  # [blocks, images]
    jobs = range(0, len(index), shards.shape[0])
    bad = BadPictures(index, recipe.data.lanes, recipe.data.bad_share)
    return Batches(jobs, _EvalJob(index, recipe, shards, offsets, bad), threads, depth)


def train_samples(plan: Plan, sharding: NamedSharding) -> NDArray[np.int64]:
    """All samples that this process will ever train on: those of the lanes that its positions read."""
    lanes = plan.recipe.data.lanes
    positions = _positions(plan, Blocks(sharding, plan.batch_shape, axis=2))
    own = np.unique(positions // (plan.recipe.batch.size // lanes))
    samples = np.arange(plan.counts.train)
    return samples[np.isin(samples % lanes, own)]


def eval_samples(count: int, sharding: NamedSharding, images_per_device: int) -> NDArray[np.int64]:
    """All of `count` examples that this process evaluates."""
    shards = eval_blocks(sharding, images_per_device)
    offsets = np.array(shards.starts)[:, None] + np.arange(images_per_device)
    samples = np.arange(count)
    return samples[np.isin(samples % shards.shape[0], offsets)]


def eval_pictures(
    index: Index, samples: Sequence[int], recipe: Recipe, pool: Executor | None = None
) -> NDArray[np.uint8]:
    """Pictures as evaluation sees them: uint8 [n, size, size, 3]. Any will do, also one that another process keeps."""
    index = replace(index, cache=None)
    chosen, size = np.asarray(samples, np.int64), recipe.data.image_size
    out = np.empty((len(chosen), size, size, 3), np.uint8)
    boxes = eval_boxes(recipe.data.eval_fraction, index.sizes[chosen])
    crop.crop_batch(index, chosen, boxes, np.zeros(len(chosen), bool), size, out, pool)
    return out


def train_pictures(index: Index, recipe: Recipe, step: int, positions: Sequence[int], sharding: NamedSharding) -> Batch:
    """What training sees at these positions of a step's batch: images [1, 1, n, ...] on the device of `sharding`."""
    order = Order(len(index), recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    blocks = Blocks(sharding, (1, 1, len(positions)), axis=2)
    bad = BadPictures(index, recipe.data.lanes, recipe.data.bad_share)
    job = _TrainJob(index, recipe, order, (), blocks, np.array(positions, np.int64)[None, None], bad)
    with Batches([range(step, step + 1)], job, threads=None, depth=1) as batches:
        return next(batches)


# --- jobs -----------------------------------------------------------------------------------------------------------


def _positions(plan: Plan, shards: "Blocks") -> NDArray[np.int64]:
    """Positions of the global batch that this process fills: [blocks, micro-batches, images]."""
    return np.stack([plan.positions(start // plan.micro_images) for start in shards.starts])


@dataclass(frozen=True)
class _TrainJob:
    index: Index
    recipe: Recipe
    order: Order
    left_out: Sequence[range]
    shards: Blocks
    positions: NDArray[np.int64]  # [blocks, micro-batches, images]
    bad: BadPictures

    @property
    def device(self) -> Any:
        return self.shards.devices[0][0]

    def samples(self, steps: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Samples and lane passes [blocks, steps, micro-batches, images]."""
        return self.order.at(batches_at(np.array(steps), self.left_out)[:, None, None], self.positions[:, None])

    def ahead(self, steps: range) -> NDArray[np.int64]:
        return self.samples(steps)[0].ravel()

    def make(self, steps: range, pool: Executor, staging: Staging) -> Batch:
        samples, passes = self.samples(steps)
        size, blocks, done = self.recipe.data.image_size, len(samples), len(steps)
        if done > self.shards.block[0] or samples.shape[2:] != self.shards.block[1:]:
            raise ValueError(f"steps of {samples.shape[1:]} do not fit a call of {self.shards.block}")
        images = staging.take((blocks, *self.shards.block, size, size, 3))
        labels = np.zeros((blocks, *self.shards.block), np.int32)
        images[:, done:] = 0
        # All blocks at once where their memory is one piece, which it is unless steps are missing.
        for part in [slice(None)] if done == images.shape[1] else [slice(k, k + 1) for k in range(blocks)]:
            out = images[part, :done].reshape(-1, size, size, 3)
            taken = self._fill(samples[part].ravel(), passes[part].ravel(), out, pool)
            labels[part, :done] = self.index.labels[taken].reshape(labels[part, :done].shape)
        return Batch(self.shards.assemble(images, staging), self.shards.assemble(labels), done)

    def _fill(
        self, samples: NDArray[np.int64], passes: NDArray[np.int64], out: NDArray, pool: Executor
    ) -> NDArray[np.int64]:
        """Makes the pictures; returns the samples that were taken, some of them instead of bad ones."""
        augment, seed, taken = self.recipe.augment, self.recipe.train.seed, samples.copy()
        left = np.arange(len(samples))
        while len(left):
            taken[left] = [self.bad.instead(sample) for sample in taken[left].tolist()]
            left = self._crop(left, taken, passes, out, pool)
        randaugment.apply_batch(out, augment.randaugment, augment.magnitude, seed, passes, taken, pool)
        return taken

    def _crop(
        self, left: NDArray[np.int64], taken: NDArray[np.int64], passes: NDArray[np.int64], out: NDArray, pool: Executor
    ) -> NDArray[np.int64]:
        """Crops those places of `out` that are left; returns the places whose pictures turn out to be bad."""
        data, seed, bad = self.recipe.data, self.recipe.train.seed, list[tuple[int, str]]()
        samples, sizes = taken[left], self.index.sizes[taken[left]]
        augment, fraction = self.recipe.augment, data.eval_fraction
        boxes, flips = crop_boxes(augment, seed, passes[left], samples, sizes, data.image_size, fraction=fraction)
        all_left = len(left) == len(out)
        pixels = out if all_left else np.empty((len(left), *out.shape[1:]), np.uint8)
        crop.crop_batch(self.index, samples, boxes, flips, data.image_size, pixels, pool, bad)
        if not all_left:
            out[left] = pixels
        for place, why in bad:
            self.bad.add(int(samples[place]), why)
        return left[sorted(place for place, _ in bad)]


class _PickJob(_TrainJob):
    """The same, for pictures that are on the devices already."""

    def make(self, steps: range, pool: Executor, staging: Staging) -> Batch:
        samples, passes = self.samples(steps)
        chosen = np.zeros((len(samples), *self.shards.block, picks.PICK_NUMBERS), np.int32)
        labels = np.zeros(chosen.shape[:-1], np.int32)
        chosen[:, : len(steps)] = picks.make_picks(self.recipe, self.index, samples, passes)
        labels[:, : len(steps)] = self.index.labels[samples]
        return Batch(self.shards.assemble(chosen), self.shards.assemble(labels), len(steps))


@dataclass(frozen=True)
class _EvalJob:
    index: Index
    recipe: Recipe
    shards: Blocks
    offsets: NDArray[np.int64]  # [blocks, images]
    bad: BadPictures

    @property
    def device(self) -> Any:
        return self.shards.devices[0][0]

    def ahead(self, first: int) -> NDArray[np.int64]:
        """The real examples; blocks are in ascending order, so they come before any that are missing."""
        examples = first + self.offsets.ravel()
        return examples[examples < len(self.index)]

    def make(self, first: int, pool: Executor, staging: Staging) -> Batch:
        data, samples = self.recipe.data, self.ahead(first)
        images = staging.take((*self.offsets.shape, data.image_size, data.image_size, 3))
        labels = np.full(self.offsets.shape, -1, np.int32)
        flat = images.reshape(-1, *images.shape[2:])
        flat[len(samples) :], labels.reshape(-1)[: len(samples)] = 0, self.index.labels[samples]
        boxes = eval_boxes(data.eval_fraction, self.index.sizes[samples])
        flips = np.zeros(len(samples), bool)
        bad = list[tuple[int, str]]()
        crop.crop_batch(self.index, samples, boxes, flips, data.image_size, flat[: len(samples)], pool, bad)
        for place, why in bad:
            self.bad.add(int(samples[place]), why)
            flat[place], labels.reshape(-1)[place] = 0, UNREADABLE
        count = min(self.shards.shape[0], len(self.index) - first)
        return Batch(self.shards.assemble(images, staging), self.shards.assemble(labels), count)
