"""The table of a data set: position, image size and class of every sample. One file.

A million samples are a few arrays, never a million Python objects. The format of the file is

    magic, 16 bytes | bytes of the header, uint64 | CRC-32 of the header, uint32 | 4 zero bytes
    the header, JSON: kind, fingerprint, classes, counts of files of other formats (which older files lack), and for
        each split its samples, bytes of names, and paths ("places")
    for each split the arrays of `_COLUMNS`, then where each name starts, then the concatenated names

with everything after the header little-endian and aligned to 64 bytes. The header holds the number of samples and no
positions of arrays, so it has no offset that could be wrong. `load_tables` accepts a file only if it is intact: its
length, the sum of its 64-bit words, their CRC-32 (which older files lack) and the range of every number must be right.
It reads the whole file into memory first: a mapped file could change after it was checked, and a process that reads a
mapped file which another one has truncated is killed.
"""

import io
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

from podscale.config.json_types import JsonObject
from podscale.storage.files import open_regular

MAGIC = b"podscale-index\x00\x01"  # the last byte is the version of the format and of the scan's result
SPLITS = ("train", "val")
ALIGN = 64
MAX_HEADER_BYTES = 2**28
_PREFIX = len(MAGIC) + 16
_COLUMNS = MappingProxyType(
    {
        "labels": ("<i4", 1),
        "sizes": ("<i4", 2),
        "files": ("<i4", 1),
        "offsets": ("<i8", 1),
        "lengths": ("<i8", 1),
    }
)


@dataclass(frozen=True, eq=False)
class Strings:
    """Many names in one array: name i is blob[starts[i] : starts[i + 1]], in the file system's bytes.

    >>> names = Strings.from_names(["ant.jpg", "bee.jpg"])
    >>> len(names), names[1]
    (2, 'bee.jpg')
    """

    blob: NDArray[np.uint8]
    starts: NDArray[np.int64]  # [n + 1]

    @classmethod
    def from_names(cls, names: Iterable[str]) -> Self:
        """Pack names."""
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        starts = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(name) for name in encoded], out=starts[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), starts)

    @classmethod
    def concatenate(cls, parts: Sequence["Strings"]) -> Self:
        """Return the names of all parts in one array, in order."""
        before = np.cumsum([0, *(len(part.blob) for part in parts)])
        starts = [part.starts[1:] + first for part, first in zip(parts, before[:-1], strict=True)]
        blobs = [part.blob for part in parts]
        return cls(np.concatenate([np.zeros(0, np.uint8), *blobs]), np.concatenate([np.zeros(1, np.int64), *starts]))

    def select(self, indices: NDArray[np.integer]) -> Self:
        """Return the names at these indices, in that order."""
        lengths = self.starts[indices + 1] - self.starts[indices]
        starts = np.zeros(len(indices) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        positions = np.arange(starts[-1]) + np.repeat(self.starts[indices] - starts[:-1], lengths)
        return type(self)(self.blob[positions], starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> str:
        start, stop = self.starts[i], self.starts[i + 1]
        return self.blob[start:stop].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True, eq=False)
class Table:
    """The samples of one split.

    Sample i is of class labels[i] and has sizes[i] (width, height) pixels, 0 x 0 if its header cannot be read. Its
    bytes are lengths[i] from offsets[i] on in the container paths[files[i]]; if that is a folder, in the file names[i]
    in it. `names` is empty for containers whose samples have none.
    """

    labels: NDArray[np.int32]  # [n]
    sizes: NDArray[np.int32]  # [n, 2]
    files: NDArray[np.int32]  # [n]
    offsets: NDArray[np.int64]  # [n]
    lengths: NDArray[np.int64]  # [n]
    names: Strings
    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, samples: NDArray[np.integer]) -> "Table":
        """Return these samples, in that order, numbered from 0."""
        columns = {name: getattr(self, name)[samples] for name in _COLUMNS}
        return replace(self, **columns, names=self.names.select(samples) if len(self.names) else self.names)


@dataclass(frozen=True, eq=False)
class Tables:
    """Both splits of a data set; `fingerprint` identifies the state of the data that was scanned.

    `other_formats` counts the files of image formats that cannot be read, by extension.
    """

    kind: str
    fingerprint: str
    classes: tuple[str, ...]
    train: Table
    val: Table
    other_formats: dict[str, int] = field(default_factory=dict)


# --- writing -------------------------------------------------------------------------------------------------------


