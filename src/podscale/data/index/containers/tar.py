"""WebDataset shards: tar files, whose members with one key are one sample. Read in place, never unpacked.

A member's key is its name up to the first dot of the base name. A key with a `.cls` (a whole number) or a `.json` with
a "label" (a whole number, or a class name) is a labelled sample and has one picture, whose extension follows the first
dot; what else the key has is ignored. Under a key without a label every picture is a sample, of the class that its
folder is named by.

Members are only ever named and read by range, so a name cannot lead anywhere. Still, pictures and labels with an
absolute name or with `..` in it are refused, and so are those that are links, devices or anything but plain files.
"""

import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from podscale.data.index.containers.container import Format, Found, Part, Reader, find_shards
from podscale.data.index.table import Strings
from podscale.errors import UserError

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".ppm")
LABELS = (".cls", ".json")
LAYOUT = "train*.tar and val*.tar (or validation*, test*), or train/*.tar and val/*.tar"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
BLOCK = 512
MOST_NAME_BYTES = 2**16
MOST_LABEL_BYTES = 2**20


def find(root: Path) -> Found:
    """The shards: uncompressed tar files."""
    return find_shards(root, lambda name: name.endswith((".tar", *COMPRESSED)), LAYOUT)


@dataclass(slots=True)
class _Key:
    """What a shard has of one key: pictures (name, offset, bytes) and the label, if any."""

    pictures: list[tuple[str, int, int]] = field(default_factory=list)
    label: int | str | None = None


def scan(path: str) -> Part:
    """The samples of a shard, in the order of their pictures."""
    if path.endswith(COMPRESSED):
        raise UserError(f"{path} is compressed; samples are read in place, so unpack it to a plain .tar first")
    with Reader(path) as reader:
        keys: dict[str, _Key] = {}
        for name, kind, offset, length in members(reader):
            end = posixpath.splitext(name)[1].lower()
            if end not in PICTURES + LABELS:
                continue
            _check_member(reader, name, kind, offset)
            key = keys.setdefault(_key_of(name)[0], _Key())
            if end in PICTURES:
                key.pictures.append((name, offset, length))
            elif _key_of(name)[1] == end:
                label = _label(reader, name, end, offset, length)
                key.label = label if key.label is None else key.label
        samples = [sample for name, key in keys.items() for sample in _samples(reader, name, key)]
    if not samples:
        raise UserError(f"{path} holds no pictures ({' '.join(PICTURES)}); write it again or remove it")
    samples.sort(key=lambda sample: sample[1])
    names, offsets, lengths, labels = zip(*samples, strict=True)
    words: tuple[str, ...] = ()
    if any(isinstance(label, str) for label in labels):
        if not all(isinstance(label, str) for label in labels):
            raise UserError(f"{path} has samples with numbers and samples with class names; use one way for all")
        words = tuple(sorted(set(labels)))
        place = {word: number for number, word in enumerate(words)}
        labels = tuple(place[label] for label in labels)
    columns = np.array([offsets, lengths, labels], np.int64)
    return Part(columns[0], columns[1], columns[2], Strings.of(names), words)


def _key_of(name: str) -> tuple[str, str]:
    """Key and extension.

    >>> _key_of("n01440764/x.seg.png")
    ('n01440764/x', '.seg.png')
    """
    folder, base = posixpath.split(name)
    stem, dot, extension = base.partition(".")
    return posixpath.join(folder, stem), f"{dot}{extension}".lower()


def _samples(reader: Reader, key: str, found: _Key) -> list[tuple[str, int, int, int | str]]:
    """The samples of one key: (name, offset, bytes, label)."""
    if found.label is None:
        return [(name, offset, length, _folder(reader, name, offset)) for name, offset, length in found.pictures]
    exact = [picture for picture in found.pictures if _key_of(picture[0])[1] in PICTURES]
    if len(exact) > 1:
        names = " and ".join(name for name, _, _ in exact[:2])
        raise UserError(f"{reader.path} has two pictures with one label, {names}; give each a name of its own")
    return [(*picture, found.label) for picture in exact]


def _folder(reader: Reader, name: str, offset: int) -> str:
    folder = posixpath.basename(posixpath.dirname(name))
    if folder in ("", "."):
        raise reader.damaged(offset, f"the picture {name} has no .cls, no .json with a label and no class folder")
    return folder


def _check_member(reader: Reader, name: str, kind: bytes, offset: int) -> None:
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise reader.damaged(offset, f"the member {name!r} has a name that leads out of the archive")
    if kind not in (b"0", b"\0", b"7"):
        raise reader.damaged(offset, f"the member {name} is a link or a device, not a file")


