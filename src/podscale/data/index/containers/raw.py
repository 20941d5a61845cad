"""CIFAR's and MNIST's own files: bare pixels in records of one length. They are small, and held in memory whole.

CIFAR-10 and CIFAR-100 are read in their binary version alone; the one for Python is pickled, and a pickle is a program.
MNIST's idx files may be gzipped. Nothing in a file is trusted: its length must be what its header and kind say.
"""

import gzip
import re
import zlib
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from podscale.data.index.containers.container import class_names, visible
from podscale.data.index.table import SPLITS
from podscale.errors import UserError

SIDE = 32  # of CIFAR's pictures
MOST_IDX_BYTES = 2**32


class Held(NamedTuple):
    """A data set in memory: pictures uint8 [n, height, width, 3] and labels [n] by split, and the classes' names."""

    images: dict[str, NDArray[np.uint8]]
    labels: dict[str, NDArray[np.uint8]]
    classes: tuple[str, ...]


# --- CIFAR ---------------------------------------------------------------------------------------------------------

CIFAR10: dict[str, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    "val": ("test_batch.bin",),
}
CIFAR100: dict[str, tuple[str, ...]] = {"train": ("train.bin",), "val": ("test.bin",)}
CIFAR_LAYOUT = "data_batch_1.bin to data_batch_5.bin and test_batch.bin, or train.bin and test.bin"


def cifar_files(root: Path) -> tuple[Path, dict[str, tuple[str, ...]]]:
    """The folder that holds the binary files, which may be the only one in `root`; and their names by split."""
    for folder in (root, *(Path(entry.path) for entry in visible(root) if entry.is_dir())):
        present = {entry.name for entry in visible(folder)}
        for names in (CIFAR10, CIFAR100):
            if present.issuperset(name for split in SPLITS for name in names[split]):
                return folder, names
        if present & {"data_batch_1", "batches.meta", "meta"}:
            raise UserError(
                f"{folder} holds CIFAR's version for Python, which is pickled and not read; "
                "download the binary version (cifar-10-binary.tar.gz or cifar-100-binary.tar.gz)"
            )
    raise UserError(f"{root} does not hold CIFAR's binary files: {CIFAR_LAYOUT}")


def read_cifar(root: Path) -> Held:
    """CIFAR-10, or CIFAR-100 with its fine labels."""
    folder, names = cifar_files(root)
    labels_before, classes = (1, 10) if names is CIFAR10 else (2, 100)
    listed = folder / ("batches.meta.txt" if names is CIFAR10 else "fine_label_names.txt")
    images, labels = {}, {}
    for split in SPLITS:
        records = np.concatenate([_records(folder / name, labels_before + 3 * SIDE**2) for name in names[split]])
        labels[split] = records[:, labels_before - 1]
        if labels[split].max() >= classes:
            raise UserError(f"{folder} has label {labels[split].max()}, which CIFAR has not; download it again")
        planes = records[:, labels_before:].reshape(-1, 3, SIDE, SIDE)
        images[split] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return Held(images, labels, _names(listed, classes))


def _records(path: Path, length: int) -> NDArray[np.uint8]:
    data = np.fromfile(path, np.uint8)
    if not len(data) or len(data) % length:
        raise UserError(f"{path} has {len(data)} bytes, no whole number of records of {length}; download it again")
    return data.reshape(-1, length)


def _names(path: Path, classes: int) -> tuple[str, ...]:
    """The names in a file, if it lists that many; else numbers."""
    try:
        found = tuple(name for name in class_names(path.read_text(encoding="utf-8")) if name)
    except (OSError, UnicodeDecodeError):
        found = ()
    return found if len(found) == classes else tuple(map(str, range(classes)))


# --- MNIST ---------------------------------------------------------------------------------------------------------

MNIST_WORDS = {"train": "train", "val": "(?:t10k|test)"}
MNIST_LAYOUT = "train-images-idx3-ubyte, train-labels-idx1-ubyte and the same for t10k, each alone or as .gz"


def mnist_files(root: Path) -> dict[str, tuple[Path, Path]]:
    """Pictures and labels by split."""
    present = sorted(entry.name for entry in visible(root) if entry.is_file())
    found = {}
    for split, word in MNIST_WORDS.items():
        pair = [
            next((name for name in present if re.fullmatch(rf"{word}-{what}[-.]idx{rank}-ubyte(\.gz)?", name)), None)
            for what, rank in (("images", 3), ("labels", 1))
        ]
        if pair[0] is None or pair[1] is None:
            raise UserError(f"{root} does not hold MNIST's files: {MNIST_LAYOUT}")
        found[split] = (root / pair[0], root / pair[1])
    return found


def read_mnist(root: Path) -> Held:
    """MNIST, or whatever has its files: Fashion-MNIST, Kuzushiji-MNIST and others."""
    images, labels = {}, {}
    for split, (pictures, numbers) in mnist_files(root).items():
        gray, labels[split] = _idx(pictures, 3), _idx(numbers, 1)
        if len(gray) != len(labels[split]):
            raise UserError(f"{pictures} has {len(gray)} pictures but {numbers} {len(labels[split])} labels")
        images[split] = np.repeat(gray[..., None], 3, axis=3)
    classes = 1 + max(int(labels[split].max()) for split in SPLITS)
    return Held(images, labels, tuple(map(str, range(classes))))


def _idx(path: Path, rank: int) -> NDArray[np.uint8]:
    """The array of bytes in an idx file: two zeros, 8 for bytes, the rank, each dimension in 4 bytes, the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _values(path, file, rank)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}; download it again") from error


def _values(path: Path, file: IO[bytes] | Any, rank: int) -> NDArray[np.uint8]:
    header = file.read(4 + 4 * rank)
    shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4))
    if header[:4] != bytes([0, 0, 8, rank]) or len(shape) != rank:
        raise UserError(f"{path} is not an idx file of bytes in {rank} dimensions; download it again")
    count = int(np.prod([int(side) for side in shape], dtype=object))
    if not 0 < count <= MOST_IDX_BYTES:
        raise UserError(f"{path} says that it holds {count} bytes; download it again")
    data = file.read(count + 1)  # one more, to see that there is none
    if len(data) != count:
        more = "more" if len(data) > count else "fewer"
        raise UserError(f"{path} has {more} bytes than the {count} that its header says; download it again")
    return np.frombuffer(data, np.uint8).reshape(shape)
