"""Measure the input pipeline: images per second from files to the devices, by stage, and what limits them.

It measures the work of a run: the first images that training would see, its own crops, the loader's own threads, memory
and transfer to the device. Nothing is trained.
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
from typing import TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.json_types import JsonObject
from podscale.config.options import Options, check_options
from podscale.data import cache, crop, decode, loader, prefetch
from podscale.data.index.dataset import Index, open_index
from podscale.data.order import Order, compute_crop_boxes, compute_eval_boxes
from podscale.data.staging import Staging
from podscale.errors import UserError
from podscale.plan import Counts, Plan
from podscale.pod import Pod, make_batch_sharding
from podscale.processes.host import count_usable_cores
from podscale.recipe import Recipe
from podscale.report import input_table

T = TypeVar("T")
IMAGES_PER_DEVICE = 256
SECONDS, ROUNDS = 0.25, 3  # each warm rate is the median of ROUNDS intervals of at least SECONDS each
LOADER_SECONDS = 1.0
ARITHMETIC = 300_000  # iterations of a hash: about a quarter of a second
HAND_OVERS = 20
COLD_READ = "read, cold"
CACHE_KINDS = ("none", "encoded", "decoded")


@dataclass(frozen=True, eq=False)
class Crops:
    """Images of an index, the crop of each, and memory for the results."""

    index: Index
    samples: NDArray[np.int64]
    boxes: NDArray[np.float64]
    flips: NDArray[np.bool_]
    out: NDArray[np.uint8]  # [n, size, size, 3]

    def __len__(self) -> int:
        return len(self.samples)

    def crop(self, part: slice) -> None:
        """Load and crop a part of the images."""
        crop.crop_batch(self.index, self.samples[part], self.boxes[part], self.flips[part], self.out[part])

    def evict(self) -> None:
        """Ask the kernel to drop the images' files from the page cache."""
        sources, offsets, lengths = replace(self.index, cache=None).locate_bytes(self.samples)
        for source, offset, length in zip(sources, offsets.tolist(), lengths.tolist(), strict=True):
            file = os.open(source, os.O_RDONLY) if isinstance(source, str) else int(source)
            try:
                os.fsync(file)  # the kernel cannot drop what is not on the disk yet
                os.posix_fadvise(file, offset, length, os.POSIX_FADV_DONTNEED)
            finally:
                if isinstance(source, str):
                    os.close(file)


StageTimer = Callable[[Crops, slice], dict[str, float]]


def measure_input(
    recipe: Recipe, pod: Pod, options: Options = Options(), *, images: int = 512, feed: float = 0.0, threads: int = 0
) -> JsonObject:
    """Measure images per second by stage, crop, cache and threads, and judge whether they feed a given rate.

    `images` is how many to measure with, `feed` the images per second that the machine should feed (0: the rate of one
    GPU), `threads` the number of decoding threads (0: one per core). Data that is not in files raises UserError.
    """
    _check_arguments(images, feed, threads)
    check_options(options)
    index = open_index(replace(recipe.data, classes=0, train_samples=0, val_samples=0)).train
    if index.files is None:
        raise UserError(f'data.source "{recipe.data.source}" is in memory; `bench input` measures images in files')
    threads = threads or count_usable_cores()
    plan = _make_plan(recipe, pod, len(index), images)
    crops = _make_crops(plan, index, math.ceil(images / plan.recipe.batch.size))
    hand_over = _measure_hand_over(plan)
    with ThreadPoolExecutor(threads, "podscale-decode") as pool:
        stages = _measure_stages(crops["train"], pool, threads, hand_over["images_per_s"])
        rates = _measure_crops(crops, pool, threads)
        arithmetic = _measure_arithmetic_scaling(pool, threads)
    result = {
        "recipe": recipe.name,
        "path": recipe.data.path,
        "images": len(crops["train"]),
        "image_bytes": float(index.count_encoded_bytes()[crops["train"].samples].mean()),
        "image_pixels": float(index.count_decoded_bytes()[crops["train"].samples].mean() / 3),
        "image_size": recipe.data.image_size,
        "decoder": decode.select_decoder(),
        "threads": threads,
        "cores": count_usable_cores(),
        "stages": stages,
        "crops": rates,
        "cores_had": statistics.median(row["cores_had"] for row in rates if row["cores_had"] is not None),
        "arithmetic_scaling": arithmetic,
        "hand_over": hand_over,
        "loader": _measure_loaders(plan, crops["train"], rates, threads),
        "kept": _choose_cache(index, recipe, options),
    }
    return result | input_table.judge_input(result, feed)


