"""Table: where the bytes of every sample are, how large its picture is, of which class. One file, mapped, not read.

A million samples are a few arrays, never a million Python objects. The file is

    magic, 16 bytes | bytes of the header, uint64 | CRC-32 of the header, uint32 | 4 zero bytes
    the header, JSON: kind, fingerprint, classes, and for each split its samples, bytes of names, and places
    for each split the arrays of `_COLUMNS`, then where each name starts, then the names, one after the other

with everything that follows the header little-endian and aligned to 64 bytes. The header says how many samples there
are and nothing about where arrays lie, so there is no offset in it that could point astray. `load` takes a file only
whole: its length, the sum of its words and the range of every number must be right, or there is no table.
"""

import json
import mmap
import os
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

MAGIC = b"podscale-index\x00\x01"  # the last byte counts versions: of the format, and of what scanning finds
SPLITS = ("train", "val")
ALIGN = 64
MOST_HEADER_BYTES = 2**28
_PREFIX = len(MAGIC) + 16
_COLUMNS = {
    "labels": ("<i4", 1),
    "sizes": ("<i4", 2),
    "files": ("<i4", 1),
    "offsets": ("<i8", 1),
    "lengths": ("<i8", 1),
}


@dataclass(frozen=True, eq=False)
class Strings:
    """Many names in one blob: name i is blob[starts[i] : starts[i + 1]], bytes as the file system has them.

    >>> names = Strings.of(["ant.jpg", "bee.jpg"])
    >>> len(names), names[1]
    (2, 'bee.jpg')
    """

    blob: NDArray[np.uint8]
    starts: NDArray[np.int64]  # [n + 1]

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Packs names."""
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        starts = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(name) for name in encoded], out=starts[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), starts)

    @classmethod
    def joined(cls, parts: Sequence["Strings"]) -> Self:
        """The names of all parts, one after the other."""
        before = np.cumsum([0, *(len(part.blob) for part in parts)])
        starts = [part.starts[1:] + first for part, first in zip(parts, before[:-1], strict=True)]
        blobs = [part.blob for part in parts]
        return cls(np.concatenate([np.zeros(0, np.uint8), *blobs]), np.concatenate([np.zeros(1, np.int64), *starts]))

    def taken(self, which: NDArray[np.integer]) -> Self:
        """Those of the names, in that order."""
        lengths = self.starts[which + 1] - self.starts[which]
        starts = np.zeros(len(which) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        places = np.arange(starts[-1]) + np.repeat(self.starts[which] - starts[:-1], lengths)
        return type(self)(self.blob[places], starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> str:
        start, stop = self.starts[i], self.starts[i + 1]
        return self.blob[start:stop].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True, eq=False)
class Table:
    """The samples of one split.

    Sample i is of class labels[i] and has sizes[i] (width, height) pixels. Its bytes are lengths[i] from offsets[i] on
    in the container places[files[i]]; where that is a folder, in the file names[i] there. `names` is empty for
    containers whose samples have none.
    """

    labels: NDArray[np.int32]  # [n]
    sizes: NDArray[np.int32]  # [n, 2]
    files: NDArray[np.int32]  # [n]
    offsets: NDArray[np.int64]  # [n]
    lengths: NDArray[np.int64]  # [n]
    names: Strings
    places: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def taken(self, samples: NDArray[np.integer]) -> "Table":
        """Those of the samples, in that order, numbered anew."""
        columns = {name: getattr(self, name)[samples] for name in _COLUMNS}
        return replace(self, **columns, names=self.names.taken(samples) if len(self.names) else self.names)


@dataclass(frozen=True, eq=False)
class Tables:
    """Both splits of a data set; `fingerprint` says of what state of it."""

    kind: str
    fingerprint: str
    classes: tuple[str, ...]
    train: Table
    val: Table


# --- writing -------------------------------------------------------------------------------------------------------


def save(path: Path, tables: Tables) -> None:
    """Writes the file at once or not at all: whoever has the old one open keeps it."""
    splits = {split: getattr(tables, split) for split in SPLITS}
    arrays = [array for table in splits.values() for array in _arrays(table)]
    header = {
        "kind": tables.kind,
        "fingerprint": tables.fingerprint,
        "classes": tables.classes,
        "splits": {split: _header_of(table) for split, table in splits.items()},
        "sum": sum(_sum(array) for array in arrays) % 2**64,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little") + text)
            for array in arrays:
                _pad(file)
                file.write(array.data)
            _pad(file)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            Path(file.name).replace(path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _header_of(table: Table) -> dict[str, Any]:
    names = table.names
    return {"samples": len(table), "names": len(names), "name_bytes": len(names.blob), "places": table.places}


def _arrays(table: Table) -> list[NDArray]:
    columns = [np.ascontiguousarray(getattr(table, name), kind) for name, (kind, _) in _COLUMNS.items()]
    return [*columns, np.ascontiguousarray(table.names.starts, "<i8"), np.ascontiguousarray(table.names.blob)]


def _pad(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % ALIGN))


def _sum(array: NDArray) -> int:
    """The sum of an array's 64-bit words, which any one flipped bit changes."""
    flat = array.reshape(-1).view(np.uint8)
    whole = len(flat) // 8 * 8
    rest = int.from_bytes(flat[whole:].tobytes(), "little")
    return (int(np.add.reduce(flat[:whole].view("<u8"), dtype=np.uint64)) + rest) % 2**64


