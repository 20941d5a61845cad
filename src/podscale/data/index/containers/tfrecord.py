"""TFRecords of tf.train.Example, as TensorFlow's ImageNet scripts write them: image/encoded, image/class/label.

A file is a sequence of records: length uint64, masked CRC-32C of it uint32, the message, its checksum uint32. Messages
are walked, not read: only tags, keys, the label and the class's name are looked at, and the picture is left where it is
as a range of bytes. Labels may begin at 1, as those scripts have them; the distinct ones are counted from 0.
image/width and image/height are not trusted; the pictures' own headers are.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from podscale.data.index.containers.container import Format, Found, Part, Reader, find_shards
from podscale.errors import UserError

LAYOUT = "train-00000-of-01024 and so on, and validation-*, val-* or test-*, or folders of these names"
PICTURE, LABEL = b"image/encoded", b"image/class/label"
NAMES = (b"image/class/synset", b"image/class/text")  # the first that is there names the class
_WANTED = {PICTURE, LABEL, *NAMES}
MOST_TEXT_BYTES = 2**12
_SHARD = re.compile(r"-\d+-of-\d+$|\.tfrecords?$|\.tfrecords?-\d+-of-\d+$")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def find(root: Path) -> Found:
    """The shards: uncompressed record files."""
    return find_shards(root, lambda name: _SHARD.search(name) is not None, LAYOUT)


def scan(path: str) -> Part:
    """The samples of a shard, in order."""
    rows: list[tuple[int, int, int]] = []
    texts: dict[int, str] = {}
    with Reader(path) as reader:
        for start, end in records(reader):
            offset, length, label, name = _example(reader, start, end)
            rows.append((offset, length, label))
            if name and label not in texts:
                texts[label] = name
    if not rows:
        raise UserError(f"{path} holds no records; write it again or remove it")
    offsets, lengths, labels = np.array(rows, np.int64).T
    return Part(offsets, lengths, labels, texts=texts)


# --- framing -------------------------------------------------------------------------------------------------------


def records(reader: Reader) -> Iterator[tuple[int, int]]:
    """First and past-the-last byte of every record's message."""
    at = 0
    while at < reader.size:
        frame = reader.at(at, 12)
        if masked_crc(frame[:8]) != int.from_bytes(frame[8:], "little"):
            raise reader.damaged(at, "the checksum of a record's length is wrong; compressed records cannot be used")
        start, length = at + 12, int.from_bytes(frame[:8], "little")
        if start + length + 4 > reader.size:
            raise reader.damaged(at, f"a record has {length} bytes, which is past the end")
        yield start, start + length
        at = start + length + 4


def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(value >> 1) ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


_CRC = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecords have it, so that checksums of checksums work.

    >>> crc = 0xE3069283  # of these nine digits, as every catalogue of checksums has it
    >>> masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
    True
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# --- messages ------------------------------------------------------------------------------------------------------


def _example(reader: Reader, start: int, end: int) -> tuple[int, int, int, str]:
    """Offset and bytes of the picture, label and class name of the Example between start and end."""
    found: dict[bytes, tuple[int, int]] = {}
    for features in _inside(reader, start, end, 1):
        for entry in _inside(reader, *features, 1):
            key, value = _entry(reader, *entry)
            if key in _WANTED:
                found[key] = value
    if PICTURE not in found or LABEL not in found:
        missing = PICTURE if PICTURE not in found else LABEL
        raise reader.damaged(start, f"a record has no {missing.decode()}")
    picture = list(_values(reader, *found[PICTURE]))
    if len(picture) != 1:
        raise reader.damaged(start, f"a record has {len(picture)} values of image/encoded, not one")
    names = (text for key in NAMES if key in found for text in _values(reader, *found[key]))
    name = next(names, (0, 0))
    if name[1] - name[0] > MOST_TEXT_BYTES:
        raise reader.damaged(name[0], "a class's name is too long")
    text = reader.at(name[0], name[1] - name[0]).decode("utf-8", "replace")
    return picture[0][0], picture[0][1] - picture[0][0], _integer(reader, *found[LABEL]), text


def _entry(reader: Reader, start: int, end: int) -> tuple[bytes, tuple[int, int]]:
    """Key and range of the value of an entry of the map of features."""
    key, value = b"", (start, start)
    for number, kind, first, last in _fields(reader, start, end):
        if number == 1 and kind == _BYTES and last - first <= MOST_TEXT_BYTES:
            key = reader.at(first, last - first)
        elif number == 2 and kind == _BYTES:
            value = first, last
    return key, value


def _values(reader: Reader, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges of a Feature's texts: of its bytes_list, the values."""
    for listed in _inside(reader, start, end, 1):
        yield from _inside(reader, *listed, 1)


def _integer(reader: Reader, start: int, end: int) -> int:
    """The one number of a Feature's int64_list, packed or not."""
    for first, last in _inside(reader, start, end, 3):
        number, kind, at, stop = next(_fields(reader, first, last), (0, 0, 0, 0))
        if number == 1 and kind in (_VARINT, _BYTES) and at < stop:
            value, _ = reader.varint(at, stop)
            value = value - 2**64 if value >= 2**63 else value
            if abs(value) < 2**62:
                return value
    raise reader.damaged(start, "a record's image/class/label is no number")


def _inside(reader: Reader, start: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """The ranges of a message's fields of that number that have a length."""
    for number, kind, first, last in _fields(reader, start, end):
        if number == wanted and kind == _BYTES:
            yield first, last


def _fields(reader: Reader, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type and the range of every field of a message."""
    at = start
    while at < end:
        tag, first = reader.varint(at, end)
        kind = tag & 7
        if kind == _BYTES:
            length, first = reader.varint(first, end)
            last = first + length
        elif kind == _VARINT:
            _, last = reader.varint(first, end)
        elif kind in (_FIXED64, _FIXED32):
            last = first + (8 if kind == _FIXED64 else 4)
        else:
            raise reader.damaged(at, "a record is no tf.train.Example")
        if last > end:
            raise reader.damaged(at, "a record's field is longer than the record")
        yield tag >> 3, kind, first, last
        at = last


FORMAT = Format(find, scan, packed=True)
