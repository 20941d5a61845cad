"""Claims, on one core, antialiased, against Pillow on the same files in the same run: training crops come at least 2.1
times as fast from JPEG files as they are, 2.6 times from losslessly tiled ones, 5 times from tiled ones of at most 400
pixels a side, 18 times from decoded pixels; with mean differences to Pillow's pixels of at most 0.1.

Every way does the whole training transform with the same boxes: read, decode, random-resized crop to 224 x 224, mirror,
uint8. The files are JPEGs anywhere below a folder; the boxes are those of `resized` crops of the first pass, in whole
pixels. Pillow is used as torchvision uses it: `Image.open`, `convert`, `crop`, `resize`, bilinear and antialiased. Its
resize of a part cannot see past the part's border as ours can, whence the largest differences. Peers that are not
installed are left out (`input_peers.py`). Each way has a process of its own, so that none suffers from the threads and
memory of another; they take turns for several rounds on one core, every file having been read before; medians of their
CPU time are compared, which a busy machine disturbs less than it does the clock on the wall. Differences are to the
pixels of Pillow; smaller pictures have other pixels, and no difference is given.

    python benchmarks/input.py FOLDER [--size 224] [--rounds 5] [--images 300] [--only WORD]
"""

import argparse
import functools
import io
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import input_peers
import numpy as np
from input_peers import Maker, Task, Way
from PIL import Image

from podscale.data import decode
from podscale.data.order import crop_boxes
from podscale.recipe import Augment

native = decode.native


@dataclass(frozen=True)
class Row:
    """How a way is made, in its process, and its task; `same` says whether the pixels should be Pillow's."""

    make: Maker
    task: Task
    antialiased: bool = True
    same: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=300, help="at most so many files")
    parser.add_argument("--only", default="", help="Pillow and the ways whose name has this word in it")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # inherited by all
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    task = task_of(arguments.folder, arguments.images, arguments.size)
    with tempfile.TemporaryDirectory() as folder:
        rows = {"Pillow": Row(input_peers.pillow, task), "podscale, plain twin": Row(plain, task)}
        rows |= our_rows(task, Path(folder))
        rows |= {name: Row(make, task, smooth) for name, (make, smooth) in input_peers.peers().items()}
        wanted = {name: row for name, row in rows.items() if name == "Pillow" or arguments.only in name}
        compare(wanted, arguments.rounds)


def task_of(folder: Path, most: int, size: int) -> Task:
    paths = sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:most]
    if not paths:
        raise SystemExit(f"no .jpg or .jpeg files below {folder}")
    headers = [decode.read_header(io.BytesIO(Path(path).read_bytes()), path) for path in paths]
    sizes = np.array([(header.width, header.height) for header in headers], np.int32)
    samples = np.arange(len(paths))
    boxes, flips = crop_boxes(Augment(), 0, np.zeros_like(samples), samples, sizes, size)
    return Task(paths, boxes, flips, size)


class Runner:
    """A way in a process of its own."""

    def __init__(self, name: str, row: Row) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(other, row), daemon=True)
        self.process.start()
        other.close()
        self.failure = self.ask("begin")
        if self.failure:
            print(f"{name} is left out: {self.failure}")

    def ask(self, what: str) -> Any:
        self.pipe.send(what)
        try:
            return self.pipe.recv()
        except EOFError:
            return "its process died"


def serve(pipe: Any, row: Row) -> None:
    pipe.recv()
    try:
        way = row.make()
        out = np.zeros((len(row.task.paths), row.task.size, row.task.size, 3), np.uint8)
        way(row.task, out)  # warms up
    except Exception as error:  # a peer may be absent, or broken in any way
        pipe.send((str(error).strip().splitlines() or [type(error).__name__])[0])
        return
    pipe.send("")
    while pipe.recv() == "run":
        began = time.process_time()
        way(row.task, out)
        pipe.send(time.process_time() - began)
    pipe.send(out)


def compare(rows: dict[str, Row], rounds: int) -> None:
    """One line for each way, in one run."""
    runners = {name: Runner(name, row) for name, row in rows.items()}
    runners = {name: runner for name, runner in runners.items() if not runner.failure}
    seconds = [{name: runner.ask("run") for name, runner in runners.items()} for _ in range(rounds)]
    reference = runners["Pillow"].ask("pixels").astype(np.int16)
    count, size = reference.shape[:2]
    rates = {name: count / statistics.median(turn[name] for turn in seconds) for name in runners}
    print(f"{count} files, {size} px, one core, median of {rounds} rounds")
    print(f"{'way':<48}  {'images/s':>8}  {'ratio':>5}  {'antialiased':>11}  {'mean diff.':>10}  {'max':>3}")
    for name, runner in runners.items():
        apart = np.abs((runner.ask("pixels") if name != "Pillow" else reference) - reference)
        difference = f"{apart.mean():10.4f}  {apart.max():3}" if rows[name].same else ""
        smooth = "yes" if rows[name].antialiased else "no"
        print(f"{name:<48}  {rates[name]:8,.0f}  {rates[name] / rates['Pillow']:5.2f}  {smooth:>11}  {difference}")


