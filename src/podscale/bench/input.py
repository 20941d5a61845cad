"""Measuring the input: how many pictures a second go from files to the devices, by stage, and what limits them.

What is measured is the work of a run: the first pictures that training would see, its own crops, the loader's own
threads, memory and hand-over. Nothing is trained.
"""

import hashlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data import cache, crop, decode, loader, prefetch
from podscale.data.index.dataset import Index, open_index
from podscale.data.order import Order, crop_boxes, eval_boxes
from podscale.data.staging import Staging
from podscale.errors import UserError
from podscale.plan import Counts, Plan
from podscale.pod import Pod, batch_sharding
from podscale.recipe import Recipe
from podscale.report import input_table

IMAGES_PER_DEVICE = 256
SECONDS, ROUNDS = 0.25, 3  # each warm rate is the median of so many stretches, each of at least so long
LOADER_SECONDS = 1.0
ARITHMETIC = 300_000  # hashes of hashes: about a quarter of a second
HAND_OVERS = 20
COLD = "read, cold"
KEPT = ("none", "encoded", "decoded")


@dataclass(frozen=True, eq=False)
class Crops:
    """Pictures of an index, the part to take of each, and memory for what becomes of them."""

    index: Index
    samples: NDArray[np.int64]
    boxes: NDArray[np.float64]
    flips: NDArray[np.bool_]
    out: NDArray[np.uint8]  # [n, size, size, 3]

    def __len__(self) -> int:
        return len(self.samples)

    def make(self, part: slice) -> None:
        crop.crop_batch(
            self.index, self.samples[part], self.boxes[part], self.flips[part], self.out.shape[1], self.out[part]
        )

    def drop(self) -> None:
        """Has the kernel forget the pictures' files, as far as it does what it is told."""
        sources, offsets, lengths = replace(self.index, cache=None).sources(self.samples)
        for source, offset, length in zip(sources, offsets.tolist(), lengths.tolist(), strict=True):
            file = os.open(source, os.O_RDONLY) if isinstance(source, str) else int(source)
            try:
                os.fsync(file)  # what is not on the disk yet cannot be forgotten
                os.posix_fadvise(file, offset, length, os.POSIX_FADV_DONTNEED)
            finally:
                if isinstance(source, str):
                    os.close(file)


def measure(
    recipe: Recipe,
    pod: Pod,
    options: Options = Options(),
    *,
    images: int = 512,
    feed: float = 0.0,
    threads: int = 0,
) -> dict[str, Any]:
    """Images per second, by stage, crop, cache and threads, and a verdict on feeding `feed` images/s (0: one GPU's)."""
    _check(images, feed, threads)
    index = open_index(replace(recipe.data, classes=0, train_samples=0, val_samples=0)).train
    if index.files is None:
        raise UserError(f'data.source "{recipe.data.source}" is in memory; `bench input` measures pictures in files')
    threads = threads or prefetch.cpus()
    plan = _plan(recipe, pod, len(index), images)
    crops = _crops(plan, index, math.ceil(images / plan.recipe.batch.size))
    hand_over = _hand_over(plan)
    with ThreadPoolExecutor(threads, "podscale-decode") as pool:
        stages = _stages(crops["train"], pool, threads, hand_over["images_per_s"])
        whole = _crop_rates(crops, pool, threads)
        arithmetic = _arithmetic_scaling(pool, threads)
    found = {
        "recipe": recipe.name,
        "path": recipe.data.path,
        "pictures": len(crops["train"]),
        "picture_bytes": float(index.encoded_bytes()[crops["train"].samples].mean()),
        "picture_pixels": float(index.decoded_bytes()[crops["train"].samples].mean() / 3),
        "image_size": recipe.data.image_size,
        "decoder": decode.decoder(),
        "threads": threads,
        "cores": prefetch.cpus(),
        "stages": stages,
        "crops": whole,
        "cores_had": statistics.median(row["cores_had"] for row in whole if row["cores_had"] is not None),
        "arithmetic_scaling": arithmetic,
        "hand_over": hand_over,
        "loader": _loader_rates(plan, crops["train"], whole, threads),
        "kept": _kept(index, recipe, options),
    }
    return found | input_table.judge(found, feed)


