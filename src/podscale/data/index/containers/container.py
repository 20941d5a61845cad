"""What the formats of data sets on disk have in common. Containers are listed cheaply, scanned once, never unpacked.

A kind of data set is a `Format`: `find` lists the containers (class folders, or shards) without opening them, `scan`
returns the samples of one container as `ContainerSamples`. Nothing read here is trusted: every length is checked
against the file before it is used to read anything, and every loop advances by at least one byte.
"""

import errno
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
from podscale.storage.files import describe_kind, open_descriptor, read_text

MAX_CLASSES = 2**20
MAX_CLASS_LIST_BYTES = 2**28
CLASSES_FILE = "classes.txt"
SPLIT_NAMES = {"train": ("train",), "val": ("validation", "val", "test")}


@dataclass(frozen=True)
class Listing:
    """The containers of a data set and their state on disk.

    Attributes:
        root: folder of the data set.
        paths: class folders or shards by split, relative to `root`.
        descriptions: how error messages refer to each split.
        fingerprint: changes with anything that a scan would see, except images overwritten in place.
        portable_fingerprint: the same without modification times, for an index that is copied with its data.
        newest_ns: newest modification time.
        classes: class names from `classes.txt` beside the shards.
        skipped: class folders without images, relative to `root`.
    """

    root: Path
    paths: dict[str, tuple[str, ...]]
    descriptions: dict[str, str]
    fingerprint: str
    portable_fingerprint: str
    newest_ns: int
    classes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ContainerSamples:
    """The samples of one container, in the container's order.

    Attributes:
        offsets: first byte of each image, [n].
        lengths: bytes of each image, [n].
        labels: the container's own numbers, [n]; where it has class names instead, indices into `class_names`.
        names: names of the samples; empty where they have none.
        class_names: class names that occur in this container.
        label_names: names of some or all numbers in `labels`.
        classes: names of labels 0, 1, ... if the container has such a list.
        ignored: (path, message) of entries that are named like images but are no files.
    """

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: Strings = field(default_factory=lambda: Strings.from_names(()))
    class_names: tuple[str, ...] = ()
    label_names: dict[int, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Format:
    """A kind of data set. `packed`: its containers are files that hold many samples, not folders."""

    find: Callable[[Path], Listing]
    scan: Callable[[str], ContainerSamples]
    packed: bool


class Reader:
    """A file that is read in ranges, each checked against its length. Small reads cost one system call per page."""

    PAGE = 4096

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = open_descriptor(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; check that it is there and readable") from error
        self.size = os.fstat(self._descriptor).st_size
        self._start, self._page = 0, b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def read_range(self, start: int, count: int, end: int | None = None) -> bytes:
        """Return exactly `count` bytes, which must lie before `end` (default: the end of the file)."""
        if start < 0 or count < 0 or start + count > (self.size if end is None else min(end, self.size)):
            raise self.make_damage_error(start, f"{count} bytes are said to follow, which is past the end")
        if not self._start <= start <= start + count <= self._start + len(self._page):
            try:
                self._start, self._page = start, os.pread(self._descriptor, max(count, self.PAGE), start)
            except OSError as error:
                raise UserError(f"cannot read {self.path}: {error.strerror}; copy it again") from error
            if len(self._page) < count:
                raise self.make_damage_error(start, "the file has become shorter")
        return self._page[start - self._start : start - self._start + count]

    def read_varint(self, at: int, end: int) -> tuple[int, int]:
        """Return a 64-bit varint (seven bits per byte, lowest first, as in protobuf and Thrift) and where it ends."""
        data, value = self.read_range(at, min(10, max(end - at, 0)), end), 0
        if data and data[0] < 128:  # the most frequent case
            return data[0], at + 1
        for position, byte in enumerate(data):
            value |= (byte & 127) << 7 * position
            if byte < 128:
                return value & (2**64 - 1), at + position + 1
        raise self.make_damage_error(at, "a number does not end")

    def make_damage_error(self, at: int, why: str) -> UserError:
        """Return the error for a file that is not of the kind that it should be."""
        return UserError(f"cannot read {self.path}: {why} (at byte {at}); copy or write it again")


# --- finding shards ------------------------------------------------------------------------------------------------


def list_visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not hidden."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"cannot list the folder {folder}: {error.strerror}; check its permissions") from error


def is_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a regular file or a link to one; a link to itself is neither a file nor a folder."""
    return _follow_link(entry.is_file, entry.path)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one."""
    return _follow_link(entry.is_dir, entry.path)


def _follow_link(ask: Callable[[], bool], path: str) -> bool:
    try:
        return ask()
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def describe_entry(entry: os.DirEntry[str]) -> str:
    """Return a sentence about an entry that is no file."""
    try:
        kind = describe_kind(os.stat(entry.path).st_mode)
    except OSError:
        kind = "a link that leads to nothing"
    return f"{entry.path} is {kind}, not a file, and is ignored; replace or remove it"


def find_shards(root: Path, is_shard: Callable[[str], bool], layout: str) -> Listing:
    """List the shards of both splits: in folders named after the splits, or files whose names start with those names.

    Args:
        root: folder of the data set.
        is_shard: whether a file of this name is a shard.
        layout: the files that the folder must hold, for error messages.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; data.path must hold {layout}")
    entries = list_visible(root)
    folders = {entry.name for entry in entries if is_folder(entry)}
    files = sorted(entry.name for entry in entries if is_shard(entry.name) and is_file(entry))
    paths, descriptions = {}, {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            inside = list_visible(root / name) if name in folders else []
            shards = sorted(f"{name}/{entry.name}" for entry in inside if is_shard(entry.name) and is_file(entry))
            shards = shards or [file for file in files if file.startswith(name)]
            if shards:
                paths[split], descriptions[split] = tuple(shards), f"the {name} shards of {root}"
                break
        else:
            raise UserError(f"{root} has no shards for {' or '.join(names)}; it must hold {layout}")
    return _make_listing(root, paths, descriptions)


def _make_listing(root: Path, paths: dict[str, tuple[str, ...]], descriptions: dict[str, str]) -> Listing:
    """Add the state of every shard, and the whole list of classes, which is small."""
    classes = _read_class_list(root / CLASSES_FILE)
    states = {name: stat_file(root / name) for split in SPLITS for name in paths[split]}
    sizes = {name: size for name, (size, _) in states.items()}
    return Listing(
        root,
        paths,
        descriptions,
        compute_digest([paths, states, classes]),
        compute_digest([paths, sizes, classes]),
        max(changed for _, changed in states.values()),
        classes,
    )


def stat_file(path: Path) -> tuple[int, int]:
    """Return a file's size in bytes and its modification time in nanoseconds."""
    try:
        result = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check that it is there and readable") from error
    return result.st_size, result.st_mtime_ns


def compute_digest(states: object) -> str:
    """Return 64 hex digits (SHA-256) of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(states, sort_keys=True).encode()).hexdigest()


def _read_class_list(path: Path) -> tuple[str, ...]:
    """Return the class names that a file lists, one per line; none if there is no file."""
    try:
        text = read_text(path, MAX_CLASS_LIST_BYTES)
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read {path}: {why}; it must list the classes, one per line, in UTF-8") from error
    return parse_class_names(text)


def parse_class_names(text: str) -> tuple[str, ...]:
    """Return the names in a list of classes, one per line."""
    return tuple(line.strip() for line in text.strip().splitlines())


# --- labels --------------------------------------------------------------------------------------------------------


def resolve_labels(
    listing: Listing, containers: dict[str, list[ContainerSamples]]
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int32]]]:
    """Return the names of all classes, and every sample's label, counted from 0, by split.

    A class name becomes its position in the list of classes or, without a list, in the sorted names. Numbers are
    positions in the list of classes; without one, the distinct numbers are counted from 0, in order.
    """
    every = [samples for split in SPLITS for samples in containers[split]]
    if not any(samples.class_names for samples in every):
        classes = listing.classes or next((samples.classes for samples in every if samples.classes), ())
        return _resolve_numbers(listing, containers, classes)
    if not all(samples.class_names for samples in every):
        raise UserError(f"{listing.root} has shards with labels and shards with class folders; use one way for all")
    return _resolve_names(listing, containers)


def _resolve_names(
    listing: Listing, containers: dict[str, list[ContainerSamples]]
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int32]]]:
    present = {split: {name for samples in containers[split] for name in samples.class_names} for split in SPLITS}
    _check_same_classes(listing, present)
    classes = listing.classes or tuple(sorted(present["train"]))
    label_of = {name: label for label, name in enumerate(classes)}
    for name in sorted(present["train"] - label_of.keys()):
        raise UserError(f"class {name} is not in {listing.root / CLASSES_FILE}; add it there or remove its samples")
    _check_count(listing, len(classes))
    labels = {
        split: _concatenate_labels(
            np.array([label_of[name] for name in samples.class_names], np.int64)[samples.labels]
            for samples in containers[split]
        )
        for split in SPLITS
    }
    return classes, labels


def _resolve_numbers(
    listing: Listing, containers: dict[str, list[ContainerSamples]], classes: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int32]]]:
    raw = {split: np.concatenate([samples.labels for samples in containers[split]]) for split in SPLITS}
    present = {split: np.unique(raw[split]) for split in SPLITS}
    _check_same_classes(listing, {split: set(numbers.tolist()) for split, numbers in present.items()})
    numbers = present["train"]
    _check_count(listing, len(classes) or len(numbers))
    where = listing.descriptions["train"]
    if numbers[0] < 0:
        raise UserError(f"{where} have label {numbers[0]}; labels count from 0, one per class")
    if classes:
        if numbers[-1] >= len(classes):
            raise UserError(f"{where} have label {numbers[-1]} but only {len(classes)} classes are named")
        return classes, {split: raw[split].astype(np.int32) for split in SPLITS}
    label_names: dict[int, str] = {}
    for samples in (samples for split in SPLITS for samples in containers[split]):
        label_names = samples.label_names | label_names
    classes = tuple(label_names.get(number, str(number)) for number in numbers.tolist())
    return classes, {split: np.searchsorted(numbers, raw[split]).astype(np.int32) for split in SPLITS}


def _concatenate_labels(arrays: Iterable[NDArray[np.int64]]) -> NDArray[np.int32]:
    return np.concatenate(list(arrays)).astype(np.int32)


def _check_same_classes(listing: Listing, present: dict[str, set]) -> None:
    for name in sorted(present["train"] ^ present["val"]):
        here, there = SPLITS if name in present["train"] else SPLITS[::-1]
        raise UserError(
            f"class {name} is in {listing.descriptions[here]} but not in {listing.descriptions[there]}; "
            "both need the same classes"
        )


def _check_count(listing: Listing, classes: int) -> None:
    if classes > MAX_CLASSES:
        raise UserError(f"{listing.root} has {classes} classes, more than {MAX_CLASSES}; check the labels")
