"""Claims, on one core, antialiased, against Pillow on the same files in the same run: training crops are made at least
2.5 times as fast from JPEG files as they are, 3.3 times from losslessly tiled ones, 6 times from tiled ones of at most
400 pixels a side, 20 times from decoded pixels; with mean differences to Pillow's pixels of at most 0.1.

Every method does the whole training transform with the same boxes: read, decode, random-resized crop to 224 x 224,
flip, uint8. The files are JPEGs anywhere below a folder; the boxes are those of `resized` crops of the first pass, in
whole pixels. Pillow is used as torchvision uses it: `Image.open`, `convert`, `crop`, `resize`, bilinear and
antialiased. Its resize of a part cannot use pixels past the part's border as ours can, which causes the largest
differences. Peers that are not installed are left out (`input_peers.py`). Each method has a process of its own, so that
none is slowed down by the threads and memory of another; they take turns for several rounds on one core, after every
file has been read once. Medians of their CPU time are compared, which a busy machine disturbs less than wall time.
Differences are to the pixels of Pillow; smaller images have other pixels, and no difference is given.

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
from input_peers import CropMethod, MethodFactory, Task
from PIL import Image

from podscale.data import decode
from podscale.data.order import compute_crop_boxes
from podscale.recipe import Augment

native = decode.native


@dataclass(frozen=True)
class Row:
    """A method, made in its own process, and its task; `same` says whether the pixels should be Pillow's."""

    make: MethodFactory
    task: Task
    antialiased: bool = True
    same: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=300, help="at most this many files")
    parser.add_argument("--only", default="", help="only Pillow and the methods whose name contains this")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # inherited by all processes
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    task = make_task(arguments.folder, arguments.images, arguments.size)
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "Pillow": Row(input_peers.make_pillow, task),
            "podscale, reference implementation": Row(make_reference, task),
        }
        rows |= make_podscale_rows(task, Path(folder))
        rows |= {name: Row(make, task, smooth) for name, (make, smooth) in input_peers.list_peers().items()}
        selected = {name: row for name, row in rows.items() if name == "Pillow" or arguments.only in name}
        compare(selected, arguments.rounds)


def make_task(folder: Path, limit: int, size: int) -> Task:
    paths = sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:limit]
    if not paths:
        raise SystemExit(f"no .jpg or .jpeg files below {folder}")
    headers = [decode.read_header(io.BytesIO(Path(path).read_bytes()), path) for path in paths]
    sizes = np.array([(header.width, header.height) for header in headers], np.int32)
    samples = np.arange(len(paths))
    boxes, flips = compute_crop_boxes(Augment(), 0, np.zeros_like(samples), samples, sizes, size)
    return Task(paths, boxes, flips, size)


class Runner:
    """A method in a process of its own."""

    def __init__(self, name: str, row: Row) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(other, row), daemon=True)
        self.process.start()
        other.close()
        self.failure = self.request("start")
        if self.failure:
            print(f"{name} is left out: {self.failure}")

    def request(self, command: str) -> Any:
        self.pipe.send(command)
        try:
            return self.pipe.recv()
        except EOFError:
            return "its process died"


def serve(pipe: Any, row: Row) -> None:
    pipe.recv()
    try:
        crop_files = row.make()
        out = np.zeros((len(row.task.paths), row.task.size, row.task.size, 3), np.uint8)
        crop_files(row.task, out)  # warm-up
    except Exception as error:  # a peer may be absent, or broken in any way
        pipe.send((str(error).strip().splitlines() or [type(error).__name__])[0])
        return
    pipe.send("")
    while pipe.recv() == "run":
        start = time.process_time()
        crop_files(row.task, out)
        pipe.send(time.process_time() - start)
    pipe.send(out)


def compare(rows: dict[str, Row], rounds: int) -> None:
    """Print one line for each method."""
    runners = {name: Runner(name, row) for name, row in rows.items()}
    runners = {name: runner for name, runner in runners.items() if not runner.failure}
    seconds = [{name: runner.request("run") for name, runner in runners.items()} for _ in range(rounds)]
    reference = runners["Pillow"].request("pixels").astype(np.int16)
    count, size = reference.shape[:2]
    rates = {name: count / statistics.median(turn[name] for turn in seconds) for name in runners}
    print(f"{count} files, {size} px, one core, median of {rounds} rounds")
    print(f"{'method':<48}  {'images/s':>8}  {'ratio':>5}  {'antialiased':>11}  {'mean diff.':>10}  {'max':>3}")
    for name, runner in runners.items():
        distance = np.abs((runner.request("pixels") if name != "Pillow" else reference) - reference)
        difference = f"{distance.mean():10.4f}  {distance.max():3}" if rows[name].same else ""
        smooth = "yes" if rows[name].antialiased else "no"
        print(f"{name:<48}  {rates[name]:8,.0f}  {rates[name] / rates['Pillow']:5.2f}  {smooth:>11}  {difference}")


