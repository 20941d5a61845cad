"""Claim: prepared data sets (`podscale data prepare`) are read several times as fast as Pillow reads the original files
on one core: at least 2.6 times without loss, 5 times with at most 400 pixels a side, 18 times as pixels of that size.

Prepares the JPEGs below a folder with every setting of the table, and times the whole training transform (read, decode,
random-resized crop, flip, uint8) by `crop.crop_batch` on each result, beside Pillow on the original files as
torchvision uses it. Everything runs in turn in one process on one core, for several rounds, after every file was read
once; medians of CPU time are compared. Bytes are those of the shards, labels and tar headers included.

    python benchmarks/prepare.py FOLDER [--size 224] [--rounds 5] [--images 300]
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from input_peers import Task, make_pillow

from podscale.data import crop, decode
from podscale.data.index.dataset import Index, open_index
from podscale.data.order import compute_crop_boxes
from podscale.data.tools.prepare import Settings, prepare_data_set
from podscale.recipe import Augment, Data

SETTINGS = {
    "nothing: without loss": Settings(),
    "`--quality 90 --subsampling 420`": Settings(quality=90, subsampling="420"),
    "`--longest 500`": Settings(longest=500),
    "`--longest 500 --quality 90`": Settings(longest=500, quality=90),
    "`--longest 400`": Settings(longest=400),
    "`--longest 400 --quality 90`": Settings(longest=400, quality=90),
    "`--raw`": Settings(raw=True),
    "`--raw --longest 400`": Settings(raw=True, longest=400),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=300, help="maximum number of files")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"decoder: {decode.select_decoder()}")
    with tempfile.TemporaryDirectory() as folder:
        root = link_images(arguments.folder, Path(folder) / "original", arguments.images)
        compare(root, arguments.size, arguments.rounds)


def link_images(folder: Path, root: Path, limit: int) -> Path:
    """Make an image folder of one class, whose training images are links to the JPEGs below `folder`."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:limit]
    if not paths:
        raise SystemExit(f"no .jpg or .jpeg files below {folder}")
    for split, part in (("train", paths), ("val", paths[:1])):
        (root / split / "photo").mkdir(parents=True)
        for number, path in enumerate(part):
            (root / split / "photo" / f"{number:05}.jpg").symlink_to(path.resolve())
    return root


def compare(root: Path, size: int, rounds: int) -> None:
    """Prepare the data set with every setting, time a pass over each result, and print the table."""
    original = open_index(Data(source="folder", path=str(root))).train
    original_bytes = int(original.count_encoded_bytes().sum())
    passes = {
        "Pillow, the files as they are": make_pillow_pass(original, size),
        "the files as they are": make_podscale_pass(original, size),
    }
    shares = dict.fromkeys(passes, 1.0)
    for number, (name, settings) in enumerate(SETTINGS.items()):
        folder = root.parent / str(number)
        start = time.process_time()
        prepare_data_set(root, folder, settings)
        print(f"prepared, {name}: {len(original) / (time.process_time() - start):.0f} images per second of one core")
        passes[name] = make_podscale_pass(open_index(Data(source="tar", path=str(folder))).train, size)
        shares[name] = sum(path.stat().st_size for path in folder.glob("train-*.tar")) / original_bytes
    for run_pass in passes.values():
        run_pass()  # warms up
    seconds = [{name: measure_cpu_time(run_pass) for name, run_pass in passes.items()} for _ in range(rounds)]
    median = {name: statistics.median(turn[name] for turn in seconds) for name in passes}
    peer = next(iter(median.values()))
    print(f"\n{len(original)} images, {size} px, one core, median of {rounds} rounds\n")
    print("| options | bytes | images/s | Pillow = 1 |\n| --- | ---: | ---: | ---: |")
    for name, time_s in median.items():
        print(f"| {name} | {shares[name]:.2f} | {len(original) / time_s:,.0f} | {peer / time_s:.1f} |")


def measure_cpu_time(run_pass: Callable[[], None]) -> float:
    """Return the seconds of CPU time of one pass."""
    start = time.process_time()
    run_pass()
    return time.process_time() - start


def compute_boxes(index: Index, size: int) -> tuple[np.ndarray, np.ndarray]:
    samples = np.arange(len(index))
    return compute_crop_boxes(Augment(), 0, np.zeros_like(samples), samples, index.sizes, size)


def make_podscale_pass(index: Index, size: int) -> Callable[[], None]:
    """Return a function that crops every image of the index once, by podscale."""
    boxes, flips = compute_boxes(index, size)
    out = np.zeros((len(index), size, size, 3), np.uint8)
    return lambda: crop.crop_batch(index, np.arange(len(index)), boxes, flips, out)


def make_pillow_pass(index: Index, size: int) -> Callable[[], None]:
    """Return a function that crops every image of the index once, by Pillow as torchvision uses it."""
    crop_with_pillow, out = make_pillow(), np.zeros((len(index), size, size, 3), np.uint8)
    task = Task([index.name(sample) for sample in range(len(index))], *compute_boxes(index, size), size)
    return lambda: crop_with_pillow(task, out)


if __name__ == "__main__":
    main()