def _check(images: int, feed: float, threads: int) -> None:
    if jax.process_count() > 1:
        raise UserError("`bench input` measures one host; start it as a single process")
    if images < 1:
        raise UserError(f"--images must be at least 1, not {images}")
    if not 0 <= feed < math.inf:
        raise UserError(f"--feed must be a number of images a second, not {feed}")
    if not 0 <= threads <= 1024:
        raise UserError(f"--threads must be 1 to 1024, or 0 for one a core, not {threads}")


def _plan(recipe: Recipe, pod: Pod, samples: int, images: int) -> Plan:
    """A plan of one step a call; the batch is the pod's, since a recipe's may be larger than what is measured."""
    size = min(IMAGES_PER_DEVICE, math.ceil(images / pod.size)) * pod.size
    fitting = recipes.override(recipe, {"batch.size": size, "batch.span": size, "data.lanes": 1})
    return plans.make_plan(fitting, pod, Counts(samples, 1, 1), Options(steps_per_call=1, micro_batches=1))


def _crops(plan: Plan, index: Index, steps: int) -> dict[str, Crops]:
    """What training takes of the pictures of its first steps, and what evaluation would take of them."""
    recipe, data = plan.recipe, plan.recipe.data
    order = Order(len(index), 1, recipe.batch.size, recipe.train.seed)
    samples, passes = (
        found.ravel() for found in order.at(np.arange(steps)[:, None], np.arange(recipe.batch.size)[None])
    )
    sizes = index.sizes[samples]
    boxes, flips = crop_boxes(
        recipe.augment, recipe.train.seed, passes, samples, sizes, data.image_size, fraction=data.eval_fraction
    )
    out = np.zeros((len(samples), data.image_size, data.image_size, 3), np.uint8)
    train = Crops(index, samples, boxes, flips, out)
    return {"train": train, "eval": replace(train, boxes=eval_boxes(data.eval_fraction, sizes), flips=flips & False)}


# --- stages --------------------------------------------------------------------------------------------------------


def _stages(crops: Crops, pool: Executor, threads: int, handed_over: float) -> list[dict[str, Any]]:
    """Each stage alone: images/s of one core, of all threads at once, and its share of the time if files are warm."""
    time_one = _native_stages if _is_native(crops) else _plain_stages
    crops.make(slice(None))  # the files are in the page cache from here on
    rounds = [(time_one(crops, slice(None)), _of_all(time_one, crops, pool, threads)) for _ in range(ROUNDS)]
    one, all_ = (_medians(list(found)) for found in zip(*rounds, strict=True))
    one["hand-over"] = all_["hand-over"] = len(crops) / handed_over
    whole = sum(one.values())
    shares = {stage: seconds / whole for stage, seconds in one.items()}
    if hasattr(os, "posix_fadvise"):
        crops.drop()
        one = {COLD: time_one(crops, slice(None))["read"]} | one
        crops.drop()
        all_[COLD] = _of_all(time_one, crops, pool, threads)["read"]
    return [
        {
            "stage": stage,
            "images_per_s_one": len(crops) / seconds,
            "images_per_s_all": len(crops) / all_[stage],
            "share": shares.get(stage),
        }
        for stage, seconds in one.items()
        if seconds
    ]


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {stage: statistics.median(seconds[stage] for seconds in found) for stage in found[0]}


