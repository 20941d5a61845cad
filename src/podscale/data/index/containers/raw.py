"""CIFAR's and MNIST's own files: raw pixels in records of one length. They are small and are loaded into memory.

CIFAR-10 and CIFAR-100 are read in their binary version only: the Python version is pickled, and loading a pickle can
run arbitrary code. MNIST's idx files may be gzipped. Nothing in a file is trusted: its length must match its header
and its kind.
"""

import gzip
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from podscale.data.index.containers.container import MAX_CLASS_LIST_BYTES, parse_class_names
from podscale.data.index.containers.entries import list_visible
from podscale.data.index.table import SPLITS
from podscale.errors import UserError
from podscale.storage.files import open_regular, read_text

SIDE = 32  # pixels of a side of CIFAR's images
MAX_IDX_BYTES = 2**32


class ArrayDataSet(NamedTuple):
    """A data set in memory: images uint8 [n, height, width, 3] and labels [n] by split, and the class names."""

    images: dict[str, NDArray[np.uint8]]
    labels: dict[str, NDArray[np.uint8]]
    classes: tuple[str, ...]


# --- CIFAR ---------------------------------------------------------------------------------------------------------

CIFAR10: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        "val": ("test_batch.bin",),
    }
)
CIFAR100: Mapping[str, tuple[str, ...]] = MappingProxyType({"train": ("train.bin",), "val": ("test.bin",)})
CIFAR_LAYOUT = "data_batch_1.bin to data_batch_5.bin and test_batch.bin, or train.bin and test.bin"


def find_cifar_files(root: Path) -> tuple[Path, Mapping[str, tuple[str, ...]]]:
    """Return the folder that holds the binary files, `root` or a folder in it, and their names by split."""
    for folder in (root, *(Path(entry.path) for entry in list_visible(root) if entry.is_dir())):
        present = {entry.name for entry in list_visible(folder)}
        for names in (CIFAR10, CIFAR100):
            if present.issuperset(name for split in SPLITS for name in names[split]):
                return folder, names
        if present & {"data_batch_1", "batches.meta", "meta"}:
            raise UserError(
                f"{folder} holds CIFAR's version for Python, which is pickled and not read; "
                "download the binary version (cifar-10-binary.tar.gz or cifar-100-binary.tar.gz)"
            )
    raise UserError(f"{root} does not hold CIFAR's binary files: {CIFAR_LAYOUT}")


def read_cifar(root: Path) -> ArrayDataSet:
    """Load CIFAR-10, or CIFAR-100 with its fine labels."""
    folder, names = find_cifar_files(root)
    label_bytes, classes = (1, 10) if names is CIFAR10 else (2, 100)
    names_file = folder / ("batches.meta.txt" if names is CIFAR10 else "fine_label_names.txt")
    images, labels = {}, {}
    for split in SPLITS:
        records = np.concatenate([_read_records(folder / name, label_bytes + 3 * SIDE**2) for name in names[split]])
        labels[split] = records[:, label_bytes - 1]
        if labels[split].max() >= classes:
            raise UserError(f"{folder} has label {labels[split].max()}, which CIFAR does not have; download it again")
        planes = records[:, label_bytes:].reshape(-1, 3, SIDE, SIDE)
        images[split] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return ArrayDataSet(images, labels, _read_class_names(names_file, classes))


def _read_records(path: Path, length: int) -> NDArray[np.uint8]:
    try:
        with open_regular(path) as file:
            data = np.frombuffer(file.read(), np.uint8)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; download it again") from error
    if not len(data) or len(data) % length:
        raise UserError(f"{path} has {len(data)} bytes, not a multiple of the {length} of a record; download it again")
    return data.reshape(-1, length)


def _read_class_names(path: Path, classes: int) -> tuple[str, ...]:
    """Return the names in a file if it lists as many as there are classes; otherwise numbers."""
    try:
        names = tuple(name for name in parse_class_names(read_text(path, MAX_CLASS_LIST_BYTES)) if name)
    except (OSError, UnicodeDecodeError):
        names = ()
    return names if len(names) == classes else tuple(map(str, range(classes)))


# --- MNIST ---------------------------------------------------------------------------------------------------------

MNIST_PREFIXES = MappingProxyType({"train": "train", "val": "(?:t10k|test)"})
MNIST_LAYOUT = "train-images-idx3-ubyte, train-labels-idx1-ubyte and the same for t10k, each alone or as .gz"


def find_mnist_files(root: Path) -> dict[str, tuple[Path, Path]]:
    """Return the paths of the image file and the label file, by split."""
    present = sorted(entry.name for entry in list_visible(root) if entry.is_file())
    files = {}
    for split, prefix in MNIST_PREFIXES.items():
        pair = [
            next((name for name in present if re.fullmatch(rf"{prefix}-{kind}[-.]idx{rank}-ubyte(\.gz)?", name)), None)
            for kind, rank in (("images", 3), ("labels", 1))
        ]
        if pair[0] is None or pair[1] is None:
            raise UserError(f"{root} does not hold MNIST's files: {MNIST_LAYOUT}")
        files[split] = (root / pair[0], root / pair[1])
    return files


def read_mnist(root: Path) -> ArrayDataSet:
    """Load MNIST, or a data set in the same files: Fashion-MNIST, Kuzushiji-MNIST and others."""
    images, labels = {}, {}
    for split, (image_file, label_file) in find_mnist_files(root).items():
        gray, labels[split] = _read_idx(image_file, 3), _read_idx(label_file, 1)
        if len(gray) != len(labels[split]):
            raise UserError(f"{image_file} has {len(gray)} images but {label_file} {len(labels[split])} labels")
        images[split] = np.repeat(gray[..., None], 3, axis=3)
    classes = 1 + max(int(labels[split].max()) for split in SPLITS)
    return ArrayDataSet(images, labels, tuple(map(str, range(classes))))


def _read_idx(path: Path, rank: int) -> NDArray[np.uint8]:
    """Read an idx file of bytes: two zeros, 8 (the type: bytes), the rank, each dimension in 4 bytes, the values."""
    try:
        with open_regular(path) as file:
            return _read_idx_values(path, gzip.open(file) if path.suffix == ".gz" else file, rank)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}; download it again") from error


def _read_idx_values(path: Path, file: IO[bytes] | gzip.GzipFile, rank: int) -> NDArray[np.uint8]:
    header = file.read(4 + 4 * rank)
    shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4))
    if header[:4] != bytes([0, 0, 8, rank]) or len(shape) != rank:
        raise UserError(f"{path} is not an idx file of bytes in {rank} dimensions; download it again")
    count = int(np.prod([int(side) for side in shape], dtype=object))
    if not 0 < count <= MAX_IDX_BYTES:
        raise UserError(f"{path} says that it holds {count} bytes; download it again")
    data = file.read(count + 1)  # one byte more, to detect a file that is too long
    if len(data) != count:
        more = "more" if len(data) > count else "fewer"
        raise UserError(f"{path} has {more} bytes than the {count} that its header says; download it again")
    return np.frombuffer(data, np.uint8).reshape(shape)