def _check_arguments(images: int, feed: float, threads: int) -> None:
    if jax.process_count() > 1:
        raise UserError("`bench input` measures one host; start it as a single process")
    if images < 1:
        raise UserError(f"--images must be at least 1, not {images}")
    if not 0 <= feed < math.inf:
        raise UserError(f"--feed must be a number of images per second, not {feed}")
    if not 0 <= threads <= 1024:
        raise UserError(f"--threads must be 1 to 1024, or 0 for one per core, not {threads}")


def _make_plan(recipe: Recipe, pod: Pod, samples: int, images: int) -> Plan:
    """Return a plan of one step per call whose batch fits the pod: a recipe's batch may exceed the images measured."""
    size = min(IMAGES_PER_DEVICE, math.ceil(images / pod.size)) * pod.size
    fitting_recipe = recipes.override_recipe(recipe, {"batch.size": size, "batch.span": size, "data.lanes": 1})
    return plans.make_plan(fitting_recipe, pod, Counts(samples, 1, 1), Options(steps_per_call=1, micro_batches=1))


def _make_crops(plan: Plan, index: Index, steps: int) -> dict[str, Crops]:
    """Return the crops of training's first steps, and the crops that evaluation would make of the same images."""
    recipe, data = plan.recipe, plan.recipe.data
    order = Order(len(index), 1, recipe.batch.size, recipe.train.seed)
    samples, passes = (
        part.ravel() for part in order.get_samples(np.arange(steps)[:, None], np.arange(recipe.batch.size)[None])
    )
    sizes = index.sizes[samples]
    boxes, flips = compute_crop_boxes(
        recipe.augment, recipe.train.seed, passes, samples, sizes, data.image_size, fraction=data.eval_fraction
    )
    out = np.zeros((len(samples), data.image_size, data.image_size, 3), np.uint8)
    train = Crops(index, samples, boxes, flips, out)
    evaluation = replace(train, boxes=compute_eval_boxes(data.eval_fraction, sizes), flips=flips & False)
    return {"train": train, "eval": evaluation}


# --- stages --------------------------------------------------------------------------------------------------------


def _measure_stages(crops: Crops, pool: Executor, threads: int, transfer_rate: float) -> list[JsonObject]:
    """Measure each stage alone: images/s of one core and of all threads, and its share of the time with warm files."""
    time_stages = _time_native_stages if _is_native(crops) else _time_reference_stages
    crops.crop(slice(None))  # brings the files into the page cache
    rounds = [
        (time_stages(crops, slice(None)), _time_all_threads(time_stages, crops, pool, threads)) for _ in range(ROUNDS)
    ]
    one_core, all_threads = (_compute_medians(list(seconds)) for seconds in zip(*rounds, strict=True))
    one_core["hand-over"] = all_threads["hand-over"] = len(crops) / transfer_rate
    total = sum(one_core.values())
    shares = {stage: seconds / total for stage, seconds in one_core.items()}
    if hasattr(os, "posix_fadvise"):
        crops.evict()
        one_core = {COLD_READ: time_stages(crops, slice(None))["read"]} | one_core
        crops.evict()
        all_threads[COLD_READ] = _time_all_threads(time_stages, crops, pool, threads)["read"]
    return [
        {
            "stage": stage,
            "images_per_s_one": len(crops) / seconds,
            "images_per_s_all": len(crops) / all_threads[stage],
            "share": shares.get(stage),
        }
        for stage, seconds in one_core.items()
        if seconds
    ]


def _compute_medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {stage: statistics.median(seconds[stage] for seconds in rounds) for stage in rounds[0]}


