"""Index: what pictures there are, how large, of which class. Nothing is copied; nothing depends on the machine.

`open_index` turns a recipe's data section into two indexes, training and validation. A sample is a number from then on:
the same number is the same picture on every host, since files are sorted by class and name, and shards by name.
Pictures live in memory (`images`) or in files (`read`, `sources`), of which only a table is kept.
"""

import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from podscale import recipe
from podscale.data import decode
from podscale.data.cache import Cache, Kind
from podscale.data.files import Files, Progress, loose
from podscale.data.index import catalog
from podscale.data.index.containers import raw
from podscale.data.index.containers.container import MOST_CLASSES
from podscale.data.random import Stream, words
from podscale.errors import UserError


@dataclass(frozen=True, eq=False)
class Index:
    """The samples of one split.

    `labels` int32 [n]; `sizes` int32 [n, 2], width and height after EXIF orientation; either `images` uint8
    [n, height, width, 3] or `files`; `noun` names a sample that is in no file. A picture that is larger in its file
    than `sizes` says is shrunk before anything else happens to it. `cache` keeps what was read or decoded before.
    """

    labels: NDArray[np.int32]
    sizes: NDArray[np.int32]
    images: NDArray[np.uint8] | None = None
    files: Files | None = None
    noun: str = "picture"
    cache: Cache | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, sample: int) -> str:
        """What a person would call the sample: where it is, or its noun and number."""
        return f"{self.noun} {sample}" if self.files is None else self.files.name(sample)

    def pixels(self, sample: int) -> NDArray[np.uint8]:
        """The whole picture, upright and shrunk, uint8 [height, width, 3]."""
        if self.images is not None:
            return self.images[sample]
        width, height = self.sizes[sample]
        if kept := self._kept("decoded", np.array([sample])):
            return kept.at(sample).reshape(height, width, 3)
        return decode.shrink(decode.decode(self.read(sample), self.name(sample)), width, height)

    def read(self, sample: int) -> bytes:
        """The encoded picture, of an index of files."""
        kept = self._kept("encoded", np.array([sample]))
        return kept.at(sample).tobytes() if kept else self._files().read(sample)

    def arrays(self, samples: NDArray[np.integer]) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """Memory that holds the decoded pictures, and where in it each begins; None where they are not kept decoded."""
        if self.images is not None:
            return self.images.reshape(-1), samples.astype(np.int64) * self.images[0].size
        kept = self._kept("decoded", samples)
        return (kept.memory, kept.places[samples]) if kept else None

    def sources(
        self, samples: NDArray[np.integer]
    ) -> tuple[list[str | int] | list[NDArray[np.uint8]], NDArray[np.int64], NDArray[np.int64]]:
        """Where the encoded pictures are, for whoever reads them itself: (sources, offsets, lengths).

        A source is a file's path, the descriptor of an open container, to be read by `pread` alone, or memory.
        Descriptors stay open as long as the index lives.
        """
        if kept := self._kept("encoded", samples):
            return [kept.memory] * len(samples), kept.places[samples], kept.lengths[samples]
        return self._files().sources(np.asarray(samples, np.int64))

    def shrinks(self, samples: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of the pictures are larger in their files than they shall be."""
        if self.files is None:
            return np.zeros(len(samples), bool)
        return np.any(self.sizes[samples] != self.files.table.sizes[samples], axis=1)

    def shrunk(self, longest: int) -> "Index":
        """The same pictures, the longer side of each no longer than so many pixels."""
        sizes = decode.shrunk_sizes(self.sizes, longest)
        if self.images is None or not len(self) or np.array_equal(sizes, self.sizes):
            return replace(self, sizes=sizes)
        return replace(self, sizes=sizes, images=np.stack([decode.shrink(image, *sizes[0]) for image in self.images]))

    def taken(self, samples: NDArray[np.integer]) -> "Index":
        """Those of the pictures, numbered anew."""
        images = None if self.images is None else self.images[samples]
        files = (
            None if self.files is None else Files(self.files.root, self.files.table.taken(samples), self.files.packed)
        )
        return Index(self.labels[samples], self.sizes[samples], images, files, self.noun)

    def cached(self, kind: Kind, samples: NDArray[np.integer]) -> "Index":
        """The same pictures; those of `samples` will be kept in memory."""
        lengths = self.decoded_bytes() if kind == "decoded" else self.encoded_bytes()
        return replace(self, cache=Cache.of(kind, lengths, samples))

    def _kept(self, kind: Kind, samples: NDArray[np.integer]) -> Cache | None:
        """The cache, filled with these samples, if it is of this kind and has places for all of them."""
        cache = self.cache
        if cache is None or cache.kind != kind or np.any(cache.places[samples] < 0):
            return None
        bare = replace(self, cache=None)
        get = bare.pixels if kind == "decoded" else bare.read
        for sample in cache.missing(samples).tolist():
            cache.put(sample, get(sample))
        return cache

    def encoded_bytes(self) -> NDArray[np.int64]:
        """How many bytes each encoded picture has."""
        return self._files().table.lengths

    def decoded_bytes(self) -> NDArray[np.int64]:
        """How many bytes each decoded picture has."""
        return 3 * self.sizes.astype(np.int64).prod(axis=1)

    def _files(self) -> Files:
        if self.files is None:
            raise ValueError("the pictures of this index are arrays, not files")
        return self.files


@dataclass(frozen=True, eq=False)
class Splits:
    """The two indexes of a data set, and the names of its classes by label."""

    train: Index
    val: Index
    classes: tuple[str, ...]

    def digest(self) -> str:
        """Eight digits that another data set would not have: of labels, sizes, and lengths of files or pixels."""
        found = 0
        for index in (self.train, self.val):
            held = index.images if index.images is not None else index.encoded_bytes()
            for array in (index.labels, index.sizes, held):
                found = zlib.crc32(np.ascontiguousarray(array).data.cast("B"), found)
        return f"{found:08x}"


_EMPTY = Index(np.zeros(0, np.int32), np.zeros((0, 2), np.int32))
NO_PICTURES = Splits(_EMPTY, _EMPTY, ())


def open_index(data: recipe.Data, progress: Progress | None = None) -> Splits:
    """The pictures that a recipe's data section names, checked against the numbers it gives.

    A scan of files tells `progress` what is counted ("folders", "files", "pictures"), how many are done, and of how
    many; an index that is kept is not scanned.

    >>> splits = open_index(recipe.Data(source="digits"))
    >>> len(splits.train), len(splits.val), splits.train.name(17), splits.classes[:3]
    (1437, 360, 'digit 17', ('0', '1', '2'))
    """
    if data.source in catalog.FORMATS:
        splits = _open_files(data.source, data.path, progress)
    else:
        splits = _IN_MEMORY[data.source](data.path)
    if data.shrink:
        splits = replace(splits, train=splits.train.shrunk(data.shrink), val=splits.val.shrunk(data.shrink))
    if data.hold_out:
        train, val = held_out(splits.train, data.hold_out)
        splits = replace(splits, train=train, val=val)
    found = {"classes": len(splits.classes), "train_samples": len(splits.train), "val_samples": len(splits.val)}
    for field, number in found.items():
        if getattr(data, field) not in (0, number):
            raise UserError(
                f"data.{field} is {getattr(data, field)} but {data.path or data.source} has {number}; "
                "correct the recipe or the path"
            )
    return splits


def held_out(train: Index, share: float) -> tuple[Index, Index]:
    """Training and validation out of training's own pictures. They are drawn once and for all: no seed changes them.

    What is chosen by looking at such a validation has not seen the validation set.
    """
    count, drawn = round(share * len(train)), words(0, Stream.HOLD_OUT, np.arange(len(train)))[:, 0]
    if not 0 < count < len(train):
        raise UserError(f"data.hold_out {share} of {len(train)} training pictures is {count}; nothing would be left")
    shuffled = np.argsort(drawn, kind="stable")
    return train.taken(np.sort(shuffled[count:])), train.taken(np.sort(shuffled[:count]))


def files_index(paths: Sequence[str | os.PathLike[str]]) -> Index:
    """An index of loose files, to predict their classes; labels are -1."""
    names = [os.fspath(path) for path in paths]
    if not names:
        raise UserError("no pictures are named; name at least one file")
    for name in names:
        if not Path(name).is_file():
            raise UserError(f"there is no picture file {name}; check the path")
    files = loose(names)
    sizes, lengths = files.measure()
    return _file_index(Files("", replace(files.table, sizes=sizes, lengths=lengths), packed=False))


def _open_files(source: str, path: str, progress: Progress | None) -> Splits:
    train, val, classes = catalog.open_files(source, _existing(path, "folder"), progress)
    return Splits(_file_index(train), _file_index(val), classes)


def _file_index(files: Files) -> Index:
    return Index(files.table.labels, files.table.sizes, files=files)


def _existing(path: str, what: str) -> Path:
    if not path:
        raise UserError(f"data.path is empty; name the {what} that holds the pictures")
    found = Path(path).expanduser()
    if not found.exists():
        raise UserError(f"data.path {found} does not exist; name the {what} that holds the pictures")
    return found


def _array_index(images: NDArray[np.uint8], labels: NDArray, noun: str) -> Index:
    height, width = images.shape[1:3]
    sizes = np.broadcast_to(np.array([width, height], np.int32), (len(images), 2))
    return Index(labels.astype(np.int32), sizes, images=np.ascontiguousarray(images), noun=noun)


# --- digits --------------------------------------------------------------------------------------------------------


def _open_digits(_: str) -> Splits:
    """Every fifth of scikit-learn's 1797 digits validates; 0..16 become 0..255."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    gray = (digits.images * (255 / 16) + 0.5).astype(np.uint8)
    images = np.repeat(gray[..., None], 3, axis=3)
    val = np.arange(len(images)) % 5 == 0
    train, validation = (_array_index(images[part], digits.target[part], "digit") for part in (~val, val))
    return Splits(train, validation, tuple(map(str, range(10))))


# --- CIFAR's and MNIST's own files ---------------------------------------------------------------------------------


def _open_cifar(path: str) -> Splits:
    return _held(raw.read_cifar(_existing(path, "folder")))


def _open_mnist(path: str) -> Splits:
    return _held(raw.read_mnist(_existing(path, "folder")))


def _held(found: raw.Held) -> Splits:
    train, val = (
        _array_index(found.images[split], found.labels[split], f"{split} picture") for split in ("train", "val")
    )
    return Splits(train, val, found.classes)


# --- arrays in an .npz file ----------------------------------------------------------------------------------------


def _open_npz(path: str) -> Splits:
    file = _existing(path, ".npz file")
    arrays = _npz_arrays(file)
    train = _npz_index(file, arrays, ("train",))
    val = _npz_index(file, arrays, ("val", "test"))
    classes = int(train.labels.max()) + 1
    if val.labels.max() >= classes:
        raise UserError(f"{file} has validation label {val.labels.max()} but no training label above {classes - 1}")
    return Splits(train, val, tuple(map(str, range(classes))))


def _npz_arrays(file: Path) -> dict[str, NDArray]:
    try:
        with file.open("rb") as opened:
            loaded = np.load(opened, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ValueError("one bare array")
            _check_npz_bytes(loaded.zip)
            return {key: loaded[key] for key in loaded.files}
    except Exception as error:  # a damaged archive can raise nearly anything; there is no list of what to expect
        why = str(error) or type(error).__name__
        raise UserError(
            f"{file} is not a readable .npz file of plain arrays ({why}); write it with np.savez"
        ) from error


def _check_npz_bytes(archive: zipfile.ZipFile) -> None:
    """Refuses arrays that claim to be larger than what is stored of them, or than this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(member.file_size for member in archive.infolist()) > memory:
        raise ValueError("its arrays have more bytes than this machine has memory")
    for member in archive.infolist():
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, kind = read(file)
        if not kind.hasobject and math.prod(shape) * kind.itemsize > member.file_size:
            raise ValueError(f"{member.filename} claims to have shape {shape}, but has {member.file_size} bytes")


def _npz_index(file: Path, arrays: dict[str, NDArray], prefixes: tuple[str, ...]) -> Index:
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
    return _array_index(images, _npz_labels(f"{prefix}_labels in {file}", labels, len(images)), f"{prefix} picture")


def _npz_labels(where: str, labels: NDArray, n: int) -> NDArray:
    if labels.dtype.kind not in "iu":
        raise UserError(f"{where} is {labels.dtype}; store labels as whole numbers from 0")
    if labels.size != n or labels.shape[0] != n:
        raise UserError(f"{where} has shape {labels.shape}; it must be [{n}], one label a picture")
    if labels.min() < 0 or labels.max() >= MOST_CLASSES:
        raise UserError(f"{where} runs from {labels.min()} to {labels.max()}; labels count from 0, one a class")
    return labels.reshape(n)


_IN_MEMORY = {"digits": _open_digits, "npz": _open_npz, "cifar": _open_cifar, "mnist": _open_mnist}
