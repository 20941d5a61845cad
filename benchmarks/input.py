"""Claim: on one core, the native decoder makes training crops at least 2.1 times as fast as Pillow, of the same pixels.

Every decoder does the whole training transform on the same files with the same boxes: read, decode, random-resized crop
to 224 x 224, mirror, uint8. The files are JPEGs anywhere below a folder; the boxes are those of `resized` crops of the
first pass. Pillow is used as torchvision uses it: `Image.open`, `convert`, `crop`, `resize`, bilinear and antialiased.
OpenCV, where it is installed, resizes without antialiasing, so it does less. The decoders take turns for several rounds
on one core, every file having been read before; medians of their CPU time are compared, which a busy machine disturbs
less than it does the clock on the wall. Differences are to Pillow's resize of the box.

    python benchmarks/input.py FOLDER [--size 224] [--rounds 5] [--images 300]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from podscale.data import decode
from podscale.data.index import Index, files_index
from podscale.data.order import crop_boxes
from podscale.recipe import Augment

Decoder = Callable[[Index, np.ndarray, np.ndarray, int, np.ndarray], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=300, help="at most so many files")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    index = index_of(arguments.folder, arguments.images)
    samples = np.arange(len(index))
    boxes, flips = crop_boxes(Augment(), 0, np.zeros_like(samples), samples, index.sizes, arguments.size)
    compare(index, boxes, flips, arguments.size, arguments.rounds)


def index_of(folder: Path, most: int) -> Index:
    paths = sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:most]
    if not paths:
        raise SystemExit(f"no .jpg or .jpeg files below {folder}")
    return files_index(paths)


def compare(index: Index, boxes: np.ndarray, flips: np.ndarray, size: int, rounds: int) -> None:
    """One table row for each decoder, in one run."""
    decoders: dict[str, Decoder] = {"Pillow": pillow, "podscale, plain": plain}
    if decode.decoder() == "native":
        decoders["podscale, native"] = native
    else:
        print(f"the native decoder is left out: {decode.decoder()}")
    try:
        import cv2

        cv2.setNumThreads(1)
        decoders["OpenCV (no antialiasing)"] = opencv
    except ImportError:
        print("OpenCV is left out: it is not installed")
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    pixels = {name: np.zeros((len(index), size, size, 3), np.uint8) for name in decoders}
    for _ in range(rounds + 1):
        for name, run in decoders.items():
            began = time.process_time()
            run(index, boxes, flips, size, pixels[name])
            seconds[name].append(time.process_time() - began)
    rates = {name: len(index) / statistics.median(times[1:]) for name, times in seconds.items()}  # the first warms up
    print(f"{len(index)} files, {size} px, one core, median of {rounds} rounds")
    print(f"{'decoder':<26}  {'images/s':>8}  {'ratio':>5}  {'mean diff.':>10}  {'max diff.':>9}")
    for name, rate in rates.items():
        apart = np.abs(pixels[name].astype(np.int16) - pixels["podscale, plain"])
        print(f"{name:<26}  {rate:8,.0f}  {rate / rates['Pillow']:5.2f}  {apart.mean():10.4f}  {apart.max():9}")


def plain(index: Index, boxes: np.ndarray, flips: np.ndarray, size: int, out: np.ndarray) -> None:
    os.environ["PODSCALE_DECODER"] = "plain"
    decode.crop_batch(index, np.arange(len(index)), boxes, flips, size, out)
    del os.environ["PODSCALE_DECODER"]


def native(index: Index, boxes: np.ndarray, flips: np.ndarray, size: int, out: np.ndarray) -> None:
    decode.crop_batch(index, np.arange(len(index)), boxes, flips, size, out)


def pillow(index: Index, boxes: np.ndarray, flips: np.ndarray, size: int, out: np.ndarray) -> None:
    for i, path in enumerate(map(index.name, range(len(index)))):
        with open(path, "rb") as file:
            picture = Image.open(file).convert("RGB")
        picture = picture.crop(tuple(boxes[i].astype(int).tolist())).resize((size, size), Image.Resampling.BILINEAR)
        out[i] = np.asarray(picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flips[i] else picture)


def opencv(index: Index, boxes: np.ndarray, flips: np.ndarray, size: int, out: np.ndarray) -> None:
    import cv2

    for i, path in enumerate(map(index.name, range(len(index)))):
        picture = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
        left, top, right, bottom = boxes[i].astype(int)
        part = cv2.resize(picture[top:bottom, left:right], (size, size), interpolation=cv2.INTER_LINEAR)
        out[i] = cv2.cvtColor(cv2.flip(part, 1) if flips[i] else part, cv2.COLOR_BGR2RGB)


if __name__ == "__main__":
    main()
