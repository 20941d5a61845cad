"""Write TensorBoard's event files without TensorBoard.

A file is a sequence of TFRecords: the length of the data (uint64), a masked CRC-32C of the length, the data, a masked
CRC-32C of the data, all little-endian. The data is a protobuf `Event`: wall_time (1, double), step (2, varint), and
either file_version (3, string) or summary (5), which holds a value (1) per curve: tag (1, string), simple_value (2,
float).
"""

import struct
from collections.abc import Mapping

POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
FILE_VERSION = "brain.Event:2"


def _make_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)  # noqa: PLW2901
        table.append(value)
    return table


_TABLE = tuple(_make_table())


def compute_crc32c(data: bytes) -> int:
    """Return the CRC-32C of some bytes.

    >>> hex(compute_crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def encode_record(data: bytes) -> bytes:
    """Return a TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + _mask_crc(length) + data + _mask_crc(data)


def _mask_crc(data: bytes) -> bytes:
    crc = compute_crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def encode_version(wall_time: float) -> bytes:
    """Return the event that a file starts with."""
    return encode_record(_encode_double(1, wall_time) + _encode_bytes(3, FILE_VERSION.encode()))


def encode_scalars(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """Return an event with one point for each curve."""
    values = (_encode_bytes(1, tag.encode()) + _encode_float(2, value) for tag, value in scalars.items())
    summary = b"".join(_encode_bytes(1, value) for value in values)
    return encode_record(_encode_double(1, wall_time) + _encode_varint(2, step) + _encode_bytes(5, summary))


# --- protobuf ------------------------------------------------------------------------------------------------------


def _encode_number(value: int) -> bytes:
    """Return a varint: seven bits per byte, lowest first."""
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _encode_varint(field: int, value: int) -> bytes:
    return _encode_number(field << 3) + _encode_number(value)


def _encode_double(field: int, value: float) -> bytes:
    return _encode_number(field << 3 | 1) + struct.pack("<d", value)


def _encode_bytes(field: int, value: bytes) -> bytes:
    return _encode_number(field << 3 | 2) + _encode_number(len(value)) + value


def _encode_float(field: int, value: float) -> bytes:
    try:
        return _encode_number(field << 3 | 5) + struct.pack("<f", value)
    except OverflowError:  # beyond float32
        return _encode_float(field, float("inf") if value > 0 else float("-inf"))