def _of_all(time_one: Callable[[Crops, slice], dict[str, float]], crops: Crops, pool: Executor, threads: int) -> Any:
    """Seconds of each stage for all pictures, if every thread did nothing else: the threads' rates add up."""
    edges = np.linspace(0, len(crops), threads + 1).astype(int).tolist()
    parts = [slice(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]
    total: dict[str, float] = {}
    for part, found in zip(parts, pool.map(lambda part: time_one(crops, part), parts), strict=True):
        for stage, seconds in found.items():
            total[stage] = total.get(stage, 0.0) + ((part.stop - part.start) / seconds if seconds else math.inf)
    return {stage: len(crops) / rate for stage, rate in total.items()}


def _is_native(crops: Crops) -> bool:
    return decode.decoder() == "native" and not crops.index.shrinks(crops.samples).any()


def _native_stages(crops: Crops, part: slice) -> dict[str, float]:
    from podscale.data import _native

    what = crops.boxes[part], crops.flips[part], crops.out.shape[1], decode.MAX_PIXELS
    seconds = _native.stages(*crops.index.sources(crops.samples[part]), *what)  # type: ignore[arg-type]
    return dict(zip(("read", "entropy decode", "transform", "resize"), seconds, strict=True))


def _plain_stages(crops: Crops, part: slice) -> dict[str, float]:
    spent = dict.fromkeys(("read", "decode", "shrink", "resize"), 0.0)

    def timed(stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = work(*arguments)
        spent[stage] += time.perf_counter() - began
        return result

    index, size = crops.index, crops.out.shape[1]
    for i in range(*part.indices(len(crops))):
        sample = int(crops.samples[i])
        data = timed("read", index.read, sample)
        pixels = timed("decode", decode.decode, data, index.name(sample))
        pixels = timed("shrink", decode.shrink, pixels, *index.sizes[sample])
        timed("resize", decode.crop, pixels, crops.boxes[i], bool(crops.flips[i]), size, crops.out[i])
    return spent


# --- whole crops ---------------------------------------------------------------------------------------------------


def _crop_rates(crops: dict[str, Crops], pool: Executor, threads: int) -> list[dict[str, Any]]:
    """Rates of training's and evaluation's crops: files not in memory, files in the page cache, and each cache."""
    rows = []
    for kept in KEPT:
        index = _filled(crops["train"], kept, pool)
        for kind, what in crops.items():
            if kept == "none" and hasattr(os, "posix_fadvise"):
                rows.append({"crop": kind, "kept": "none", "pages": "cold", **_cold_rates(what, pool, threads)})
            warm = _warm_rates(replace(what, index=index), pool, threads) if index else _row(None, None, threads)
            rows.append({"crop": kind, "kept": kept, "pages": "warm", **warm})
    return rows


def _filled(crops: Crops, kept: str, pool: Executor) -> Index | None:
    """The index with a cache that holds all that is measured; None where that does not fit in memory."""
    if kept == "none":
        return crops.index
    samples = np.unique(crops.samples)
    lengths = crops.index.decoded_bytes() if kept == "decoded" else crops.index.encoded_bytes()
    if cache.room(lengths[samples]) > cache.FREE_SHARE * cache.free_bytes():
        return None
    index = crops.index.cached(kept, samples)  # type: ignore[arg-type]
    _seconds(replace(crops, index=index), pool)
    return index


def _cold_rates(crops: Crops, pool: Executor, threads: int) -> dict[str, Any]:
    seconds = []
    for workers in (None, pool):
        crops.drop()
        seconds.append(_seconds(crops, workers))
    return _row(len(crops) / seconds[0], len(crops) / seconds[1], threads)


def _warm_rates(crops: Crops, pool: Executor, threads: int) -> dict[str, Any]:
    """Medians; one thread and all of them take turns, since a machine's clock may change meanwhile."""
    _seconds(crops, pool)
    found = []
    for _ in range(ROUNDS):
        one = _rate(crops, None)
        began, worked = time.perf_counter(), time.process_time()
        all_ = _rate(crops, pool)
        had = (time.process_time() - worked) / (time.perf_counter() - began)
        found.append((one, all_, had / min(threads, prefetch.cpus())))
    medians = [statistics.median(values) for values in zip(*found, strict=True)]
    return _row(medians[0], medians[1], threads, medians[2])


def _row(one: float | None, all_: float | None, threads: int, had: float | None = None) -> dict[str, Any]:
    """`cores_had`: which part of the cores all threads together got."""
    scaling = all_ / (threads * one) if one and all_ else None
    return {"images_per_s_one": one, "images_per_s_all": all_, "scaling": scaling, "cores_had": had}


def _rate(crops: Crops, pool: Executor | None) -> float:
    """Images/s over as many passes as last `SECONDS`."""
    passes = 1
    while (spent := _seconds(crops, pool, passes)) < SECONDS:
        passes = math.ceil(passes * 1.2 * SECONDS / spent)
    return len(crops) * passes / spent


def _seconds(crops: Crops, pool: Executor | None, passes: int = 1) -> float:
    """Of some passes over the pictures, in the loader's portions, without a pause between passes."""
    starts = range(0, len(crops), crop.PICTURES_PER_TASK)
    parts = [slice(start, start + crop.PICTURES_PER_TASK) for start in starts] * passes
    began = time.perf_counter()
    for _ in map(crops.make, parts) if pool is None else pool.map(crops.make, parts):
        pass
    return time.perf_counter() - began


def _arithmetic_scaling(pool: Executor, threads: int) -> float:
    """How work that touches no memory scales here: cores that share a clock or a unit are not one core each."""

    def work(_: int) -> None:
        hashlib.pbkdf2_hmac("sha256", b"podscale", b"podscale", ARITHMETIC)

    def seconds(workers: int) -> float:
        began = time.perf_counter()
        list(pool.map(work, range(workers)))
        return time.perf_counter() - began

    return statistics.median(seconds(1) / seconds(threads) for _ in range(ROUNDS))


# --- the device, and the whole -------------------------------------------------------------------------------------


def _hand_over(plan: Plan) -> dict[str, Any]:
    """One device's share of a batch from the memory it is made in to the device; on GPUs also from ordinary memory.

    A CPU keeps the memory that it is given: nothing is copied, whatever the rate.
    """
    device, size = plan.pod.devices[0], plan.recipe.data.image_size
    shape = (plan.images_per_device, size, size, 3)
    staging = Staging(device)

    def staged() -> jax.Array:
        memory = staging.take(shape)
        array = jax.device_put(memory, device)
        staging.sent(memory, array)
        return array

    try:
        rate = _hand_over_rate(staged, plan.images_per_device)
    finally:
        staging.close()
    ordinary = np.zeros(shape, np.uint8)
    plain = _hand_over_rate(lambda: jax.device_put(ordinary, device), plan.images_per_device)
    image_bytes = 3 * size * size
    return {
        "device": device.device_kind,
        "copies": device.platform != "cpu",
        "batch_bytes": image_bytes * plan.images_per_device,
        "images_per_s": rate,
        "bytes_per_s": rate * image_bytes,
        "bytes_per_s_unpinned": plain * image_bytes if device.platform == "gpu" else None,
    }


def _hand_over_rate(send: Callable[[], jax.Array], images: int) -> float:
    for _ in range(3):
        send().block_until_ready()
    began = time.perf_counter()
    for _ in range(HAND_OVERS):
        last = send()
    last.block_until_ready()
    return HAND_OVERS * images / (time.perf_counter() - began)


def _loader_rates(plan: Plan, crops: Crops, rows: list[dict[str, Any]], threads: int) -> dict[str, float | None]:
    """The whole loader, its batches taken as fast as they come."""
    expected = {row["kept"]: row["images_per_s_all"] for row in rows if row["crop"] == "train"}
    found: dict[str, float | None] = dict.fromkeys(KEPT)
    with ThreadPoolExecutor(threads) as pool:
        for kept in KEPT:
            if expected[kept]:
                index = _filled(crops, kept, pool)
                found[kept] = _loader_rate(plan, index, len(crops), expected[kept], threads) if index else None
    return found


def _loader_rate(plan: Plan, index: Index, images: int, expected: float, threads: int) -> float:
    """In the midst of its work: others are in the making when the first counted batch comes, and when the last does."""
    size, sharding = plan.recipe.batch.size, batch_sharding(plan.pod.mesh(plan.tile), axis=2)
    steps = max(4, math.ceil(LOADER_SECONDS * expected / size))
    jobs = range(steps + 2 * prefetch.AT_ONCE)
    ranges = [range(step, step + 1) for step in (job % (images // size) for job in jobs)]
    with loader.train_batches(index, plan, ranges, sharding, threads=threads) as batches:
        for done, batch in enumerate(batches, start=1):
            batch.images.block_until_ready()
            if done == prefetch.AT_ONCE:
                began = time.perf_counter()
            if done == prefetch.AT_ONCE + steps:
                break
        return steps * size / (time.perf_counter() - began)


def _kept(index: Index, recipe: Recipe, options: Options) -> str:
    """What a run on this machine would keep of the whole training set."""
    limit = options.cache_gib * 2**30 if options.cache_gib else cache.FREE_SHARE * cache.free_bytes()
    encoded, decoded = cache.room(index.encoded_bytes()), cache.room(index.decoded_bytes())
    return cache.choose(options.cache, encoded, decoded, int(limit), recipe.train.epochs) or "none"
