"""Check a data set: read and decode every image before a training does.

The kinds of problems are:

- `unreadable`: a class folder or a shard that cannot be scanned, of which nothing was checked; or an entry of a class
  folder that is named like an image but is no file, which every tool ignores;
- `empty class`, `one class`: a class folder without images, which is skipped; a data set with a single class;
- `empty file`, `corrupt`: no bytes, or bytes that no decoder turns into a whole image;
- `huge`: an image that takes more memory than allowed, or too many scans (`podscale.data.limits`);
- `mislabelled`: the extension of the name does not match the format of the content;
- `two labels`, `in both splits`, `twice`: the same bytes in two classes, in training and validation, or twice in one.

An image has at most one problem of its own and one as a copy: the first in this list that applies. A class with many
more images than another is reported, but is not a problem.
"""

import hashlib
import io
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from podscale.config.json_types import JsonObject
from podscale.data import decode
from podscale.data.bucket.files import BucketFiles
from podscale.data.files import Files, Progress
from podscale.data.index import catalog
from podscale.data.index.bucket_index import open_folder
from podscale.data.index.table import SPLITS
from podscale.errors import StorageError, UserError
from podscale.processes.host import count_usable_cores
from podscale.storage.files import open_regular

IMAGES_PER_TASK = 16
DIGEST_BYTES = 16
MAX_BYTES = 2**31  # of a file that is read
UNEVEN_RATIO = 2.5  # times as many images in one class as in another
_MAGIC_FORMATS = ((b"\xff\xd8", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"), (b"RIFF", "WebP"), (b"P6", "PPM"))
_EXTENSION_FORMATS = MappingProxyType({"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WebP", "ppm": "PPM"})


class Problem(NamedTuple):
    """A problem of a data set, and where it is."""

    kind: str
    split: str
    name: str
    why: str


@dataclass(frozen=True)
class _TaskResult:
    """The result of checking some of the samples."""

    digests: NDArray[np.uint8]  # [n, DIGEST_BYTES]; zeros where a sample could not be read
    problems: list[Problem]


def check_data_set(
    path: str,
    kind: str = "",
    progress: Progress | None = None,
    threads: int = 0,
    max_image_bytes: int = decode.MAX_IMAGE_BYTES,
) -> JsonObject:
    """Decode all images of the data set in a folder and list its problems.

    Args:
        path: folder of the data set.
        kind: "folder", "tar", "tfrecord" or "parquet"; detected if empty.
        progress: called with what is counted, how many are done, and of how many.
        threads: number of threads; 0 for one per usable core.
        max_image_bytes: memory that decoding one image may take.

    Returns:
        A summary that JSON can hold: path, source, number of images by split, whether the data set is clean, problems
        ("findings") and their number by kind, balance of the classes, and seconds.
    """
    start, root = time.monotonic(), open_folder(path, "the data set")
    kind = catalog.detect_kind(root, kind)
    splits, classes, left_out = catalog.list_samples(kind, root, progress, max_image_bytes)
    problems = [Problem(*part) for part in left_out]
    if len(classes) == 1:
        why = f"{path} holds images of one class only, {classes[0]}; a classifier needs at least two"
        problems.append(Problem("one class", SPLITS[0], path, why))
    total, done, digests = sum(len(files.table) for files in splits.values()), 0, {}
    with ThreadPoolExecutor(threads or count_usable_cores(), "podscale-check") as pool:
        for split, files in splits.items():
            parts = []
            tasks = _split_tasks(len(files.table))
            for result in pool.map(lambda samples, s=split, f=files: _check_samples(s, f, samples), tasks):
                parts.append(result.digests)
                problems += result.problems
                done += len(result.digests)
                if progress is not None:
                    progress("checking images", done, total)
            digests[split] = np.concatenate(parts)
    problems += _find_copies(splits, digests, classes)
    return {
        "path": path,
        "source": kind,
        "images": {split: len(files.table) for split, files in splits.items()},
        "clean": not problems,
        "counts": dict(Counter(problem.kind for problem in problems)),
        "findings": [problem._asdict() for problem in problems],
        "classes": {split: _measure_balance(files, classes) for split, files in splits.items()},
        "seconds": time.monotonic() - start,
    }


def _split_tasks(n: int) -> list[range]:
    return [range(start, min(start + IMAGES_PER_TASK, n)) for start in range(0, n, IMAGES_PER_TASK)]


def _check_samples(split: str, files: Files, samples: range) -> _TaskResult:
    """Read and decode samples. The decoder and the digest release Python's global interpreter lock."""
    digests, problems = np.zeros((len(samples), DIGEST_BYTES), np.uint8), []
    for i, sample in enumerate(samples):
        name = files.name(sample)
        try:
            data = _read_sample(files, sample, name)
            problem = _find_problem(data, name, files.max_image_bytes)
        except StorageError:
            raise
        except UserError as error:
            problem = ("corrupt", str(error))
        else:
            digests[i] = np.frombuffer(hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest(), np.uint8)
        if problem:
            problems.append(Problem(problem[0], split, name, problem[1]))
    return _TaskResult(digests, problems)


def _read_sample(files: Files, sample: int, name: str) -> bytes:
    if files.packed or isinstance(files, BucketFiles):
        return files.read(sample)
    try:
        with open_regular(name) as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise UserError(f"cannot read {name}: it has more than {MAX_BYTES} bytes; replace or remove it")
            return file.read()
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}; replace or remove it") from None


def _find_problem(data: bytes, name: str, max_bytes: int) -> tuple[str, str] | None:
    """Return kind and message of an image's problem, if it has one."""
    if not data:
        return "empty file", f"{name} has no bytes; replace or remove it"
    try:
        decode.read_header(io.BytesIO(data), name, max_bytes)
        decode.decode_image(data, name, max_bytes)
    except decode.TooLargeError as error:
        return "huge", str(error)
    except UserError as error:
        return "corrupt", str(error)
    expected, actual = _EXTENSION_FORMATS.get(name.rpartition(".")[2].lower()), detect_format(data)
    if expected and expected != actual:
        return "mislabelled", f"{name} is a {actual} file; rename it"
    return None


def detect_format(data: bytes) -> str:
    """Return the format of an image, by its first bytes.

    >>> detect_format(b"P6 1 1 255 abc")
    'PPM'
    """
    return next((name for start, name in _MAGIC_FORMATS if data.startswith(start)), "unknown")


# --- copies ----------------------------------------------------------------------------------------------------------


def _find_copies(
    splits: dict[str, Files], digests: dict[str, NDArray[np.uint8]], classes: tuple[str, ...]
) -> Iterator[Problem]:
    """Yield a problem for each copy of an image after the first, which the message names too."""
    every = np.concatenate([digests[split] for split in SPLITS])
    labels = np.concatenate([splits[split].table.labels for split in SPLITS])
    first_val = len(digests[SPLITS[0]])

    def locate(sample: int) -> tuple[str, str]:
        split = SPLITS[int(sample >= first_val)]
        return split, splits[split].name(sample - first_val * (sample >= first_val))

    keys = every.view(f"V{DIGEST_BYTES}").ravel()
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero((keys[order][1:] == keys[order][:-1]) & every[order][1:].any(axis=1)) + 1
    first = order.copy()
    for at in same.tolist():  # in order, so that a third copy refers to the first
        first[at] = first[at - 1]
    for at in same.tolist():
        original, copy = int(first[at]), int(order[at])
        (split, name), (_, before) = locate(copy), locate(original)
        if labels[original] != labels[copy]:
            both = f"{classes[labels[original]]} ({before}) and {classes[labels[copy]]} ({name})"
            yield Problem("two labels", split, name, f"an image has two labels, {both}; remove the wrong one")
        elif original < first_val <= copy:
            yield Problem("in both splits", split, name, f"{name} is also in training, as {before}; remove one of them")
        else:
            yield Problem("twice", split, name, f"{name} is the same as {before}; remove one of them")


def _measure_balance(files: Files, classes: tuple[str, ...]) -> JsonObject:
    """Return the smallest and the largest class, and whether they differ so much that it is reported."""
    counts = np.bincount(files.table.labels, minlength=len(classes))
    fewest, most = int(counts.argmin()), int(counts.argmax())
    return {
        "fewest": [classes[fewest], int(counts[fewest])],
        "most": [classes[most], int(counts[most])],
        "uneven": bool(counts[most] >= UNEVEN_RATIO * counts[fewest]),
    }
