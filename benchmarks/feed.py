"""Claim: 16 cores feed one H200. Training from prepared files or from the cache runs at 95 % of the synthetic rate.

ResNet-50 at 224 px, LARS, bfloat16, trained on real JPEG files with the real loader and the real step; beside it, in
the same process and with the same compiled step, the same training on synthetic images that are on the device already.
The files are copies of the JPEGs below a folder, under so many names that no file is used twice in a pass; the copies
are then also prepared (`podscale data prepare`) in two ways. "waits" is the share of the time in which the step waits
for its next batch; "idle" is the share in which the device does nothing because of the input: one minus the rate as a
share of the synthetic rate.

    python benchmarks/feed.py FOLDER [--copies 40] [--images 256] [--calls 12] [--size 224]
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podscale import pod as pods
from podscale import recipe as recipes
from podscale.data import loader, prefetch
from podscale.data.index.dataset import Index, open_index
from podscale.plan import Counts
from podscale.processes.host import count_usable_cores
from podscale.recipe import Data, Recipe
from podscale.training.compilation import compile_train_step
from podscale.training.program import Program
from podscale.training.setup import resolve

WARM_UP = 3  # calls that are not timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--copies", type=int, default=40, help="copies of each file")
    parser.add_argument("--images", type=int, default=256, help="images a batch")
    parser.add_argument(
        "--calls", type=int, default=12, help="timed calls of the compiled step; each is several updates"
    )
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--model", default="resnet50")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="podscale-feed-") as folder:
        files = Path(folder) / "files"
        copy_files(arguments.folder, files, arguments.copies)
        indexes = {"files as they are": open_index(Data(source="folder", path=str(files))).train}
        for name, options in {"tiled without loss": [], "tiled, at most 400 px": ["--longest", "400"]}.items():
            indexes[name] = open_index(Data(source="tar", path=prepare_files(files, options))).train
        compare(arguments, indexes)


def copy_files(folder: Path, files: Path, copies: int) -> None:
    """Copy the JPEGs below a folder, each under many names; a few are for validation, which a data set must have."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise SystemExit(f"no .jpg or .jpeg files below {folder}")
    for split, times in (("train", copies), ("val", 1)):
        for number in range(2):
            (files / split / f"class{number}").mkdir(parents=True)
        for i, path in enumerate(paths if split == "train" else paths[:2]):
            for k in range(times):
                shutil.copyfile(path, files / split / f"class{i % 2}" / f"{k:03}-{i:05}.jpg")


def prepare_files(files: Path, options: list[str]) -> str:
    target = files.with_name("-".join(["prepared", *options]).replace("--", ""))
    command = [sys.executable, "-m", "podscale", "data", "prepare", str(files), str(target), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(target)


def compare(arguments: argparse.Namespace, indexes: dict[str, Index]) -> None:
    count = len(indexes["files as they are"])
    recipe = make_recipe(arguments)
    program = resolve(recipe, pods.make_pod(jax.devices()[:1], "1x1"), Counts(count, 2, 2))
    call = compile_train_step(program)
    synthetic_rate = measure_rate(program, call, repeat(make_noise_batch(program)), arguments.calls)[0]
    cores = count_usable_cores()
    print(
        f"{jax.devices()[0].device_kind}, {cores} cores, {count:,} files, {arguments.model}, {arguments.images} images"
    )
    print(f"{'input':<40} {'images/s':>9} {'share':>6} {'waits':>6} {'idle':>6}")
    print(f"{'synthetic, on the device':<40} {synthetic_rate:9,.0f} {1:6.1%} {0:6.1%} {0:6.1%}", flush=True)
    samples = np.arange(count)
    inputs = dict(indexes)
    inputs["files as they are, cached encoded"] = indexes["files as they are"].with_cache("encoded", samples)
    inputs["files as they are, cached decoded"] = indexes["files as they are"].with_cache("decoded", samples)
    for name, index in inputs.items():
        if index.cache is not None:
            fill_cache(program, index)
        rate, waits = measure_rate(program, call, load_batches(program, index, arguments.calls), arguments.calls)
        share = rate / synthetic_rate
        print(f"{name:<40} {rate:9,.0f} {share:6.1%} {waits:6.1%} {max(0, 1 - share):6.1%}", flush=True)


def make_recipe(arguments: argparse.Namespace) -> Recipe:
    changes = {"batch.size": arguments.images, "batch.span": min(64, arguments.images), "data.lanes": 1}
    changes |= {"data.image_size": arguments.size, "model.name": arguments.model, "train.epochs": 1000}
    changes |= {"data.classes": 2, "data.train_samples": 0, "data.val_samples": 0}
    return recipes.override_recipe(recipes.load_recipe("resnet50-imagenet-4k"), changes)


def load_batches(program: Program, index: Index, calls: int) -> Iterator[prefetch.Batch]:
    steps = program.plan.steps_per_call
    ranges = [range(i * steps, (i + 1) * steps) for i in range(WARM_UP + calls)]
    with loader.load_train_batches(
        index, program.plan, ranges, pods.make_batch_sharding(program.mesh, axis=2)
    ) as batches:
        yield from batches


def fill_cache(program: Program, index: Index) -> None:
    """Put every image into the cache, by one pass that is not timed."""
    images = program.plan.steps_per_call * program.plan.recipe.batch.size
    for _ in load_batches(program, index, -(-len(index) // images) - WARM_UP + 1):
        pass
    assert index.cache is not None
    assert index.cache.is_filled.all()


def make_noise_batch(program: Program) -> prefetch.Batch:
    random, size, shape = np.random.default_rng(0), program.plan.recipe.data.image_size, program.plan.batch_shape
    images = random.integers(0, 256, (*shape, size, size, 3), np.uint8)
    sharding = pods.make_batch_sharding(program.mesh, axis=2)
    return prefetch.Batch(*jax.device_put((images, np.zeros(shape, np.int32)), sharding), shape[0])


def measure_rate(program: Program, call: Any, source: Iterator[prefetch.Batch], calls: int) -> tuple[float, float]:
    """Return images per second, and the share of the time spent waiting for batches."""
    state = program.init_state()
    wait_s, start, previous = 0.0, 0.0, None
    for i in range(WARM_UP + calls):
        if i == WARM_UP:
            jax.block_until_ready(state)
            wait_s, start = 0.0, time.perf_counter()
        wait_start = time.perf_counter()
        batch = next(source)
        wait_s += time.perf_counter() - wait_start
        state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
        jax.block_until_ready(previous)  # as training does: never more than one call ahead
        previous = metrics
    jax.block_until_ready(state)
    total_s = time.perf_counter() - start
    return calls * program.plan.steps_per_call * program.plan.recipe.batch.size / total_s, wait_s / total_s


if __name__ == "__main__":
    main()
