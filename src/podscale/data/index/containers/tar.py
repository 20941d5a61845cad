"""WebDataset shards: tar files whose members with the same key form one sample. Read in place, never unpacked.

A member's key is its name up to the first dot of the base name. A key with a `.cls` (a whole number) or a `.json` with
a "label" (a whole number, or a class name) is a labelled sample and has one image, whose extension follows the first
dot; other members with that key are ignored. Under a key without a label every image is a sample of the class that its
folder is named after.

Members are only read by byte range and never extracted, so a name cannot lead anywhere. Still, images and labels with
an absolute name or with `..` in it are refused, and so are links, devices and anything else but regular files.
"""

import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from podscale.data.index.containers.container import ContainerSamples, Format, Listing, Reader, find_shards
from podscale.data.index.containers.entries import Folder
from podscale.data.index.containers.sources import BucketContainer
from podscale.data.index.table import Strings
from podscale.errors import UserError

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".ppm")
LABEL_EXTENSIONS = (".cls", ".json")
LAYOUT = "train*.tar and val*.tar (or validation*, test*), or train/*.tar and val/*.tar"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
BLOCK = 512
MAX_NAME_BYTES = 2**16
MAX_LABEL_BYTES = 2**20


def find(root: Folder) -> Listing:
    """List the shards: uncompressed tar files."""
    return find_shards(root, lambda name: name.endswith((".tar", *COMPRESSED)), LAYOUT)


@dataclass(slots=True)
class _KeyMembers:
    """The members of a shard with one key: images (name, offset, bytes) and the label, if any."""

    images: list[tuple[str, int, int]] = field(default_factory=list)
    label: int | str | None = None


def scan(path: str | BucketContainer) -> ContainerSamples:
    """Return the samples of a shard, in the order of their images."""
    if str(path).endswith(COMPRESSED):
        raise UserError(f"{path} is compressed; samples are read in place, so unpack it to a plain .tar first")
    sizes: dict[int, tuple[int, int]] = {}  # by offset
    with Reader(path) as reader:
        keys: dict[str, _KeyMembers] = {}
        for name, kind, offset, length in iterate_members(reader):
            extension = posixpath.splitext(name)[1].lower()
            if extension not in IMAGE_EXTENSIONS + LABEL_EXTENSIONS:
                continue
            _check_member(reader, name, kind, offset)
            key = keys.setdefault(_split_key(name)[0], _KeyMembers())
            if extension in IMAGE_EXTENSIONS:
                key.images.append((name, offset, length))
                sizes[offset] = reader.measure(offset, length)
            elif _split_key(name)[1] == extension:
                label = _read_label(reader, name, extension, offset, length)
                key.label = label if key.label is None else key.label
        samples = [sample for key in keys.values() for sample in _make_samples(reader, key)]
    if not samples:
        raise UserError(f"{path} holds no images ({' '.join(IMAGE_EXTENSIONS)}); write it again or remove it")
    samples.sort(key=lambda sample: sample[1])
    names, offsets, lengths, labels = zip(*samples, strict=True)
    class_names: tuple[str, ...] = ()
    if any(isinstance(label, str) for label in labels):
        if not all(isinstance(label, str) for label in labels):
            raise UserError(f"{path} has samples with numbers and samples with class names; use one way for all")
        class_names = tuple(sorted(set(labels)))
        number_of = {name: number for number, name in enumerate(class_names)}
        labels = tuple(number_of[label] for label in labels)
    columns = np.array([offsets, lengths, labels], np.int64)
    measured = np.array([sizes[offset] for offset in offsets], np.int32) if reader.has_measured else None
    strings = Strings.from_names(names)
    return ContainerSamples(columns[0], columns[1], columns[2], strings, class_names, sizes=measured)


def _split_key(name: str) -> tuple[str, str]:
    """Return the key and the extension of a member's name.

    >>> _split_key("n01440764/x.seg.png")
    ('n01440764/x', '.seg.png')
    """
    folder, base = posixpath.split(name)
    stem, dot, extension = base.partition(".")
    return posixpath.join(folder, stem), f"{dot}{extension}".lower()


def _make_samples(reader: Reader, key: _KeyMembers) -> list[tuple[str, int, int, int | str]]:
    """Return the samples of one key: (name, offset, bytes, label)."""
    if key.label is None:
        return [(name, offset, length, _get_class_folder(reader, name, offset)) for name, offset, length in key.images]
    exact = [image for image in key.images if _split_key(image[0])[1] in IMAGE_EXTENSIONS]
    if len(exact) > 1:
        names = " and ".join(name for name, _, _ in exact[:2])
        raise UserError(f"{reader.path} has two images with one label, {names}; give each a name of its own")
    return [(*image, key.label) for image in exact]


def _get_class_folder(reader: Reader, name: str, offset: int) -> str:
    folder = posixpath.basename(posixpath.dirname(name))
    if folder in ("", "."):
        why = f"the image {name} has no .cls, no .json with a label and no class folder"
        raise reader.make_damage_error(offset, why)
    return folder


def _check_member(reader: Reader, name: str, kind: bytes, offset: int) -> None:
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise reader.make_damage_error(offset, f"the member {name!r} has a name that leads out of the archive")
    if kind not in (b"0", b"\0", b"7"):
        raise reader.make_damage_error(offset, f"the member {name} is a link or a device, not a file")