def _label(reader: Reader, name: str, end: str, offset: int, length: int) -> int | str | None:
    if length > MOST_LABEL_BYTES:
        raise reader.damaged(offset, f"the label {name} has {length} bytes")
    text = reader.at(offset, length)
    try:
        if end == ".cls":
            return _number(int(text))
        content = json.loads(text)
        label = content.get("label") if isinstance(content, dict) else None
        if label is None or (isinstance(label, str) and label.encode()):  # refuses halves of characters, and no name
            return label
        if type(label) is int:
            return _number(label)
        raise ValueError("a label is a number or a name")
    except (ValueError, RecursionError) as error:
        raise reader.damaged(offset, f"the label {name} is neither a whole number nor JSON with one") from error


def _number(label: int) -> int:
    if abs(label) >= 2**62:
        raise ValueError("a number that no class has")
    return label


# --- the archive ---------------------------------------------------------------------------------------------------


def members(reader: Reader) -> Iterator[tuple[str, bytes, int, int]]:
    """Name, type, offset and bytes of every member, as POSIX (ustar, pax) and GNU tar write them."""
    at, long_name = 0, ""
    pax: dict[str, str] = {}
    while at + BLOCK <= reader.size:
        header = reader.at(at, BLOCK)
        if not header.strip(b"\0"):
            return
        _check_sum(reader, header, at)
        kind, length = header[156:157], _size(reader, header, at)
        offset = at + BLOCK
        if kind not in (b"x", b"g", b"L", b"K"):
            length = _pax_size(reader, pax, at, length)
            length = 0 if kind in (b"1", b"2", b"3", b"4", b"5", b"6") else length  # no data, whatever they say
        if offset + length > reader.size:
            raise reader.damaged(at, f"the member {_name(header)} has {length} bytes, which is past the end")
        if kind == b"L":
            long_name = _text(reader.at(offset, _bounded(reader, at, length)).split(b"\0")[0])
        elif kind == b"x":
            pax = _pax(reader, at, reader.at(offset, _bounded(reader, at, length)))
        elif kind == b"S" or any(key.startswith("GNU.sparse.") for key in pax):
            raise reader.damaged(at, "it has a sparse member, which has no bytes of its own")
        elif kind not in (b"g", b"K"):
            yield pax.get("path") or long_name or _name(header), kind, offset, length
            long_name, pax = "", {}
        at = offset + length + -length % BLOCK
    if at == 0:
        raise reader.damaged(0, "it is too short to be a tar file")


def _bounded(reader: Reader, at: int, length: int) -> int:
    if length > MOST_NAME_BYTES:
        raise reader.damaged(at, f"a member's name or attributes have {length} bytes")
    return length


def _check_sum(reader: Reader, header: bytes, at: int) -> None:
    """The one thing that tells a tar header from anything else: the sum of its bytes, taken as blank itself."""
    stored = _octal(header[148:156])
    if stored != sum(header) - sum(header[148:156]) + 8 * 32:
        raise reader.damaged(at, "this is no tar header; a compressed tar must be unpacked to a plain one")


def _octal(digits: bytes) -> int | None:
    text = digits.split(b"\0")[0].strip()
    return int(text, 8) if text and all(digit in b"01234567" for digit in text) else 0 if not text else None


def _size(reader: Reader, header: bytes, at: int) -> int:
    digits = header[124:136]
    size = int.from_bytes(digits[1:], "big") if digits[0] == 0x80 else _octal(digits)  # GNU's form past 8 GiB
    if size is None:
        raise reader.damaged(at, f"the length of the member {_name(header)} is no number")
    return size


def _name(header: bytes) -> str:
    name, prefix = _text(header[:100].split(b"\0")[0]), ""
    if header[257:263] == b"ustar\0":
        prefix = _text(header[345:500].split(b"\0")[0])
    return f"{prefix}/{name}" if prefix else name


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _pax(reader: Reader, at: int, records: bytes) -> dict[str, str]:
    """The attributes of a pax header: lines of "LENGTH KEY=VALUE"."""
    found, place = {}, 0
    while place < len(records) and records[place]:
        digits = records[place : place + 20].split(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = records[place + len(digits) + 1 : place + length - 1].partition(b"=")
        if length < len(digits) + 3 or place + length > len(records) or not equals:
            raise reader.damaged(at, "a member's attributes make no sense")
        found[_text(key)] = _text(value)
        place += length
    return found


def _pax_size(reader: Reader, pax: dict[str, str], at: int, length: int) -> int:
    if "size" not in pax:
        return length
    if not (pax["size"].isascii() and pax["size"].isdigit() and len(pax["size"]) < 20):
        raise reader.damaged(at, "a member's attributes give it a length that is no number")
    return int(pax["size"])


FORMAT = Format(find, scan, packed=True)
