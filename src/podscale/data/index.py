"""Index: what pictures there are, how large, of which class. Nothing is copied; nothing depends on the machine.

`open_index` turns a recipe's data section into two indexes, training and validation. A sample is a number from then on:
the same number is the same picture on every host, since files are sorted by class and name. Pictures live in memory
(`images`) or in files (`read`).
"""

import os
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from podscale import recipe
from podscale.data import decode
from podscale.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
LAYOUT = "train/CLASS/FILE and val/CLASS/FILE"
HEADER_THREADS = 16  # they mostly wait for the disk
MOST_CLASSES = 2**20


@dataclass(frozen=True, eq=False)
class Index:
    """The samples of one split.

    `labels` int32 [n]; `sizes` int32 [n, 2], width and height after EXIF orientation; either `images` uint8
    [n, height, width, 3] or `paths`; `noun` names a sample that has no path.
    """

    labels: NDArray[np.int32]
    sizes: NDArray[np.int32]
    images: NDArray[np.uint8] | None = None
    paths: tuple[str, ...] = ()
    noun: str = "picture"

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, sample: int) -> str:
        """What a person would call the sample: its path, or its noun and number."""
        return self.paths[sample] if self.paths else f"{self.noun} {sample}"

    def pixels(self, sample: int) -> NDArray[np.uint8]:
        """The whole picture, upright, uint8 [height, width, 3]."""
        if self.images is not None:
            return self.images[sample]
        return decode.decode(self.read(sample), self.name(sample))

    def sources(self, samples: NDArray[np.integer]) -> tuple[list[str | int], NDArray[np.int64], NDArray[np.int64]]:
        """Where the files' bytes lie: paths or open files, offsets, and lengths, of which -1 is the whole file."""
        n = len(samples)
        return [self.paths[sample] for sample in samples], np.zeros(n, np.int64), np.full(n, -1, np.int64)

    def read(self, sample: int) -> bytes:
        """The file's bytes, of an index of files."""
        try:
            return Path(self.paths[sample]).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {self.paths[sample]}: {error.strerror}; replace or remove it") from error


@dataclass(frozen=True, eq=False)
class Splits:
    """The two indexes of a data set, and the names of its classes by label."""

    train: Index
    val: Index
    classes: tuple[str, ...]


_EMPTY = Index(np.zeros(0, np.int32), np.zeros((0, 2), np.int32))
NO_PICTURES = Splits(_EMPTY, _EMPTY, ())


def open_index(data: recipe.Data) -> Splits:
    """The pictures that a recipe's data section names, checked against the numbers it gives.

    >>> splits = open_index(recipe.Data(source="digits"))
    >>> len(splits.train), len(splits.val), splits.train.name(17), splits.classes[:3]
    (1437, 360, 'digit 17', ('0', '1', '2'))
    """
    splits = {"digits": _open_digits, "folder": _open_folder, "npz": _open_npz}[data.source](data.path)
    found = {"classes": len(splits.classes), "train_samples": len(splits.train), "val_samples": len(splits.val)}
    for field, number in found.items():
        if getattr(data, field) not in (0, number):
            raise UserError(
                f"data.{field} is {getattr(data, field)} but {data.path or data.source} has {number}; "
                "correct the recipe or the path"
            )
    return splits


def files_index(paths: Sequence[str | os.PathLike[str]]) -> Index:
    """An index of loose files, to predict their classes; labels are -1."""
    names = tuple(os.fspath(path) for path in paths)
    if not names:
        raise UserError("no pictures are named; name at least one file")
    for name in names:
        if not Path(name).is_file():
            raise UserError(f"there is no picture file {name}; check the path")
    return Index(np.full(len(names), -1, np.int32), _read_sizes(names), paths=names)


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


# --- a folder of pictures ------------------------------------------------------------------------------------------


def _open_folder(path: str) -> Splits:
    root = _existing(path, "folder")
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; data.path must hold {LAYOUT}")
    if not _visible(root):
        raise UserError(f"the folder {root} is empty; it must hold {LAYOUT}")
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise UserError(f"{root} has no folder {split}; it must hold {LAYOUT}")
    files = {split: _class_files(root / split) for split in ("train", "val")}
    for name in sorted(files["train"].keys() ^ files["val"].keys()):
        here, there = ("train", "val") if name in files["train"] else ("val", "train")
        raise UserError(f"class {name} is in {root / here} but not in {root / there}; both need the same classes")
    classes = tuple(sorted(files["train"]))
    return Splits(_file_index(files["train"], classes), _file_index(files["val"], classes), classes)


def _existing(path: str, what: str) -> Path:
    if not path:
        raise UserError(f"data.path is empty; name the {what} that holds the pictures")
    found = Path(path).expanduser()
    if not found.exists():
        raise UserError(f"data.path {found} does not exist; name the {what} that holds the pictures")
    return found


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _class_files(split: Path) -> dict[str, list[str]]:
    folders = sorted(entry.name for entry in _visible(split) if entry.is_dir())
    if not folders:
        raise UserError(f"{split} has no class folders; pictures belong in {split}/CLASS/FILE")
    files = {}
    for name in folders:
        entries = _visible(split / name)
        files[name] = [entry.path for entry in entries if entry.name.lower().endswith(EXTENSIONS) and entry.is_file()]
        if not files[name]:
            kinds = " ".join(EXTENSIONS)
            raise UserError(f"the class folder {split / name} holds no pictures ({kinds}); add some or remove it")
    return files


def _file_index(files: dict[str, list[str]], classes: Iterable[str]) -> Index:
    paths = tuple(path for name in classes for path in sorted(files[name], key=os.path.basename))
    labels = np.repeat(np.arange(len(files), dtype=np.int32), [len(files[name]) for name in classes])
    return Index(labels, _read_sizes(paths), paths=paths)


def _read_sizes(paths: Sequence[str]) -> NDArray[np.int32]:
    def size(path: str) -> tuple[int, int]:
        try:
            with open(path, "rb") as file:
                header = decode.read_header(file, path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; replace or remove it") from error
        return header.width, header.height

    with ThreadPoolExecutor(HEADER_THREADS, "podscale-header") as pool:
        return np.array(list(pool.map(size, paths)), np.int32).reshape(-1, 2)


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
            return {key: loaded[key] for key in loaded.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{file} is not a readable .npz file of plain arrays ({error}); write it with np.savez"
        ) from error


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
