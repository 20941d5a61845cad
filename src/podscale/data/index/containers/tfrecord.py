"""TFRecords of tf.train.Example, as TensorFlow's ImageNet scripts write them: image/encoded, image/class/label.

A file is a sequence of records: length uint64, masked CRC-32C of it uint32, the message, its checksum uint32. Messages
are not parsed in full: only tags, keys, the label and the class name are read, and the image remains in place as a byte
range. Labels may start at 1, as in those scripts; the distinct labels are counted from 0. image/width and image/height
are not used; sizes come from the images' own headers.
"""

import re
from collections.abc import Iterator

import numpy as np

from podscale.data.index.containers.container import ContainerSamples, Format, Listing, Reader, find_shards
from podscale.data.index.containers.entries import Folder
from podscale.data.index.containers.sources import BucketContainer
from podscale.errors import UserError

LAYOUT = "train-00000-of-01024 and so on, and validation-*, val-* or test-*, or folders of these names"
IMAGE, LABEL = b"image/encoded", b"image/class/label"
CLASS_NAMES = (b"image/class/synset", b"image/class/text")  # the first that is present names the class
_KEYS = frozenset({IMAGE, LABEL, *CLASS_NAMES})
MAX_TEXT_BYTES = 2**12
_SHARD = re.compile(r"-\d+-of-\d+$|\.tfrecords?$|\.tfrecords?-\d+-of-\d+$")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def find(root: Folder) -> Listing:
    """List the shards: uncompressed record files."""
    return find_shards(root, lambda name: _SHARD.search(name) is not None, LAYOUT)


def scan(path: str | BucketContainer) -> ContainerSamples:
    """Return the samples of a shard, in order."""
    rows: list[tuple[int, int, int]] = []
    label_names: dict[int, str] = {}
    sizes: list[tuple[int, int]] = []
    with Reader(path) as reader:
        for start, end in iterate_records(reader):
            offset, length, label, name = _parse_example(reader, start, end)
            rows.append((offset, length, label))
            sizes.append(reader.measure(offset, length))
            if name and label not in label_names:
                label_names[label] = name
    if not rows:
        raise UserError(f"{path} holds no records; write it again or remove it")
    offsets, lengths, labels = np.array(rows, np.int64).T
    measured = np.array(sizes, np.int32) if reader.has_measured else None
    return ContainerSamples(offsets, lengths, labels, label_names=label_names, sizes=measured)


# --- framing -------------------------------------------------------------------------------------------------------


def iterate_records(reader: Reader) -> Iterator[tuple[int, int]]:
    """Yield the first byte of every record's message and the byte after its last."""
    at = 0
    while at < reader.size:
        frame = reader.read_range(at, 12)
        if compute_masked_crc(frame[:8]) != int.from_bytes(frame[8:], "little"):
            raise reader.make_damage_error(
                at, "the checksum of a record's length is wrong; compressed records cannot be used"
            )
        start, length = at + 12, int.from_bytes(frame[:8], "little")
        if start + length + 4 > reader.size:
            raise reader.make_damage_error(at, f"a record has {length} bytes, which is past the end")
        yield start, start + length
        at = start + length + 4


def _make_crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(value >> 1) ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


_CRC = tuple(_make_crc_table())


def compute_masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of TFRecords: rotated and shifted, so that checksums of checksums work.

    >>> crc = 0xE3069283  # the CRC-32C of these nine digits in catalogues of checksums
    >>> compute_masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
    True
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# --- messages ------------------------------------------------------------------------------------------------------


def _parse_example(reader: Reader, start: int, end: int) -> tuple[int, int, int, str]:
    """Return offset and length of the image, label and class name of the Example between start and end."""
    features: dict[bytes, tuple[int, int]] = {}
    for message in _iterate_submessages(reader, start, end, 1):
        for entry in _iterate_submessages(reader, *message, 1):
            key, value = _parse_entry(reader, *entry)
            if key in _KEYS:
                features[key] = value
    if IMAGE not in features or LABEL not in features:
        missing = IMAGE if IMAGE not in features else LABEL
        raise reader.make_damage_error(start, f"a record has no {missing.decode()}")
    images = list(_iterate_values(reader, *features[IMAGE]))
    if len(images) != 1:
        raise reader.make_damage_error(start, f"a record has {len(images)} values of image/encoded, not one")
    names = (text for key in CLASS_NAMES if key in features for text in _iterate_values(reader, *features[key]))
    name = next(names, (0, 0))
    if name[1] - name[0] > MAX_TEXT_BYTES:
        raise reader.make_damage_error(name[0], "a class's name is too long")
    text = reader.read_range(name[0], name[1] - name[0]).decode("utf-8", "replace")
    return images[0][0], images[0][1] - images[0][0], _parse_integer(reader, *features[LABEL]), text


def _parse_entry(reader: Reader, start: int, end: int) -> tuple[bytes, tuple[int, int]]:
    """Return the key of an entry of the map of features, and the range of its value."""
    key, value = b"", (start, start)
    for number, kind, first, last in _iterate_fields(reader, start, end):
        if number == 1 and kind == _BYTES and last - first <= MAX_TEXT_BYTES:
            key = reader.read_range(first, last - first)
        elif number == 2 and kind == _BYTES:
            value = first, last
    return key, value


def _iterate_values(reader: Reader, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the values of a Feature's bytes_list."""
    for bytes_list in _iterate_submessages(reader, start, end, 1):
        yield from _iterate_submessages(reader, *bytes_list, 1)


def _parse_integer(reader: Reader, start: int, end: int) -> int:
    """Return the first number of a Feature's int64_list, packed or not."""
    for first, last in _iterate_submessages(reader, start, end, 3):
        number, kind, at, stop = next(_iterate_fields(reader, first, last), (0, 0, 0, 0))
        if number == 1 and kind in (_VARINT, _BYTES) and at < stop:
            value, _ = reader.read_varint(at, stop)
            value = value - 2**64 if value >= 2**63 else value
            if abs(value) < 2**62:
                return value
    raise reader.make_damage_error(start, "a record's image/class/label is not a number")


def _iterate_submessages(reader: Reader, start: int, end: int, field: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a message's length-delimited fields of number `field`."""
    for number, kind, first, last in _iterate_fields(reader, start, end):
        if number == field and kind == _BYTES:
            yield first, last


def _iterate_fields(reader: Reader, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type and range of every field of a message."""
    at = start
    while at < end:
        tag, first = reader.read_varint(at, end)
        kind = tag & 7
        if kind == _BYTES:
            length, first = reader.read_varint(first, end)
            last = first + length
        elif kind == _VARINT:
            _, last = reader.read_varint(first, end)
        elif kind in (_FIXED64, _FIXED32):
            last = first + (8 if kind == _FIXED64 else 4)
        else:
            raise reader.make_damage_error(at, "a record is no tf.train.Example")
        if last > end:
            raise reader.make_damage_error(at, "a record's field is longer than the record")
        yield tag >> 3, kind, first, last
        at = last


FORMAT = Format(find, scan, packed=True)