def _time_all_threads(time_stages: StageTimer, crops: Crops, pool: Executor, threads: int) -> dict[str, float]:
    """Return the seconds of each stage for all images if every thread did nothing else: the threads' rates add up."""
    edges = np.linspace(0, len(crops), threads + 1).astype(int).tolist()
    parts = [slice(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]
    total: dict[str, float] = {}
    for part, stages in zip(parts, pool.map(lambda part: time_stages(crops, part), parts), strict=True):
        for stage, seconds in stages.items():
            total[stage] = total.get(stage, 0.0) + ((part.stop - part.start) / seconds if seconds else math.inf)
    return {stage: len(crops) / rate for stage, rate in total.items()}


def _is_native(crops: Crops) -> bool:
    return decode.select_decoder() == "native" and not crops.index.needs_shrinking(crops.samples).any()


def _time_native_stages(crops: Crops, part: slice) -> dict[str, float]:
    from podscale.data import _native

    arguments = crops.boxes[part], crops.flips[part], crops.out.shape[1], crops.index.max_image_bytes
    seconds = _native.time_stages(*crops.index.locate_bytes(crops.samples[part]), *arguments)  # type: ignore[arg-type]
    return dict(zip(("read", "entropy decode", "transform", "resize"), seconds, strict=True))


def _time_reference_stages(crops: Crops, part: slice) -> dict[str, float]:
    seconds = dict.fromkeys(("read", "decode", "shrink", "resize"), 0.0)

    def time_call(stage: str, work: Callable[..., T], *arguments: object) -> T:
        start = time.perf_counter()
        result = work(*arguments)
        seconds[stage] += time.perf_counter() - start
        return result

    index, size = crops.index, crops.out.shape[1]
    for i in range(*part.indices(len(crops))):
        sample = int(crops.samples[i])
        data = time_call("read", index.read, sample)
        pixels = time_call("decode", decode.decode_image, data, index.name(sample), index.max_image_bytes)
        pixels = time_call("shrink", decode.shrink_image, pixels, *index.sizes[sample])
        time_call("resize", decode.crop_image, pixels, crops.boxes[i], bool(crops.flips[i]), size, crops.out[i])
    return seconds


# --- whole crops ---------------------------------------------------------------------------------------------------


def _measure_crops(crops: dict[str, Crops], pool: Executor, threads: int) -> list[JsonObject]:
    """Measure the crops of training and evaluation: files not in memory, files in the page cache, and each cache."""
    rows = []
    for kind in CACHE_KINDS:
        index = _fill_cache(crops["train"], kind, pool)
        for name, part in crops.items():
            if kind == "none" and hasattr(os, "posix_fadvise"):
                rows.append({"crop": name, "kept": "none", "pages": "cold", **_measure_cold(part, pool, threads)})
            warm = _measure_warm(replace(part, index=index), pool, threads) if index else _make_row(None, None, threads)
            rows.append({"crop": name, "kept": kind, "pages": "warm", **warm})
    return rows


def _fill_cache(crops: Crops, kind: str, pool: Executor) -> Index | None:
    """Return the index with a cache that holds all measured images; None if they do not fit in memory."""
    if kind == "none":
        return crops.index
    samples = np.unique(crops.samples)
    lengths = crops.index.count_decoded_bytes() if kind == "decoded" else crops.index.count_encoded_bytes()
    if cache.compute_cache_bytes(lengths[samples]) > cache.DEFAULT_MEMORY_SHARE * cache.measure_free_memory():
        return None
    index = crops.index.with_cache(kind, samples)  # type: ignore[arg-type]
    _time_passes(replace(crops, index=index), pool)
    return index


def _measure_cold(crops: Crops, pool: Executor, threads: int) -> JsonObject:
    seconds = []
    for workers in (None, pool):
        crops.evict()
        seconds.append(_time_passes(crops, workers))
    return _make_row(len(crops) / seconds[0], len(crops) / seconds[1], threads)


def _measure_warm(crops: Crops, pool: Executor, threads: int) -> JsonObject:
    """Return median rates; one thread and all threads alternate, since a machine's clock may change meanwhile."""
    _time_passes(crops, pool)
    rounds = []
    for _ in range(ROUNDS):
        single = _measure_rate(crops, None)
        start, cpu_start = time.perf_counter(), time.process_time()
        all_ = _measure_rate(crops, pool)
        cores = (time.process_time() - cpu_start) / (time.perf_counter() - start)
        rounds.append((single, all_, cores / min(threads, count_usable_cores())))
    medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
    return _make_row(medians[0], medians[1], threads, medians[2])


def _make_row(single: float | None, all_: float | None, threads: int, cores_share: float | None = None) -> JsonObject:
    """Return a row of rates; `cores_share` is the share of the cores that all threads together got."""
    scaling = all_ / (threads * single) if single and all_ else None
    return {"images_per_s_one": single, "images_per_s_all": all_, "scaling": scaling, "cores_had": cores_share}


def _measure_rate(crops: Crops, pool: Executor | None) -> float:
    """Return images/s over as many passes as last `SECONDS`."""
    passes = 1
    while (seconds := _time_passes(crops, pool, passes)) < SECONDS:
        passes = math.ceil(passes * 1.2 * SECONDS / seconds)
    return len(crops) * passes / seconds


def _time_passes(crops: Crops, pool: Executor | None, passes: int = 1) -> float:
    """Return the seconds of some passes over the images, in tasks of the loader's size, without pauses between them."""
    starts = range(0, len(crops), crop.IMAGES_PER_TASK)
    parts = [slice(start, start + crop.IMAGES_PER_TASK) for start in starts] * passes
    start = time.perf_counter()
    for _ in map(crops.crop, parts) if pool is None else pool.map(crops.crop, parts):
        pass
    return time.perf_counter() - start


def _measure_arithmetic_scaling(pool: Executor, threads: int) -> float:
    """Return how work without memory access scales here: cores that share a clock or a unit are not full cores."""

    def work(_: int) -> None:
        hashlib.pbkdf2_hmac("sha256", b"podscale", b"podscale", ARITHMETIC)

    def time_workers(workers: int) -> float:
        start = time.perf_counter()
        list(pool.map(work, range(workers)))
        return time.perf_counter() - start

    return statistics.median(time_workers(1) / time_workers(threads) for _ in range(ROUNDS))


# --- transfer and loader -------------------------------------------------------------------------------------------


def _measure_hand_over(plan: Plan) -> JsonObject:
    """Measure the transfer of one device's part of a batch from staging memory; on GPUs also from ordinary memory.

    A CPU device uses the host memory directly: nothing is copied, whatever the rate.
    """
    device, size = plan.pod.devices[0], plan.recipe.data.image_size
    shape = (plan.images_per_device, size, size, 3)
    staging = Staging(device)

    def send_staged() -> jax.Array:
        memory = staging.take(shape)
        array = jax.device_put(memory, device)
        staging.reuse_after(memory, array)
        return array

    try:
        rate = _measure_hand_over_rate(send_staged, plan.images_per_device)
    finally:
        staging.close()
    ordinary = np.zeros(shape, np.uint8)
    ordinary_rate = _measure_hand_over_rate(lambda: jax.device_put(ordinary, device), plan.images_per_device)
    image_bytes = 3 * size * size
    return {
        "device": device.device_kind,
        "copies": device.platform != "cpu",
        "batch_bytes": image_bytes * plan.images_per_device,
        "images_per_s": rate,
        "bytes_per_s": rate * image_bytes,
        "bytes_per_s_unpinned": ordinary_rate * image_bytes if device.platform == "gpu" else None,
    }


def _measure_hand_over_rate(send: Callable[[], jax.Array], images: int) -> float:
    for _ in range(3):
        send().block_until_ready()
    start = time.perf_counter()
    for _ in range(HAND_OVERS):
        last = send()
    last.block_until_ready()
    return HAND_OVERS * images / (time.perf_counter() - start)


def _measure_loaders(plan: Plan, crops: Crops, rows: list[JsonObject], threads: int) -> dict[str, float | None]:
    """Measure the whole loader for each cache, consuming its batches as fast as it makes them."""
    expected = {row["kept"]: row["images_per_s_all"] for row in rows if row["crop"] == "train"}
    rates: dict[str, float | None] = dict.fromkeys(CACHE_KINDS)
    with ThreadPoolExecutor(threads) as pool:
        for kind in CACHE_KINDS:
            if expected[kind]:
                index = _fill_cache(crops, kind, pool)
                rates[kind] = _measure_loader(plan, index, len(crops), expected[kind], threads) if index else None
    return rates


def _measure_loader(plan: Plan, index: Index, images: int, expected: float, threads: int) -> float:
    """Return the loader's images/s in steady state: other batches are in progress at the first and last counted one."""
    size, sharding = plan.recipe.batch.size, make_batch_sharding(plan.pod.mesh(plan.tile), axis=2)
    steps = max(4, math.ceil(LOADER_SECONDS * expected / size))
    count = steps + 2 * prefetch.CONCURRENT_BATCHES
    ranges = [range(step, step + 1) for step in (i % (images // size) for i in range(count))]
    with loader.load_train_batches(index, plan, ranges, sharding, threads=threads) as batches:
        for done, batch in enumerate(batches, start=1):
            batch.images.block_until_ready()
            if done == prefetch.CONCURRENT_BATCHES:
                start = time.perf_counter()
            if done == prefetch.CONCURRENT_BATCHES + steps:
                break
        return steps * size / (time.perf_counter() - start)


def _choose_cache(index: Index, recipe: Recipe, options: Options) -> str:
    """Return the cache that a run on this machine would choose for the whole training set."""
    limit = options.cache_gib * 2**30 if options.cache_gib else cache.DEFAULT_MEMORY_SHARE * cache.measure_free_memory()
    encoded, decoded = map(cache.compute_cache_bytes, (index.count_encoded_bytes(), index.count_decoded_bytes()))
    return cache.choose_kind(options.cache, encoded, decoded, int(limit), recipe.train.epochs) or "none"
