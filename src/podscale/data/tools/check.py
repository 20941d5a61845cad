"""Check: every picture of a data set read and decoded, before a training meets it.

What is wrong with a data set, by kind:

- `unreadable`: a class folder or a shard that cannot be scanned; nothing in it was looked at;
- `empty`, `corrupt`: no bytes, or bytes that no decoder makes a whole picture of;
- `huge`: a header that asks for more pixels than are ever allocated, or a file of more bytes than any picture has;
- `mislabelled`: a name that says another format than the content is;
- `in both splits`, `two labels`, `twice`: the same bytes in training and validation, in two classes, or twice in one.

A picture has one finding of its own at most, and one of its copies, the first of these that holds. Many more pictures
of one class than of another are told, but are not wrong.
"""

import hashlib
import io
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from podscale.data import decode
from podscale.data.files import Files, Progress
from podscale.data.index import catalog
from podscale.data.index.table import SPLITS
from podscale.errors import UserError

PICTURES_PER_TASK = 16
DIGEST_BYTES = 16
MOST_BYTES = 2**31  # of a file that is read to be looked at
UNEVEN = 10  # times as many pictures in one class as in another
_FORMATS = ((b"\xff\xd8", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"), (b"RIFF", "WebP"), (b"P6", "PPM"))
_NAMED = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WebP", "ppm": "PPM"}


class Finding(NamedTuple):
    """Something that is wrong, and with what."""

    kind: str
    split: str
    name: str
    why: str


@dataclass(frozen=True)
class _Looked:
    """What was found in a part of the samples."""

    digests: NDArray[np.uint8]  # [n, DIGEST_BYTES]; zeros where there was nothing to read
    findings: list[Finding]


def check(path: str, kind: str = "", progress: Progress | None = None, threads: int = 0) -> dict[str, Any]:
    """Decodes all pictures of the data set in a folder, in as many threads as there are CPUs; says what is wrong."""
    began, root = time.monotonic(), Path(path)
    kind = catalog.kind_of(root, kind)
    splits, classes, unreadable = catalog.listed(kind, root, progress)
    findings = [Finding("unreadable", split, place, why) for split, place, why in unreadable]
    total, done, digests = sum(len(files.table) for files in splits.values()), 0, {}
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), "podscale-check") as pool:
        for split, files in splits.items():
            parts = []
            for part in pool.map(lambda samples, s=split, f=files: _look(s, f, samples), _tasks(len(files.table))):
                parts.append(part.digests)
                findings += part.findings
                done += len(part.digests)
                if progress is not None:
                    progress("checking pictures", done, total)
            digests[split] = np.concatenate(parts)
    findings += _copies(splits, digests, classes)
    return {
        "path": path,
        "source": kind,
        "pictures": {split: len(files.table) for split, files in splits.items()},
        "clean": not findings,
        "counts": dict(Counter(finding.kind for finding in findings)),
        "findings": [finding._asdict() for finding in findings],
        "classes": {split: _balance(files, classes) for split, files in splits.items()},
        "seconds": time.monotonic() - began,
    }


def _tasks(n: int) -> list[range]:
    return [range(start, min(start + PICTURES_PER_TASK, n)) for start in range(0, n, PICTURES_PER_TASK)]


def _look(split: str, files: Files, samples: range) -> _Looked:
    """Reads and decodes; the decoder and the digest leave Python's lock to other threads."""
    digests, findings = np.zeros((len(samples), DIGEST_BYTES), np.uint8), []
    for i, sample in enumerate(samples):
        name = files.name(sample)
        try:
            data = _read(files, sample, name)
            found = _wrong(data, name)
        except UserError as error:
            found = ("corrupt", str(error))
        else:
            digests[i] = np.frombuffer(hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest(), np.uint8)
        if found:
            findings.append(Finding(found[0], split, name, found[1]))
    return _Looked(digests, findings)


def _read(files: Files, sample: int, name: str) -> bytes:
    if files.packed:
        return files.read(sample)
    try:
        with open(name, "rb") as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise UserError(f"cannot read {name}: it has more than {MOST_BYTES} bytes; replace or remove it")
            return file.read()
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}; replace or remove it") from None


def _wrong(data: bytes, name: str) -> tuple[str, str] | None:
    """What is wrong with one picture, if anything."""
    if not data:
        return "empty", f"{name} has no bytes; replace or remove it"
    try:
        decode.read_header(io.BytesIO(data), name)
    except decode.TooLargeError as error:
        return "huge", str(error)
    except UserError as error:
        return "corrupt", str(error)
    try:
        decode.decode(data, name)
    except UserError as error:
        return "corrupt", str(error)
    said, real = _NAMED.get(name.rpartition(".")[2].lower()), format_of(data)
    if said and said != real:
        return "mislabelled", f"{name} is a {real} file; rename it"
    return None


def format_of(data: bytes) -> str:
    """The format of a picture, by its first bytes.

    >>> format_of(b"P6 1 1 255 abc")
    'PPM'
    """
    return next((name for start, name in _FORMATS if data.startswith(start)), "unknown")


# --- copies ----------------------------------------------------------------------------------------------------------


def _copies(
    splits: dict[str, Files], digests: dict[str, NDArray[np.uint8]], classes: tuple[str, ...]
) -> Iterator[Finding]:
    """Pictures that are there more than once; each copy after the first is told, with the first beside it."""
    every = np.concatenate([digests[split] for split in SPLITS])
    labels = np.concatenate([splits[split].table.labels for split in SPLITS])
    first_val = len(digests[SPLITS[0]])

    def place(sample: int) -> tuple[str, str]:
        split = SPLITS[int(sample >= first_val)]
        return split, splits[split].name(sample - first_val * (sample >= first_val))

    keys = every.view(f"V{DIGEST_BYTES}").ravel()
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero((keys[order][1:] == keys[order][:-1]) & every[order][1:].any(axis=1)) + 1
    first = order.copy()
    for at in same.tolist():  # in order, so that a third copy knows the first
        first[at] = first[at - 1]
    for at in same.tolist():
        one, other = int(first[at]), int(order[at])
        (split, name), (_, before) = place(other), place(one)
        if labels[one] != labels[other]:
            told = f"{classes[labels[one]]} as {before}, {classes[labels[other]]} as {name}"
            yield Finding("two labels", split, name, f"the same picture is {told}; remove one of them")
        elif one < first_val <= other:
            yield Finding("in both splits", split, name, f"{name} is also in training, as {before}; remove one of them")
        else:
            yield Finding("twice", split, name, f"{name} is the same as {before}; remove one of them")


def _balance(files: Files, classes: tuple[str, ...]) -> dict[str, Any]:
    """The smallest and the largest class, and whether they are too far apart to leave unsaid."""
    counts = np.bincount(files.table.labels, minlength=len(classes))
    fewest, most = int(counts.argmin()), int(counts.argmax())
    return {
        "fewest": [classes[fewest], int(counts[fewest])],
        "most": [classes[most], int(counts[most])],
        "uneven": bool(counts[most] > UNEVEN * counts[fewest]),
    }