def save_tables(path: Path, tables: Tables) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            _write_tables(file, tables)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            Path(file.name).replace(path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def format_tables(tables: Tables) -> bytes:
    """Return what `save_tables` writes."""
    file = io.BytesIO()
    _write_tables(file, tables)
    return file.getvalue()


def _write_tables(file: IO[bytes], tables: Tables) -> None:
    splits = {split: getattr(tables, split) for split in SPLITS}
    arrays = [array for table in splits.values() for array in _list_arrays(table)]
    header = {
        "kind": tables.kind,
        "fingerprint": tables.fingerprint,
        "classes": tables.classes,
        "other_formats": tables.other_formats,
        "splits": {split: _describe_split(table) for split, table in splits.items()},
        "sum": sum(_sum_words(array) for array in arrays) % 2**64,
        "crc": _compute_crc(arrays),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    file.write(MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little") + text)
    for array in arrays:
        _pad(file)
        file.write(array.data)
    _pad(file)


def _describe_split(table: Table) -> JsonObject:
    names = table.names
    return {"samples": len(table), "names": len(names), "name_bytes": len(names.blob), "places": table.paths}


def _list_arrays(table: Table) -> list[NDArray]:
    columns = [np.ascontiguousarray(getattr(table, name), kind) for name, (kind, _) in _COLUMNS.items()]
    return [*columns, np.ascontiguousarray(table.names.starts, "<i8"), np.ascontiguousarray(table.names.blob)]


def _pad(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % ALIGN))


def _sum_words(array: NDArray) -> int:
    """Return the sum of an array's 64-bit words, which changes with any single flipped bit."""
    flat = array.reshape(-1).view(np.uint8)
    whole = len(flat) // 8 * 8
    tail = int.from_bytes(flat[whole:].tobytes(), "little")
    return (int(np.add.reduce(flat[:whole].view("<u8"), dtype=np.uint64)) + tail) % 2**64


def _compute_crc(arrays: Iterable[NDArray]) -> int:
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return crc


# --- reading -------------------------------------------------------------------------------------------------------


def load_tables(path: Path) -> Tables | None:
    """Read the tables in a file; None if there is no file, or if it is not exactly as `save_tables` writes it."""
    try:
        with open_regular(path) as file:
            return _read_file(file, os.fstat(file.fileno()).st_size)
    except OSError:
        return None


def parse_tables(data: bytes | memoryview) -> Tables | None:
    """Return the tables in bytes that `format_tables` made; None if they are not exactly such."""
    return _read_file(io.BytesIO(data), len(data))


def _read_file(file: IO[bytes], size: int) -> Tables | None:
    try:
        header, start = _read_header(file, size)
        return _read_tables(file, size, header, start)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _read_header(file: IO[bytes], size: int) -> tuple[JsonObject, int]:
    """Return the header, and where it ends."""
    prefix = file.read(_PREFIX)
    length, crc = (int.from_bytes(prefix[at : at + 8], "little") for at in (len(MAGIC), len(MAGIC) + 8))
    if not prefix.startswith(MAGIC) or length > min(size, MAX_HEADER_BYTES):
        raise ValueError("not an index of this version")
    text = file.read(length)
    if zlib.crc32(text) != crc:
        raise ValueError("a damaged header")
    return json.loads(text), _PREFIX + length


def _read_tables(file: IO[bytes], size: int, header: JsonObject, start: int) -> Tables:
    layouts = {split: _list_layout(header["splits"][split]) for split in SPLITS}
    at = first = start + -start % ALIGN
    positions: dict[str, list[tuple[int, str, tuple[int, ...]]]] = {}
    for split, layout in layouts.items():
        positions[split] = []
        for kind, shape in layout:
            positions[split].append((at, kind, shape))
            at += int(np.dtype(kind).itemsize) * _multiply(shape)
            at += -at % ALIGN
    if at != size:
        raise ValueError("a length that does not fit the header")
    file.seek(first)
    data = np.frombuffer(file.read(at - first), np.uint8)  # read-only
    if len(data) != at - first or _sum_words(data) != header["sum"]:
        raise ValueError("damaged arrays")
    arrays = {
        split: [_view_array(data, at - first, kind, shape) for at, kind, shape in positions[split]] for split in SPLITS
    }
    if header.get("crc") not in (None, _compute_crc(array for split in SPLITS for array in arrays[split])):
        raise ValueError("damaged arrays")
    classes = _check_strings(header["classes"])
    tables = {
        split: _make_table(arrays[split], _check_strings(header["splits"][split]["places"]), len(classes))
        for split in SPLITS
    }
    kind, fingerprint = _check_strings([header["kind"], header["fingerprint"]])
    return Tables(kind, fingerprint, classes, **tables, other_formats=_check_counts(header.get("other_formats", {})))


def _view_array(data: NDArray[np.uint8], start: int, kind: str, shape: tuple[int, ...]) -> NDArray:
    return np.frombuffer(data, kind, _multiply(shape), start).reshape(shape)


def _list_layout(split: JsonObject) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of a split's arrays, in the order of the file."""
    samples, names, name_bytes = (split[key] for key in ("samples", "names", "name_bytes"))
    if any(type(number) is not int or number < 0 for number in (samples, names, name_bytes)):
        raise ValueError("counts that are not whole numbers from 0")
    if samples == 0 or names not in (0, samples):
        raise ValueError("no samples, or a number of names other than 0 or one per sample")
    columns = [(kind, (samples, width) if width > 1 else (samples,)) for kind, width in _COLUMNS.values()]
    return [*columns, ("<i8", (names + 1,)), ("|u1", (name_bytes,))]


def _multiply(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def _check_strings(values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("values other than strings")
    return tuple(values)


def _check_counts(values: object) -> dict[str, int]:
    if not isinstance(values, dict) or not all(type(count) is int and count > 0 for count in values.values()):
        raise ValueError("values other than counts")
    return values


def _make_table(arrays: list[NDArray], paths: tuple[str, ...], classes: int) -> Table:
    labels, sizes, files, offsets, lengths, starts, blob = arrays
    ranges = (
        (labels, 0, classes),
        (sizes, 0, 2**31),  # 0: the header could not be read
        (files, 0, len(paths)),
        (offsets, 0, 2**62),
        (lengths, 0, 2**62),
    )
    if not all(low <= int(array.min()) and int(array.max()) < past for array, low, past in ranges):
        raise ValueError("numbers out of range")
    if starts[0] != 0 or starts[-1] != len(blob) or not bool(np.all(starts[1:] >= starts[:-1])):
        raise ValueError("names out of order")
    return Table(labels, sizes, files, offsets, lengths, Strings(blob, starts), paths)
