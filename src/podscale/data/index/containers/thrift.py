"""Reader of Thrift's compact protocol, as far as parquet files use it: structs, lists, numbers and strings.

A struct becomes a dict of its fields by number. No length is used before it is checked against the bounds, and every
value takes at least a byte of the file.
"""

from typing import TypeAlias

from podscale.data.index.containers.container import Reader

Value: TypeAlias = "bool | int | bytes | list[Value] | Struct | None"
Struct: TypeAlias = dict[int, Value]  # fields by number
MAX_DEPTH = 16
MAX_STRING_BYTES = 2**20
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _STRING, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12


def read_struct(reader: Reader, at: int, end: int, depth: int = 0) -> tuple[Struct, int]:
    """Return the fields of a struct, by number, and where it ends. Strings of many bytes, never needed, are None."""
    fields: Struct = {}
    number = 0
    while True:
        (header,) = reader.read_range(at, 1, end)
        at += 1
        if header == 0:
            return fields, at
        if header >> 4:
            number += header >> 4
        else:
            number, at = _read_signed(reader, at, end)
        if header & 15 in (_TRUE, _FALSE):  # a boolean field's value is in its header
            fields[number] = header & 15 == _TRUE
        else:
            fields[number], at = _read_value(reader, header & 15, at, end, depth)


def get_number(fields: object, key: int) -> int | None:
    """Return a field if it is a number, else None."""
    value = fields.get(key) if isinstance(fields, dict) else None
    return value if type(value) is int else None


def _read_value(reader: Reader, kind: int, at: int, end: int, depth: int) -> tuple[Value, int]:
    if depth > MAX_DEPTH:
        raise reader.make_damage_error(at, "its metadata is nested too deeply")
    if kind in (_TRUE, _FALSE, _BYTE):
        return reader.read_range(at, 1, end)[0], at + 1
    if kind in (_I16, _I32, _I64):
        return _read_signed(reader, at, end)
    if kind == _DOUBLE:
        reader.read_range(at, 8, end)
        return None, at + 8
    if kind == _STRING:
        length, at = reader.read_varint(at, end)
        if at + length > end:
            raise reader.make_damage_error(at, f"a text in its metadata has {length} bytes, which is past the end")
        return reader.read_range(at, length, end) if length <= MAX_STRING_BYTES else None, at + length
    if kind == _STRUCT:
        return read_struct(reader, at, end, depth + 1)
    if kind in (_LIST, _SET):
        return _read_list(reader, at, end, depth + 1)
    raise reader.make_damage_error(at, "its metadata makes no sense")


def _read_list(reader: Reader, at: int, end: int, depth: int) -> tuple[list[Value], int]:
    (header,) = reader.read_range(at, 1, end)
    count, at = (header >> 4, at + 1) if header >> 4 < 15 else reader.read_varint(at + 1, end)
    if count > end - at:
        raise reader.make_damage_error(at, f"a list in its metadata has {count} parts, which is past the end")
    values = []
    for _ in range(count):
        value, at = _read_value(reader, header & 15, at, end, depth)
        values.append(value)
    return values, at


def _read_signed(reader: Reader, at: int, end: int) -> tuple[int, int]:
    value, at = reader.read_varint(at, end)
    return (value >> 1) ^ -(value & 1), at
