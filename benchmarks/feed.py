"""Claim: 16 cores feed one H200. Training from prepared files or from the cache runs at 95 % of made-up data's rate.

ResNet-50 at 224 px, LARS, bfloat16, trained on real JPEG files by the real loader and the real step; beside it, in the
same process and with the same compiled step, the same training on made-up pictures that are on the device already.
The files are copies of the JPEGs below a folder, under so many names that nothing is used twice in a pass; the copies
are then prepared (`podscale data prepare`) in two more ways. "waits" is the share of the time in which the step waits
for its next batch; "idle" is the share in which the device does nothing because of the input: one minus the rate as a
share of the rate without any.

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
from podscale.training.setup import Setup, assemble

WARM_UP = 3  # calls that are not timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--copies", type=int, default=40, help="names for each file")
    parser.add_argument("--images", type=int, default=256, help="images a batch")
    parser.add_argument(
        "--calls", type=int, default=12, help="timed calls of the compiled step; each is several updates"
    )
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--model", default="resnet50")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="podscale-feed-") as place:
        files = Path(place) / "files"
        copy(arguments.folder, files, arguments.copies)
        indexes = {"files as they are": open_index(Data(source="folder", path=str(files))).train}
        for name, options in {"tiled without loss": [], "tiled, at most 400 px": ["--longest", "400"]}.items():
            indexes[name] = open_index(Data(source="tar", path=prepared(files, options))).train
        compare(arguments, indexes)


def copy(folder: Path, files: Path, copies: int) -> None:
    """The JPEGs below a folder, each under many names; a few of them validate, as a data set must have some."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise SystemExit(f"no .jpg or .jpeg files below {folder}")
    for split, times in (("train", copies), ("val", 1)):
        for number in range(2):
            (files / split / f"class{number}").mkdir(parents=True)
        for i, path in enumerate(paths if split == "train" else paths[:2]):
            for k in range(times):
                shutil.copyfile(path, files / split / f"class{i % 2}" / f"{k:03}-{i:05}.jpg")


def prepared(files: Path, options: list[str]) -> str:
    target = files.with_name("-".join(["prepared", *options]).replace("--", ""))
    command = [sys.executable, "-m", "podscale", "data", "prepare", str(files), str(target), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(target)


def compare(arguments: argparse.Namespace, indexes: dict[str, Index]) -> None:
    count = len(indexes["files as they are"])
    recipe = recipe_for(arguments)
    job = assemble(recipe, pods.make_pod(jax.devices()[:1], "1x1"), Counts(count, 2, 2))
    call = compile_train_step(job)
    made_up = rate(job, call, repeat(batch_of_noise(job)), arguments.calls)[0]
    cores = count_usable_cores()
    print(
        f"{jax.devices()[0].device_kind}, {cores} cores, {count:,} files, {arguments.model}, {arguments.images} images"
    )
    print(f"{'input':<40} {'images/s':>9} {'share':>6} {'waits':>6} {'idle':>6}")
    print(f"{'made up, on the device':<40} {made_up:9,.0f} {1:6.1%} {0:6.1%} {0:6.1%}", flush=True)
    every = np.arange(count)
    ways = dict(indexes)
    ways["files as they are, kept encoded"] = indexes["files as they are"].with_cache("encoded", every)
    ways["files as they are, kept decoded"] = indexes["files as they are"].with_cache("decoded", every)
    for name, index in ways.items():
        if index.cache is not None:
            fill(job, index)
        found, waits = rate(job, call, batches(job, index, arguments.calls), arguments.calls)
        share = found / made_up
        print(f"{name:<40} {found:9,.0f} {share:6.1%} {waits:6.1%} {max(0, 1 - share):6.1%}", flush=True)


def recipe_for(arguments: argparse.Namespace) -> Recipe:
    changes = {"batch.size": arguments.images, "batch.span": min(64, arguments.images), "data.lanes": 1}
    changes |= {"data.image_size": arguments.size, "model.name": arguments.model, "train.epochs": 1000}
    changes |= {"data.classes": 2, "data.train_samples": 0, "data.val_samples": 0}
    return recipes.override_recipe(recipes.load_recipe("resnet50-imagenet-4k"), changes)


def batches(job: Setup, index: Index, calls: int) -> Iterator[prefetch.Batch]:
    steps = job.plan.steps_per_call
    ranges = [range(i * steps, (i + 1) * steps) for i in range(WARM_UP + calls)]
    with loader.load_train_batches(index, job.plan, ranges, pods.make_batch_sharding(job.mesh, axis=2)) as made:
        yield from made


def fill(job: Setup, index: Index) -> None:
    """One pass, which is not timed, puts every picture into the cache."""
    images = job.plan.steps_per_call * job.recipe.batch.size
    for _ in batches(job, index, -(-len(index) // images) - WARM_UP + 1):
        pass
    assert index.cache is not None
    assert index.cache.is_filled.all()


def batch_of_noise(job: Setup) -> prefetch.Batch:
    random, size, shape = np.random.default_rng(0), job.recipe.data.image_size, job.plan.batch_shape
    images = random.integers(0, 256, (*shape, size, size, 3), np.uint8)
    sharding = pods.make_batch_sharding(job.mesh, axis=2)
    return prefetch.Batch(*jax.device_put((images, np.zeros(shape, np.int32)), sharding), shape[0])


def rate(job: Setup, call: Any, source: Iterator[prefetch.Batch], calls: int) -> tuple[float, float]:
    """Images a second, and the share of the time spent waiting for batches."""
    state = jax.tree.map(lambda array: array.copy(), job.state)  # the call takes over what it is given
    waited, began, before = 0.0, 0.0, None
    for i in range(WARM_UP + calls):
        if i == WARM_UP:
            jax.block_until_ready(state)
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch = next(source)
        waited += time.perf_counter() - asked
        state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
        jax.block_until_ready(before)  # as training does: never more than one call ahead
        before = metrics
    jax.block_until_ready(state)
    spent = time.perf_counter() - began
    return calls * job.plan.steps_per_call * job.recipe.batch.size / spent, waited / spent


if __name__ == "__main__":
    main()
