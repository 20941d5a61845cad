"""Containers: what a data set on disk looks like, kind by kind. Found cheaply, scanned once, never unpacked.

A kind is a `Format`: `find` lists the places that hold samples (class folders, or shards) without looking into them,
`scan` says what is in one place, as a `Part`. Nothing here is trusted: every length is checked against the file before
anything is read by it, and every loop moves on by at least a byte.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from podscale.data.index.table import SPLITS, Strings
from podscale.errors import UserError

MOST_CLASSES = 2**20
CLASSES_FILE = "classes.txt"
SPLIT_WORDS = {"train": ("train",), "val": ("validation", "val", "test")}


@dataclass(frozen=True)
class Found:
    """The places of a data set, relative to its root, by split; what the splits are called; and its state.

    `fingerprint` changes when anything does that scanning would see, but for pictures overwritten in place.
    `portable` is the same without modification times, for an index that travels with its data.
    `newest_ns` is the newest modification time. `classes` are the names that a file beside the shards gives.
    """

    root: Path
    places: dict[str, tuple[str, ...]]
    where: dict[str, str]
    fingerprint: str
    portable: str
    newest_ns: int
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Part:
    """The samples of one place, in the order they have there.

    `labels` are numbers as the container has them, or, where it has words, places in `words`. `texts` are names of
    numbers, `classes` the names of 0, 1, ... if the container has such a list.
    """

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: Strings = field(default_factory=lambda: Strings.of(()))
    words: tuple[str, ...] = ()
    texts: dict[int, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Format:
    """A kind of data set. `packed`: its places are files that hold many samples, not folders."""

    find: Callable[[Path], Found]
    scan: Callable[[str], Part]
    packed: bool


class Reader:
    """One file, read in ranges that are checked against its length; small ones cost one system call a page."""

    PAGE = 4096

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; check that it is there and readable") from error
        self.size = os.fstat(self._descriptor).st_size
        self._start, self._page = 0, b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def at(self, start: int, count: int, end: int | None = None) -> bytes:
        """Exactly `count` bytes, which must lie before `end` (default: the end of the file)."""
        if start < 0 or count < 0 or start + count > (self.size if end is None else min(end, self.size)):
            raise self.damaged(start, f"{count} bytes are said to follow, which is past the end")
        if not self._start <= start <= start + count <= self._start + len(self._page):
            try:
                self._start, self._page = start, os.pread(self._descriptor, max(count, self.PAGE), start)
            except OSError as error:
                raise UserError(f"cannot read {self.path}: {error.strerror}; copy it again") from error
            if len(self._page) < count:
                raise self.damaged(start, "the file has become shorter")
        return self._page[start - self._start : start - self._start + count]

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """A number of 64 bits, seven a byte, the lowest first, as protobuf and Thrift have them; and where it ends."""
        data, value = self.at(at, min(10, max(end - at, 0)), end), 0
        if data and data[0] < 128:  # as most are
            return data[0], at + 1
        for place, byte in enumerate(data):
            value |= (byte & 127) << 7 * place
            if byte < 128:
                return value & (2**64 - 1), at + place + 1
        raise self.damaged(at, "a number does not end")

    def damaged(self, at: int, why: str) -> UserError:
        """The sentence about a file that cannot be what it is said to be."""
        return UserError(f"cannot read {self.path}: {why} (at byte {at}); copy or write it again")


# --- finding shards ------------------------------------------------------------------------------------------------


def visible(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder and not hidden."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"cannot list the folder {folder}: {error.strerror}; check its permissions") from error


def find_shards(root: Path, is_shard: Callable[[str], bool], layout: str) -> Found:
    """The shards of both splits: in folders named like the splits, or in files whose names begin like them."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; data.path must hold {layout}")
    entries = visible(root)
    folders = {entry.name for entry in entries if entry.is_dir()}
    files = sorted(entry.name for entry in entries if is_shard(entry.name) and entry.is_file())
    places, where = {}, {}
    for split, words in SPLIT_WORDS.items():
        for word in words:
            inside = visible(root / word) if word in folders else []
            shards = sorted(f"{word}/{entry.name}" for entry in inside if is_shard(entry.name) and entry.is_file())
            shards = shards or [name for name in files if name.startswith(word)]
            if shards:
                places[split], where[split] = tuple(shards), f"the {word} shards of {root}"
                break
        else:
            raise UserError(f"{root} has no shards for {' or '.join(words)}; it must hold {layout}")
    return _stamped(root, places, where)


