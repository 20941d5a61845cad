"""What the formats of data sets on disk have in common. Containers are listed cheaply, scanned once, never unpacked.

A kind of data set is a `Format`: `find` lists the containers (class folders, or shards) without opening them, `scan`
returns the samples of one container as `ContainerSamples`. Nothing read here is trusted: every length is checked
against the file before it is used to read anything, and every loop advances by at least one byte.
"""

import hashlib
import io
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from podscale.data import decode
from podscale.data.index.containers.entries import (
    Folder,
    is_file,
    is_folder,
    list_ahead,
    list_visible,
    read_file_text,
    stat_file,
)
from podscale.data.index.containers.sources import BucketContainer, open_source
from podscale.data.index.table import SPLITS, Strings
from podscale.errors import StorageError, UserError
from podscale.storage.range_file import RangeFile

MAX_CLASSES = 2**20
MAX_CLASS_LIST_BYTES = 2**28
CLASSES_FILE = "classes.txt"
WINDOW_BYTES = 4096  # of an image's header that are parsed at once
SPLIT_NAMES = MappingProxyType({"train": ("train",), "val": ("validation", "val", "test")})


@dataclass(frozen=True)
class Listing:
    """The containers of a data set and their state, on disk or in a bucket.

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

    root: Folder
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
        other_formats: extension of each file of an image format that cannot be read.
        sizes: width and height of each image, [n, 2], where the scan has measured them, as it does in a bucket.
    """

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: Strings = field(default_factory=lambda: Strings.from_names(()))
    class_names: tuple[str, ...] = ()
    label_names: dict[int, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()
    other_formats: tuple[str, ...] = ()
    sizes: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Format:
    """A kind of data set. `packed`: its containers are files that hold many samples, not folders."""

    find: Callable[[Any], Listing]  # of a path on disk or in a bucket (`Folder`)
    scan: Callable[[Any], ContainerSamples]  # of a path as text, or of a `BucketContainer`
    packed: bool


class Reader:
    """A file or object that is read in ranges, each checked against its length; recent pages are kept."""

    def __init__(self, path: str | BucketContainer) -> None:
        self.path, self._source = str(path), open_source(path)
        self.size = self._source.size
        self._pages: deque[tuple[int, bytes | memoryview]] = deque(maxlen=self._source.pages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._source.close()

    def read_range(self, start: int, count: int, end: int | None = None) -> bytes:
        """Return exactly `count` bytes, which must lie before `end` (default: the end of the file)."""
        if start < 0 or count < 0 or start + count > (self.size if end is None else min(end, self.size)):
            raise self.make_damage_error(start, f"{count} bytes are said to follow, which is past the end")
        for first, page in self._pages:
            if first <= start and start + count <= first + len(page):
                return bytes(page[start - first : start - first + count])
        page = self._source.read(start, count)
        self._pages.appendleft((start, page))
        if len(page) < count:
            raise self.make_damage_error(start, "the file has become shorter")
        return bytes(page[:count])

    def measure(self, offset: int, length: int) -> tuple[int, int]:
        """Return width and height of the image at `offset`, 0 x 0 if its header cannot be read.

        On disk, headers are read later, many at once, so this returns 0 x 0 as well.
        """
        if not self._source.measures:
            return 0, 0
        try:
            header = self.read_image_header(offset, length, self.path)
        except StorageError:
            raise
        except UserError:
            return 0, 0
        return header.width, header.height

    def read_image_header(self, offset: int, length: int, name: str) -> decode.Header:
        """Return the header of the image at `offset`.

        Raises:
            UserError: it cannot be read; the message contains `name`.
        """
        file = io.BufferedReader(RangeFile(self.read_range, offset, length), WINDOW_BYTES)
        return decode.read_header(file, name, self._source.measures)

    @property
    def has_measured(self) -> bool:
        """Whether `measure` reads headers."""
        return bool(self._source.measures)

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


def find_shards(root: Folder, is_shard: Callable[[str], bool], layout: str) -> Listing:
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
    list_ahead(root, [name for names in SPLIT_NAMES.values() for name in names if name in folders])
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


def _make_listing(root: Folder, paths: dict[str, tuple[str, ...]], descriptions: dict[str, str]) -> Listing:
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
        max(changed if isinstance(changed, int) else 0 for _, changed in states.values()),
        classes,
    )


def compute_digest(states: object) -> str:
    """Return 64 hex digits (SHA-256) of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(states, sort_keys=True).encode()).hexdigest()


def _read_class_list(path: Folder) -> tuple[str, ...]:
    """Return the class names that a file lists, one per line; none if there is no file."""
    try:
        text = read_file_text(path, MAX_CLASS_LIST_BYTES)
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
    present = {  # container by container, since sorting all samples at once takes longer per sample the more there are
        split: np.unique(np.concatenate([np.unique(samples.labels) for samples in containers[split]]))
        for split in SPLITS
    }
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
