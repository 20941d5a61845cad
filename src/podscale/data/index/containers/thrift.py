"""Thrift's compact protocol, as far as parquet files use it: structs, lists, numbers and texts, within bounds.

A struct becomes a dict of its fields by number. Nothing is made by a length that is not checked, and everything takes
at least a byte of the file.
"""

from typing import Any

from podscale.data.index.containers.container import Reader

MOST_DEPTH = 16
MOST_TEXT_BYTES = 2**20
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _TEXT, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12


def struct(reader: Reader, at: int, end: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The fields of a struct, by number, and where it ends. Texts of many bytes, which nobody needs, are None."""
    fields: dict[int, Any] = {}
    number = 0
    while True:
        (head,) = reader.at(at, 1, end)
        at += 1
        if head == 0:
            return fields, at
        if head >> 4:
            number += head >> 4
        else:
            number, at = _signed(reader, at, end)
        if head & 15 in (_TRUE, _FALSE):  # a field's truth is in its head
            fields[number] = head & 15 == _TRUE
        else:
            fields[number], at = _value(reader, head & 15, at, end, depth)


def number(fields: Any, key: int) -> int | None:
    """A field that is a number, if there is one."""
    value = fields.get(key) if isinstance(fields, dict) else None
    return value if type(value) is int else None


def _value(reader: Reader, kind: int, at: int, end: int, depth: int) -> tuple[Any, int]:
    if depth > MOST_DEPTH:
        raise reader.damaged(at, "its metadata is nested too deeply")
    if kind in (_TRUE, _FALSE, _BYTE):
        return reader.at(at, 1, end)[0], at + 1
    if kind in (_I16, _I32, _I64):
        return _signed(reader, at, end)
    if kind == _DOUBLE:
        reader.at(at, 8, end)
        return None, at + 8
    if kind == _TEXT:
        length, at = reader.varint(at, end)
        if at + length > end:
            raise reader.damaged(at, f"a text in its metadata has {length} bytes, which is past the end")
        return reader.at(at, length, end) if length <= MOST_TEXT_BYTES else None, at + length
    if kind == _STRUCT:
        return struct(reader, at, end, depth + 1)
    if kind in (_LIST, _SET):
        return _list(reader, at, end, depth + 1)
    raise reader.damaged(at, "its metadata makes no sense")


def _list(reader: Reader, at: int, end: int, depth: int) -> tuple[list[Any], int]:
    (head,) = reader.at(at, 1, end)
    count, at = (head >> 4, at + 1) if head >> 4 < 15 else reader.varint(at + 1, end)
    if count > end - at:
        raise reader.damaged(at, f"a list in its metadata has {count} parts, which is past the end")
    values = []
    for _ in range(count):
        value, at = _value(reader, head & 15, at, end, depth)
        values.append(value)
    return values, at


def _signed(reader: Reader, at: int, end: int) -> tuple[int, int]:
    value, at = reader.varint(at, end)
    return (value >> 1) ^ -(value & 1), at
