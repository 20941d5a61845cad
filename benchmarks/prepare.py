"""Claim: what `podscale data prepare` writes is read several times as fast as Pillow reads the original files, on one
core: at least 2.6 times without loss, 5 times with at most 400 pixels a side, 18 times as pixels of that size.

Prepares the JPEGs below a folder in every way of the table, and times the whole training transform (read, decode,
random-resized crop, mirror, uint8) by `cropping.crop_batch` on each result, beside Pillow on the original files as
torchvision uses it. Everything runs in turn in one process on one core, for several rounds, every file having been read
before; medians of CPU time are compared. Bytes are those of the shards, labels and tar headers included.

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
from input_peers import Task, pillow

from podscale.data import crop, decode
from podscale.data.index.dataset import Index, open_index
from podscale.data.order import crop_boxes
from podscale.data.tools.prepare import Settings, prepare
from podscale.recipe import Augment, Data

WAYS = {
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
    parser.add_argument("--images", type=int, default=300, help="at most so many files")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"decoder: {decode.decoder()}")
    with tempfile.TemporaryDirectory() as folder:
        compare(linked(arguments.folder, Path(folder) / "original", arguments.images), arguments.size, arguments.rounds)


def linked(folder: Path, root: Path, most: int) -> Path:
    """An image folder of one class, whose training pictures are the JPEGs below `folder`."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:most]
    if not paths:
        raise SystemExit(f"no .jpg or .jpeg files below {folder}")
    for split, part in (("train", paths), ("val", paths[:1])):
        (root / split / "photo").mkdir(parents=True)
        for number, path in enumerate(part):
            (root / split / "photo" / f"{number:05}.jpg").symlink_to(path.resolve())
    return root


def compare(root: Path, size: int, rounds: int) -> None:
    original = open_index(Data(source="folder", path=str(root))).train
    whole = int(original.encoded_bytes().sum())
    ways = {"Pillow, the files as they are": by_pillow(original, size), "the files as they are": ours(original, size)}
    shares = dict.fromkeys(ways, 1.0)
    for number, (name, settings) in enumerate(WAYS.items()):
        folder = root.parent / str(number)
        began = time.process_time()
        prepare(root, folder, settings)
        print(f"prepared, {name}: {len(original) / (time.process_time() - began):.0f} pictures per second of one core")
        ways[name] = ours(open_index(Data(source="tar", path=str(folder))).train, size)
        shares[name] = sum(path.stat().st_size for path in folder.glob("train-*.tar")) / whole
    for way in ways.values():
        way()  # warms up
    seconds = [{name: timed(way) for name, way in ways.items()} for _ in range(rounds)]
    median = {name: statistics.median(turn[name] for turn in seconds) for name in ways}
    peer = next(iter(median.values()))
    print(f"\n{len(original)} pictures, {size} px, one core, median of {rounds} rounds\n")
    print("| options | bytes | images/s | Pillow = 1 |\n| --- | ---: | ---: | ---: |")
    for name, taken in median.items():
        print(f"| {name} | {shares[name]:.2f} | {len(original) / taken:,.0f} | {peer / taken:.1f} |")


def timed(way: Callable[[], None]) -> float:
    began = time.process_time()
    way()
    return time.process_time() - began


def boxes_of(index: Index, size: int) -> tuple[np.ndarray, np.ndarray]:
    samples = np.arange(len(index))
    return crop_boxes(Augment(), 0, np.zeros_like(samples), samples, index.sizes, size)


def ours(index: Index, size: int) -> Callable[[], None]:
    boxes, flips = boxes_of(index, size)
    out = np.zeros((len(index), size, size, 3), np.uint8)
    return lambda: crop.crop_batch(index, np.arange(len(index)), boxes, flips, size, out)


def by_pillow(index: Index, size: int) -> Callable[[], None]:
    way, out = pillow(), np.zeros((len(index), size, size, 3), np.uint8)
    task = Task([index.name(sample) for sample in range(len(index))], *boxes_of(index, size), size)
    return lambda: way(task, out)


if __name__ == "__main__":
    main()