def _stamped(root: Path, places: dict[str, tuple[str, ...]], where: dict[str, str]) -> Found:
    """With the state of every shard, and of the list of classes, which is small enough to be taken as it is."""
    classes = _listed_classes(root / CLASSES_FILE)
    states = {name: state(root / name) for split in SPLITS for name in places[split]}
    sizes = {name: size for name, (size, _) in states.items()}
    return Found(
        root,
        places,
        where,
        digest([places, states, classes]),
        digest([places, sizes, classes]),
        max(changed for _, changed in states.values()),
        classes,
    )


def state(path: Path) -> tuple[int, int]:
    """Bytes and modification time, in nanoseconds."""
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check that it is there and readable") from error
    return found.st_size, found.st_mtime_ns


def digest(states: object) -> str:
    """64 hex digits that change with any part of what is given."""
    return hashlib.sha256(json.dumps(states, sort_keys=True).encode()).hexdigest()


def _listed_classes(path: Path) -> tuple[str, ...]:
    """The class names that a file lists, one a line; none if there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; it must list the classes, one a line, in UTF-8") from error
    return class_names(text)


def class_names(text: str) -> tuple[str, ...]:
    """The names in a list of classes, one a line."""
    return tuple(line.strip() for line in text.strip().splitlines())


# --- labels --------------------------------------------------------------------------------------------------------


def resolved(found: Found, parts: dict[str, list[Part]]) -> tuple[tuple[str, ...], dict[str, NDArray[np.int32]]]:
    """The names of all classes, and every sample's label, 0 and up, by split.

    Words get their place in the list of classes, or else in their own sorted list. Numbers are places in the list of
    classes; without one, the distinct numbers are counted from 0, in order.
    """
    every = [part for split in SPLITS for part in parts[split]]
    if not any(part.words for part in every):
        return _by_number(found, parts, found.classes or next((part.classes for part in every if part.classes), ()))
    if not all(part.words for part in every):
        raise UserError(f"{found.root} has shards with labels and shards with class folders; use one way for all")
    return _by_word(found, parts)


def _by_word(found: Found, parts: dict[str, list[Part]]) -> tuple[tuple[str, ...], dict[str, NDArray[np.int32]]]:
    present = {split: {word for part in parts[split] for word in part.words} for split in SPLITS}
    _check_same(found, present)
    classes = found.classes or tuple(sorted(present["train"]))
    number = {name: label for label, name in enumerate(classes)}
    for word in sorted(present["train"] - number.keys()):
        raise UserError(f"class {word} is not in {found.root / CLASSES_FILE}; add it there or remove its samples")
    _check_count(found, len(classes))
    labels = {
        split: _joined(np.array([number[word] for word in part.words], np.int64)[part.labels] for part in parts[split])
        for split in SPLITS
    }
    return classes, labels


def _by_number(
    found: Found, parts: dict[str, list[Part]], listed: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int32]]]:
    raw = {split: np.concatenate([part.labels for part in parts[split]]) for split in SPLITS}
    present = {split: np.unique(raw[split]) for split in SPLITS}
    _check_same(found, {split: set(numbers.tolist()) for split, numbers in present.items()})
    numbers = present["train"]
    _check_count(found, len(listed) or len(numbers))
    if numbers[0] < 0:
        raise UserError(f"{found.where['train']} have label {numbers[0]}; labels count from 0, one a class")
    if listed:
        if numbers[-1] >= len(listed):
            raise UserError(f"{found.where['train']} have label {numbers[-1]} but only {len(listed)} classes are named")
        return listed, {split: raw[split].astype(np.int32) for split in SPLITS}
    texts: dict[int, str] = {}
    for part in (part for split in SPLITS for part in parts[split]):
        texts = part.texts | texts
    classes = tuple(texts.get(number, str(number)) for number in numbers.tolist())
    return classes, {split: np.searchsorted(numbers, raw[split]).astype(np.int32) for split in SPLITS}


def _joined(arrays: Iterable[NDArray[np.int64]]) -> NDArray[np.int32]:
    return np.concatenate(list(arrays)).astype(np.int32)


def _check_same(found: Found, present: dict[str, set]) -> None:
    for name in sorted(present["train"] ^ present["val"]):
        here, there = SPLITS if name in present["train"] else SPLITS[::-1]
        raise UserError(
            f"class {name} is in {found.where[here]} but not in {found.where[there]}; both need the same classes"
        )


def _check_count(found: Found, classes: int) -> None:
    if classes > MOST_CLASSES:
        raise UserError(f"{found.root} has {classes} classes, more than {MOST_CLASSES}; check the labels")