# --- our own methods -------------------------------------------------------------------------------------------------


def make_podscale_rows(task: Task, folder: Path) -> dict[str, Row]:
    if native is None or decode.select_decoder() != "native":
        print(f"the native decoder is left out: {decode.select_decoder()}")
        return {}
    images = [decode.decode_image(Path(path).read_bytes(), path) for path in task.paths]
    tiled = [native.tile(Path(path).read_bytes(), decode.MAX_IMAGE_BYTES) for path in task.paths]
    growth = sum(map(len, tiled)) / sum(Path(path).stat().st_size for path in task.paths) - 1
    rows = {
        "podscale, files as they are": Row(make_file_cropper, task),
        f"podscale, tiled files ({growth:+.1%} bytes)": Row(
            make_file_cropper, store_files(task, folder / "tiled", tiled)
        ),
        "podscale, PPM files": Row(
            make_file_cropper, store_files(task, folder / "ppm", [encode_ppm(image) for image in images])
        ),
        "podscale, decoded pixels": Row(functools.partial(make_pixel_cropper, task.paths), task),
    }
    for side in (500, 400):
        small_images = [shrink_image(image, side) for image in images]
        small_task = scale_boxes(task, images, small_images)
        raw = store_files(small_task, folder / f"ppm {side}", [encode_ppm(image) for image in small_images])
        files = store_files(
            small_task,
            folder / str(side),
            [native.tile(encode_jpeg(image), decode.MAX_IMAGE_BYTES) for image in small_images],
        )
        rows[f"podscale, tiled files, q90 4:2:0, at most {side} px"] = Row(make_file_cropper, files, same=False)
        pixels = functools.partial(make_pixel_cropper, raw.paths)
        rows[f"podscale, decoded pixels, at most {side} px"] = Row(pixels, small_task, same=False)
    return rows


def store_files(task: Task, folder: Path, contents: list[bytes]) -> Task:
    folder.mkdir()
    paths = [folder / str(i) for i in range(len(contents))]
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    return replace(task, paths=[str(path) for path in paths])


def shrink_image(image: np.ndarray, side: int) -> np.ndarray:
    """Return the image with its longer side of at most `side` pixels."""
    height, width = image.shape[:2]
    share = min(side / max(width, height), 1)
    size = (max(round(width * share), 1), max(round(height * share), 1))
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))


def scale_boxes(task: Task, before: list[np.ndarray], after: list[np.ndarray]) -> Task:
    """Return a task with the same parts of smaller images, in whole pixels."""
    sizes = [np.array([image.shape[1::-1] for image in images]) for images in (before, after)]
    shares = sizes[1] / sizes[0]  # [n, 2]
    boxes = np.round(task.boxes * np.tile(shares, 2))
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    return replace(task, boxes=boxes)


def encode_jpeg(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=90, subsampling="4:2:0")
    return file.getvalue()


def encode_ppm(image: np.ndarray) -> bytes:
    return b"P6\n%d %d\n255\n" % image.shape[1::-1] + image.tobytes()


def make_reference() -> CropMethod:
    def crop_files(task: Task, out: np.ndarray) -> None:
        for i, path in enumerate(task.paths):
            decode.crop_image(Path(path).read_bytes(), task.boxes[i], bool(task.flips[i]), task.size, out[i], path)

    return crop_files


def make_file_cropper() -> CropMethod:
    assert native is not None
    crop = native.crop

    def crop_files(task: Task, out: np.ndarray) -> None:
        n = len(task.paths)
        sources = (task.paths, np.zeros(n, np.int64), np.full(n, -1, np.int64))
        rejected = crop(*sources, task.boxes, task.flips, task.size, out, 1, decode.MAX_IMAGE_BYTES)
        for i, _ in rejected:
            data = Path(task.paths[i]).read_bytes()
            decode.crop_image(data, task.boxes[i], bool(task.flips[i]), task.size, out[i], task.paths[i])

    return crop_files


def make_pixel_cropper(paths: list[str]) -> CropMethod:
    """Return a method that crops decoded images, one after another in memory as in a cache."""
    assert native is not None
    crop = native.crop_pixels
    images = [decode.decode_image(Path(path).read_bytes(), path) for path in paths]
    memory = np.concatenate([image.ravel() for image in images])
    sizes = np.array([image.shape[1::-1] for image in images], np.int32)
    lengths = np.array([image.size for image in images], np.int64)
    offsets = np.cumsum(lengths) - lengths

    def crop_files(task: Task, out: np.ndarray) -> None:
        assert not crop(memory, offsets, sizes, task.boxes, task.flips, task.size, out, 1)

    return crop_files


if __name__ == "__main__":
    main()
