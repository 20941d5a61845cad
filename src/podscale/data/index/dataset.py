"""The index of a data set: its images, their sizes and their classes. Nothing is copied or depends on the machine.

`open_index` turns a recipe's data section into two indexes, training and validation. From then on a sample is a number:
the same number is the same image on every host, since files are sorted by class and name, and shards by name. Images
are in memory (`images`) or in files (`read`, `locate_bytes`), of which only a table is in memory.
"""

import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from podscale import recipe
from podscale.data import decode
from podscale.data.cache import Cache, Kind
from podscale.data.files import Files, Progress, open_loose_files
from podscale.data.index import catalog
from podscale.data.index.bucket_index import Share, open_folder
from podscale.data.index.containers import raw
from podscale.data.index.containers.container import MAX_CLASSES
from podscale.data.index.unreadable import check_unreadable
from podscale.data.limits import MAX_IMAGE_BYTES
from podscale.data.random import Stream, argsort_random, draw_uint32
from podscale.errors import UserError
from podscale.processes.host import measure_usable_memory
from podscale.storage.files import open_regular
from podscale.storage.locations import has_scheme
from podscale.storage.paths import require_local


@dataclass(frozen=True, eq=False)
class Index:
    """The samples of one split.

    Attributes:
        labels: classes, int32 [n].
        sizes: width and height after EXIF orientation, int32 [n, 2]. An image that is larger in its file is shrunk to
            this size before anything else.
        images: pixels, uint8 [n, height, width, 3]; None if the samples are in files.
        files: reader of the files; None if the samples are in memory.
        noun: names a sample that is in no file.
        cache: holds images that were read or decoded before.
    """

    labels: NDArray[np.int32]
    sizes: NDArray[np.int32]
    images: NDArray[np.uint8] | None = None
    files: Files | None = None
    noun: str = "image"
    cache: Cache | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def list_unreadable(self) -> list[int]:
        """Return the images whose headers could not be read when they were indexed."""
        return [] if self.files is None else np.flatnonzero((self.files.table.sizes == 0).any(axis=1)).tolist()

    @property
    def max_image_bytes(self) -> int:
        """Memory that decoding one image may take."""
        return MAX_IMAGE_BYTES if self.files is None else self.files.max_image_bytes

    def name(self, sample: int) -> str:
        """Return the sample's name for messages: its path, or its noun and number."""
        return f"{self.noun} {sample}" if self.files is None else self.files.name(sample)

    def load_pixels(self, sample: int) -> NDArray[np.uint8]:
        """Return the whole image, upright and shrunk, uint8 [height, width, 3]."""
        if self.images is not None:
            return self.images[sample]
        width, height = self.sizes[sample]
        if cache := self._fill_cache("decoded", np.array([sample])):
            return cache.get(sample).reshape(height, width, 3)
        pixels = decode.decode_image(self.read(sample), self.name(sample), self.max_image_bytes)
        return decode.shrink_image(pixels, width, height)

    def read(self, sample: int) -> bytes:
        """Return the encoded image, of an index of files."""
        cache = self._fill_cache("encoded", np.array([sample]))
        return cache.get(sample).tobytes() if cache else self._get_files().read(sample)

    def locate_pixels(self, samples: NDArray[np.integer]) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """Return the memory that holds the decoded images, and each one's offset; None if they are not held decoded."""
        if self.images is not None:
            return self.images.reshape(-1), samples.astype(np.int64) * self.images[0].size
        cache = self._fill_cache("decoded", samples)
        return (cache.memory, cache.offsets[samples]) if cache else None

    def locate_bytes(
        self, samples: NDArray[np.integer]
    ) -> tuple[list[str | int] | list[NDArray[np.uint8]], NDArray[np.int64], NDArray[np.int64]]:
        """Return (sources, offsets, lengths) of the encoded images, for a caller that reads them itself.

        A source is a file's path, the descriptor of an open container, to be read with `pread` only, or memory.
        Descriptors stay open as long as the index exists.
        """
        if cache := self._fill_cache("encoded", samples):
            return [cache.memory] * len(samples), cache.offsets[samples], cache.lengths[samples]
        return self._get_files().locate_bytes(np.asarray(samples, np.int64))

    def needs_shrinking(self, samples: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which of these images are larger in their files than in `sizes`, bool [n]."""
        if self.files is None:
            return np.zeros(len(samples), bool)
        return np.any(self.sizes[samples] != self.files.table.sizes[samples], axis=1)

    def limit_size(self, longest: int) -> "Index":
        """Return the same images with at most `longest` pixels on the longer side."""
        sizes = decode.shrink_sizes(self.sizes, longest)
        if self.images is None or not len(self) or np.array_equal(sizes, self.sizes):
            return replace(self, sizes=sizes)
        return replace(
            self, sizes=sizes, images=np.stack([decode.shrink_image(image, *sizes[0]) for image in self.images])
        )

    def select(self, samples: NDArray[np.integer]) -> "Index":
        """Return these images, numbered from 0."""
        images = None if self.images is None else self.images[samples]
        files = None if self.files is None else self.files.select(samples)
        return Index(self.labels[samples], self.sizes[samples], images, files, self.noun)

    def with_cache(self, kind: Kind, samples: NDArray[np.integer]) -> "Index":
        """Return the same images with a cache that holds those of `samples` once they are read or decoded."""
        lengths = self.count_decoded_bytes() if kind == "decoded" else self.count_encoded_bytes()
        return replace(self, cache=Cache.allocate(kind, lengths, samples))

    def _fill_cache(self, kind: Kind, samples: NDArray[np.integer]) -> Cache | None:
        """Return the cache, filled with these samples, if it is of this kind and has space for all of them."""
        cache = self.cache
        if cache is None or cache.kind != kind or np.any(cache.offsets[samples] < 0):
            return None
        uncached = replace(self, cache=None)
        load = uncached.load_pixels if kind == "decoded" else uncached.read
        for sample in cache.find_missing(samples).tolist():
            cache.put(sample, load(sample))
        return cache

    def count_encoded_bytes(self, samples: NDArray[np.integer] | slice = slice(None)) -> NDArray[np.int64]:
        """Return the size of each encoded image in bytes, or of each of these."""
        return self._get_files().table.lengths[samples]

    def count_decoded_bytes(self, samples: NDArray[np.integer] | slice = slice(None)) -> NDArray[np.int64]:
        """Return the size of each decoded image in bytes, or of each of these."""
        width, height = self.sizes[samples].T
        return 3 * np.multiply(width, height, dtype=np.int64)

    def _get_files(self) -> Files:
        if self.files is None:
            raise ValueError("the images of this index are arrays, not files")
        return self.files


@dataclass(frozen=True, eq=False)
class Splits:
    """The two indexes of a data set, its class names by label, and warnings about what was skipped."""

    train: Index
    val: Index
    classes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return eight hex digits that identify the data set: of labels, sizes, and lengths of files or pixels."""
        checksum = 0
        for index in (self.train, self.val):
            content = index.images if index.images is not None else index.count_encoded_bytes()
            for array in (index.labels, index.sizes, content):
                checksum = zlib.crc32(np.ascontiguousarray(array).data.cast("B"), checksum)
        return f"{checksum:08x}"


_EMPTY = Index(np.zeros(0, np.int32), np.zeros((0, 2), np.int32))
NO_IMAGES = Splits(_EMPTY, _EMPTY, ())


def open_index(data: recipe.Data, progress: Progress | None = None, share: Share | None = None) -> Splits:
    """Return the indexes of the data set that a recipe's data section names.

    Args:
        data: a recipe's data section. Counts in it that are not 0 must be those of the data set.
        progress: called during a scan of files with what is counted ("folders", "files", "images"), how many are done,
            and of how many. A stored index that is up to date is not scanned again.
        share: makes one process index a bucket for all; None: this process does so by itself.

    Raises:
        UserError: the data cannot be read, or differs from the counts in the recipe.

    >>> splits = open_index(recipe.Data(source="digits"))
    >>> len(splits.train), len(splits.val), splits.train.name(17), splits.classes[:3]
    (1437, 360, 'digit 17', ('0', '1', '2'))
    """
    splits = (
        _open_files(data, progress, share) if data.source in catalog.FORMATS else _IN_MEMORY[data.source](data.path)
    )
    if data.shrink:
        splits = replace(splits, train=splits.train.limit_size(data.shrink), val=splits.val.limit_size(data.shrink))
    if data.hold_out:
        train, val = split_hold_out(splits.train, data.hold_out)
        splits = replace(splits, train=train, val=val)
    counts = {"classes": len(splits.classes), "train_samples": len(splits.train), "val_samples": len(splits.val)}
    for field, count in counts.items():
        if getattr(data, field) not in (0, count):
            raise UserError(
                f"data.{field} is {getattr(data, field)} but {data.path or data.source} has {count}; "
                "correct the recipe or the path"
            )
    return splits


def check_classes(splits: Splits, data: recipe.Data) -> None:
    """Refuse a data set of one class, which nothing can be learnt from.

    Raises:
        UserError: it has one class.
    """
    if len(splits.classes) < 2:
        where = data.path or data.source
        raise UserError(f"{where} holds images of one class only, {splits.classes[0]}; a classifier needs at least two")


def split_hold_out(train: Index, share: float) -> tuple[Index, Index]:
    """Split the training images into training and validation. The choice is fixed: no seed changes it.

    Settings that are tuned on such a split have not seen the validation set.
    """
    count, numbers = round(share * len(train)), draw_uint32(0, Stream.HOLD_OUT, np.arange(len(train)))[:, 0]
    if not 0 < count < len(train):
        raise UserError(f"data.hold_out {share} of {len(train)} training images is {count}; nothing would be left")
    shuffled = argsort_random(numbers.astype(np.uint64) << np.uint64(32))
    return train.select(np.sort(shuffled[count:])), train.select(np.sort(shuffled[:count]))


def index_files(paths: Sequence[str | os.PathLike[str]], max_image_bytes: int = MAX_IMAGE_BYTES) -> Index:
    """Return an index of loose files, to predict their classes; labels are -1."""
    names = [os.fspath(path) for path in paths]
    if not names:
        raise UserError("no images are named; name at least one file")
    for name in names:
        if not Path(name).is_file():
            raise UserError(f"there is no image file {name}; check the path")
    files = open_loose_files(names, max_image_bytes)
    sizes, lengths = files.measure()
    return _make_file_index(files.with_table(replace(files.table, sizes=sizes, lengths=lengths)))


def _open_files(data: recipe.Data, progress: Progress | None, share: Share | None) -> Splits:
    root = open_folder(data.path, "data.path") if has_scheme(data.path) else _resolve_path(data.path, "folder")
    train, val, classes, warnings = catalog.open_files(data.source, root, progress, data.max_image_bytes, share)
    for files, split in ((train, "training"), (val, "validation")):
        check_unreadable(files, split, data)
    return Splits(_make_file_index(train), _make_file_index(val), classes, warnings)


def _make_file_index(files: Files) -> Index:
    # An image without a size is found unreadable when it is read; until then any size will do.
    sizes = files.table.sizes
    return Index(files.table.labels, np.maximum(sizes, 1) if len(sizes) and not sizes.min() else sizes, files=files)


def _resolve_path(path: str, kind: str) -> Path:
    if not path:
        raise UserError(f"data.path is empty; name the {kind} that holds the images")
    require_local(path, "data.path")
    expanded = Path(path).expanduser()
    if not expanded.exists():
        raise UserError(f"data.path {expanded} does not exist; name the {kind} that holds the images")
    return expanded


def _make_array_index(images: NDArray[np.uint8], labels: NDArray, noun: str) -> Index:
    height, width = images.shape[1:3]
    sizes = np.broadcast_to(np.array([width, height], np.int32), (len(images), 2))
    return Index(labels.astype(np.int32), sizes, images=np.ascontiguousarray(images), noun=noun)


# --- digits --------------------------------------------------------------------------------------------------------


def _open_digits(_: str) -> Splits:
    """Load the 1797 digits that ship with Podscale. Every fifth validates; values 0..16 become 0..255."""
    with resources.files("podscale.data").joinpath("digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        gray, labels = (arrays["images"] * (255 / 16) + 0.5).astype(np.uint8), arrays["labels"].astype(np.int32)
    images = np.repeat(gray[..., None], 3, axis=3)
    val = np.arange(len(images)) % 5 == 0
    train, validation = (_make_array_index(images[part], labels[part], "digit") for part in (~val, val))
    return Splits(train, validation, tuple(map(str, range(10))))


# --- CIFAR's and MNIST's own files ---------------------------------------------------------------------------------


def _open_cifar(path: str) -> Splits:
    return _index_arrays(raw.read_cifar(_resolve_path(path, "folder")))


def _open_mnist(path: str) -> Splits:
    return _index_arrays(raw.read_mnist(_resolve_path(path, "folder")))


def _index_arrays(data: raw.ArrayDataSet) -> Splits:
    train, val = (
        _make_array_index(data.images[split], data.labels[split], f"{split} image") for split in ("train", "val")
    )
    return Splits(train, val, data.classes)


# --- arrays in an .npz file ----------------------------------------------------------------------------------------


def _open_npz(path: str) -> Splits:
    file = _resolve_path(path, ".npz file")
    arrays = _load_npz_arrays(file)
    train = _index_npz_split(file, arrays, ("train",))
    val = _index_npz_split(file, arrays, ("val", "test"))
    classes = int(train.labels.max()) + 1
    if val.labels.max() >= classes:
        raise UserError(f"{file} has validation label {val.labels.max()} but no training label above {classes - 1}")
    return Splits(train, val, tuple(map(str, range(classes))))


def _load_npz_arrays(file: Path) -> dict[str, NDArray]:
    try:
        with open_regular(file) as stream:
            archive = np.load(stream, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("one bare array")
            _check_npz_bytes(archive.zip)
            return {key: archive[key] for key in archive.files}
    except Exception as error:  # a damaged archive can raise nearly any exception
        why = str(error) or type(error).__name__
        raise UserError(
            f"{file} is not a readable .npz file of plain arrays ({why}); write it with np.savez"
        ) from error


def _check_npz_bytes(archive: zipfile.ZipFile) -> None:
    """Refuse arrays whose headers claim more bytes than are stored, or more than this machine's memory."""
    memory = measure_usable_memory()
    if sum(member.file_size for member in archive.infolist()) > memory:
        raise ValueError("its arrays have more bytes than this machine has memory")
    for member in archive.infolist():
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, kind = read(file)
        if not kind.hasobject and math.prod(shape) * kind.itemsize > member.file_size:
            raise ValueError(f"{member.filename} claims to have shape {shape}, but has {member.file_size} bytes")


def _index_npz_split(file: Path, arrays: dict[str, NDArray], prefixes: tuple[str, ...]) -> Index:
    prefix = next((prefix for prefix in prefixes if f"{prefix}_images" in arrays), prefixes[0])
    for key in (f"{prefix}_images", f"{prefix}_labels"):
        if key not in arrays:
            raise UserError(f"{file} has no array {key}; it has {', '.join(sorted(arrays)) or 'none'}")
    images, labels = arrays[f"{prefix}_images"], arrays[f"{prefix}_labels"]
    where = f"{prefix}_images in {file}"
    if images.dtype != np.uint8:
        raise UserError(f"{where} is {images.dtype}; store pixels as uint8, 0 to 255")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise UserError(f"{where} has shape {images.shape}; it must be [n, height, width, 3] or [n, height, width]")
    images = np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images
    return _make_array_index(
        images, _check_npz_labels(f"{prefix}_labels in {file}", labels, len(images)), f"{prefix} image"
    )


def _check_npz_labels(where: str, labels: NDArray, n: int) -> NDArray:
    if labels.dtype.kind not in "iu":
        raise UserError(f"{where} is {labels.dtype}; store labels as whole numbers from 0")
    if labels.size != n or labels.shape[0] != n:
        raise UserError(f"{where} has shape {labels.shape}; it must be [{n}], one label per image")
    if labels.min() < 0 or labels.max() >= MAX_CLASSES:
        raise UserError(f"{where} runs from {labels.min()} to {labels.max()}; labels count from 0, one per class")
    return labels.reshape(n)


_IN_MEMORY = MappingProxyType({"digits": _open_digits, "npz": _open_npz, "cifar": _open_cifar, "mnist": _open_mnist})