# --- reading -------------------------------------------------------------------------------------------------------


def load(path: Path) -> Tables | None:
    """The tables in a file, mapped; None if there is no file, or if anything about it is not as `save` leaves it."""
    try:
        with path.open("rb") as file:
            header, start = _read_header(file)
            return _mapped(file, header, start)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The header, and where it ends."""
    prefix = file.read(_PREFIX)
    length, crc = (int.from_bytes(prefix[at : at + 8], "little") for at in (len(MAGIC), len(MAGIC) + 8))
    size = os.fstat(file.fileno()).st_size
    if not prefix.startswith(MAGIC) or length > min(size, MOST_HEADER_BYTES):
        raise ValueError("not an index of this version")
    text = file.read(length)
    if zlib.crc32(text) != crc:
        raise ValueError("a damaged header")
    return json.loads(text), _PREFIX + length


def _mapped(file: IO[bytes], header: dict[str, Any], start: int) -> Tables:
    layouts = {split: _layout(header["splits"][split]) for split in SPLITS}
    at = first = start + -start % ALIGN
    places: dict[str, list[tuple[int, str, tuple[int, ...]]]] = {}
    for split, layout in layouts.items():
        places[split] = []
        for kind, shape in layout:
            places[split].append((at, kind, shape))
            at += int(np.dtype(kind).itemsize) * _product(shape)
            at += -at % ALIGN
    if at != os.fstat(file.fileno()).st_size:
        raise ValueError("a length that does not fit the header")
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if _sum(np.frombuffer(data, np.uint8, offset=first)) != header["sum"]:
        raise ValueError("damaged arrays")
    classes = _texts(header["classes"])
    tables = {
        split: _table(
            [np.frombuffer(data, kind, _product(shape), at).reshape(shape) for at, kind, shape in places[split]],
            _texts(header["splits"][split]["places"]),
            len(classes),
        )
        for split in SPLITS
    }
    kind, fingerprint = _texts([header["kind"], header["fingerprint"]])
    return Tables(kind, fingerprint, classes, **tables)


def _layout(split: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Kind and shape of a split's arrays, in the order they are written."""
    samples, names, name_bytes = (split[key] for key in ("samples", "names", "name_bytes"))
    if any(type(number) is not int or number < 0 for number in (samples, names, name_bytes)):
        raise ValueError("numbers that count nothing")
    if samples == 0 or names not in (0, samples):
        raise ValueError("no samples, or not one name each")
    columns = [(kind, (samples, width) if width > 1 else (samples,)) for kind, width in _COLUMNS.values()]
    return [*columns, ("<i8", (names + 1,)), ("|u1", (name_bytes,))]


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("something else where texts belong")
    return tuple(values)


def _table(arrays: list[NDArray], places: tuple[str, ...], classes: int) -> Table:
    labels, sizes, files, offsets, lengths, starts, blob = arrays
    ranges = (
        (labels, 0, classes),
        (sizes, 1, 2**31),
        (files, 0, len(places)),
        (offsets, 0, 2**62),
        (lengths, 0, 2**62),
    )
    if not all(low <= int(array.min()) and int(array.max()) < past for array, low, past in ranges):
        raise ValueError("numbers out of range")
    if starts[0] != 0 or starts[-1] != len(blob) or not bool(np.all(starts[1:] >= starts[:-1])):
        raise ValueError("names out of order")
    return Table(labels, sizes, files, offsets, lengths, Strings(blob, starts), places)