# --- our own ways ----------------------------------------------------------------------------------------------------


def our_rows(task: Task, folder: Path) -> dict[str, Row]:
    if native is None or decode.decoder() != "native":
        print(f"the native decoder is left out: {decode.decoder()}")
        return {}
    pictures = [decode.decode(Path(path).read_bytes(), path) for path in task.paths]
    tiled = [native.tile(Path(path).read_bytes(), decode.MAX_PIXELS) for path in task.paths]
    growth = sum(map(len, tiled)) / sum(Path(path).stat().st_size for path in task.paths) - 1
    rows = {
        "podscale, files as they are": Row(from_files, task),
        f"podscale, tiled files ({growth:+.1%} bytes)": Row(from_files, stored(task, folder / "tiled", tiled)),
        "podscale, PPM files": Row(from_files, stored(task, folder / "ppm", [ppm(picture) for picture in pictures])),
        "podscale, decoded pixels": Row(functools.partial(from_pixels, task.paths), task),
    }
    for side in (500, 400):
        images = [shrunk(picture, side) for picture in pictures]
        boxes = scaled(task, pictures, images)
        raw = stored(boxes, folder / f"ppm {side}", [ppm(image) for image in images])
        files = stored(boxes, folder / str(side), [native.tile(jpeg(image), decode.MAX_PIXELS) for image in images])
        rows[f"podscale, tiled files, q90 4:2:0, at most {side} px"] = Row(from_files, files, same=False)
        pixels = functools.partial(from_pixels, raw.paths)
        rows[f"podscale, decoded pixels, at most {side} px"] = Row(pixels, boxes, same=False)
    return rows


def stored(task: Task, folder: Path, contents: list[bytes]) -> Task:
    folder.mkdir()
    paths = [folder / str(i) for i in range(len(contents))]
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    return replace(task, paths=[str(path) for path in paths])


def shrunk(picture: np.ndarray, side: int) -> np.ndarray:
    """With its longer side of at most `side` pixels."""
    height, width = picture.shape[:2]
    share = min(side / max(width, height), 1)
    size = (max(round(width * share), 1), max(round(height * share), 1))
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))


def scaled(task: Task, before: list[np.ndarray], after: list[np.ndarray]) -> Task:
    """The same parts of smaller pictures, in whole pixels."""
    sizes = [np.array([picture.shape[1::-1] for picture in pictures]) for pictures in (before, after)]
    shares = sizes[1] / sizes[0]  # [n, 2]
    boxes = np.round(task.boxes * np.tile(shares, 2))
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    return replace(task, boxes=boxes)


def jpeg(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=90, subsampling="4:2:0")
    return file.getvalue()


def ppm(picture: np.ndarray) -> bytes:
    return b"P6\n%d %d\n255\n" % picture.shape[1::-1] + picture.tobytes()


def plain() -> Way:
    def way(task: Task, out: np.ndarray) -> None:
        for i, path in enumerate(task.paths):
            decode.crop(Path(path).read_bytes(), task.boxes[i], bool(task.flips[i]), task.size, out[i], path)

    return way


def from_files() -> Way:
    assert native is not None
    crop = native.crop

    def way(task: Task, out: np.ndarray) -> None:
        n = len(task.paths)
        where = (task.paths, np.zeros(n, np.int64), np.full(n, -1, np.int64))
        left = crop(*where, task.boxes, task.flips, task.size, out, 1, decode.MAX_PIXELS)
        for i, _ in left:
            data = Path(task.paths[i]).read_bytes()
            decode.crop(data, task.boxes[i], bool(task.flips[i]), task.size, out[i], task.paths[i])

    return way


def from_pixels(paths: list[str]) -> Way:
    """Decoded pictures one after another in memory, as a cache holds them."""
    assert native is not None
    crop = native.crop_pixels
    pictures = [decode.decode(Path(path).read_bytes(), path) for path in paths]
    memory = np.concatenate([picture.ravel() for picture in pictures])
    sizes = np.array([picture.shape[1::-1] for picture in pictures], np.int32)
    lengths = np.array([picture.size for picture in pictures], np.int64)
    offsets = np.cumsum(lengths) - lengths

    def way(task: Task, out: np.ndarray) -> None:
        assert not crop(memory, offsets, sizes, task.boxes, task.flips, task.size, out, 1)

    return way


if __name__ == "__main__":
    main()