def _read_label(reader: Reader, name: str, extension: str, offset: int, length: int) -> int | str | None:
    if length > MAX_LABEL_BYTES:
        raise reader.make_damage_error(offset, f"the label {name} has {length} bytes")
    text = reader.read_range(offset, length)
    try:
        if extension == ".cls":
            return _check_label(int(text))
        content = json.loads(text)
        label = content.get("label") if isinstance(content, dict) else None
        if label is None or (isinstance(label, str) and label.encode()):  # refuses surrogates, and an empty name
            return label
        if type(label) is int:
            return _check_label(label)
        raise ValueError("a label is a number or a name")
    except (ValueError, RecursionError) as error:
        raise reader.make_damage_error(
            offset, f"the label {name} is neither a whole number nor JSON with one"
        ) from error


def _check_label(label: int) -> int:
    if abs(label) >= 2**62:
        raise ValueError("a label out of range")
    return label


# --- the archive ---------------------------------------------------------------------------------------------------


def iterate_members(reader: Reader) -> Iterator[tuple[str, bytes, int, int]]:
    """Yield name, type, offset and length of every member, as written by POSIX (ustar, pax) and GNU tar."""
    at, long_name = 0, ""
    pax: dict[str, str] = {}
    while at + BLOCK <= reader.size:
        header = reader.read_range(at, BLOCK)
        if not header.strip(b"\0"):
            return
        _verify_checksum(reader, header, at)
        kind, length = header[156:157], _parse_size(reader, header, at)
        offset = at + BLOCK
        if kind not in (b"x", b"g", b"L", b"K"):
            length = _parse_pax_size(reader, pax, at, length)
            length = 0 if kind in (b"1", b"2", b"3", b"4", b"5", b"6") else length  # these have no data
        if offset + length > reader.size:
            raise reader.make_damage_error(
                at, f"the member {_parse_name(header)} has {length} bytes, which is past the end"
            )
        if kind == b"L":
            long_name = _decode_text(reader.read_range(offset, _check_name_length(reader, at, length)).split(b"\0")[0])
        elif kind == b"x":
            pax = _parse_pax(reader, at, reader.read_range(offset, _check_name_length(reader, at, length)))
        elif kind == b"S" or any(key.startswith("GNU.sparse.") for key in pax):
            raise reader.make_damage_error(at, "it has a sparse member, which has no bytes of its own")
        elif kind not in (b"g", b"K"):
            yield pax.get("path") or long_name or _parse_name(header), kind, offset, length
            long_name, pax = "", {}
        at = offset + length + -length % BLOCK
    if at == 0:
        raise reader.make_damage_error(0, "it is too short to be a tar file")


def _check_name_length(reader: Reader, at: int, length: int) -> int:
    if length > MAX_NAME_BYTES:
        raise reader.make_damage_error(at, f"a member's name or attributes have {length} bytes")
    return length


def _verify_checksum(reader: Reader, header: bytes, at: int) -> None:
    """Verify the sum of the header's bytes, the only mark of a tar header. The sum's own bytes count as blanks."""
    stored = _parse_octal(header[148:156])
    if stored != sum(header) - sum(header[148:156]) + 8 * 32:
        raise reader.make_damage_error(at, "this is no tar header; a compressed tar must be unpacked to a plain one")


def _parse_octal(digits: bytes) -> int | None:
    text = digits.split(b"\0")[0].strip()
    return int(text, 8) if text and all(digit in b"01234567" for digit in text) else 0 if not text else None


def _parse_size(reader: Reader, header: bytes, at: int) -> int:
    digits = header[124:136]
    size = int.from_bytes(digits[1:], "big") if digits[0] == 0x80 else _parse_octal(digits)  # GNU, 8 GiB and more
    if size is None:
        raise reader.make_damage_error(at, f"the length of the member {_parse_name(header)} is not a number")
    return size


def _parse_name(header: bytes) -> str:
    name, prefix = _decode_text(header[:100].split(b"\0")[0]), ""
    if header[257:263] == b"ustar\0":
        prefix = _decode_text(header[345:500].split(b"\0")[0])
    return f"{prefix}/{name}" if prefix else name


def _decode_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _parse_pax(reader: Reader, at: int, records: bytes) -> dict[str, str]:
    """Return the attributes of a pax header: lines of "LENGTH KEY=VALUE"."""
    attributes, start = {}, 0
    while start < len(records) and records[start]:
        digits = records[start : start + 20].split(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = records[start + len(digits) + 1 : start + length - 1].partition(b"=")
        if length < len(digits) + 3 or start + length > len(records) or not equals:
            raise reader.make_damage_error(at, "a member's attributes make no sense")
        attributes[_decode_text(key)] = _decode_text(value)
        start += length
    return attributes


def _parse_pax_size(reader: Reader, pax: dict[str, str], at: int, length: int) -> int:
    if "size" not in pax:
        return length
    if not (pax["size"].isascii() and pax["size"].isdigit() and len(pax["size"]) < 20):
        raise reader.make_damage_error(at, "a member's attributes give it a length that is not a number")
    return int(pax["size"])


FORMAT = Format(find, scan, packed=True)
