"""Parquet files as Hugging Face's image data sets have them: a column of encoded pictures, a column of labels.

The pictures are read in place, so their column must be uncompressed and its pages PLAIN: then each value is four bytes
of length and the picture. Pages are walked by their headers (Thrift's compact protocol). The rest, which may be
compressed, is pyarrow's: the footer, the labels, and the class names in the schema's "huggingface" metadata.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.data.containers import Format, Found, Part, Reader, find_shards
from podscale.errors import UserError

LAYOUT = "train*.parquet and validation*.parquet (or val*, test*), or folders of these names"
COLUMNS = ("image.bytes", "image")
REWRITE = 'pyarrow.parquet.write_table(pyarrow.parquet.read_table(FILE), NEW, compression="none", use_dictionary=False)'
MOST_DEPTH = 16
_DATA, _INDEX, _DATA_V2 = 0, 1, 3
_PLAIN = 0


def find(root: Path) -> Found:
    """The shards: parquet files."""
    return find_shards(root, lambda name: name.endswith(".parquet"), LAYOUT)


def scan(path: str) -> Part:
    """The samples of a file, in the order of its rows."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("parquet files need pyarrow; install it: pip install 'podscale[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            ranges = _pictures(path, file)
            labels = _labels(path, file)
            classes = _class_names(file.schema_arrow)
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"cannot read {path}: {why}; copy or write it again") from error
    if len(ranges) != len(labels) or not len(labels):
        raise UserError(f"{path} has {len(ranges)} pictures and {len(labels)} labels; write it again")
    return Part(ranges[:, 0].copy(), ranges[:, 1].copy(), labels, classes=classes)


def _pictures(path: str, file: Any) -> NDArray[np.int64]:
    """Offset and bytes of every picture [n, 2], over all row groups."""
    column = _column(path, file)
    levels = file.schema.column(column)
    if levels.max_repetition_level or levels.physical_type != "BYTE_ARRAY":
        raise UserError(f"{path} has no single picture a row in its column image; store one as bytes")
    ranges = [np.zeros((0, 2), np.int64)]
    with Reader(path) as reader:
        for group in range(file.metadata.num_row_groups):
            chunk = file.metadata.row_group(group).column(column)
            if chunk.compression != "UNCOMPRESSED":
                raise _rewrite(path, f"compresses its column of pictures ({chunk.compression})")
            if chunk.has_dictionary_page:
                raise _rewrite(path, "keeps pictures in a dictionary")
            start, end = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
            found = list(values(reader, start, end, chunk.num_values, levels.max_definition_level))
            ranges.append(np.array(found, np.int64).reshape(-1, 2))
    return np.concatenate(ranges)


def _rewrite(path: str, why: str) -> UserError:
    return UserError(f"{path} {why}, so they cannot be read in place; rewrite it: {REWRITE}")


def _column(path: str, file: Any) -> int:
    paths = [file.schema.column(i).path for i in range(len(file.schema))]
    for wanted in COLUMNS:
        if wanted in paths:
            return paths.index(wanted)
    names = ", ".join(file.schema_arrow.names)
    raise UserError(f"{path} has no column image with the bytes of pictures; its columns are {names}")


def _labels(path: str, file: Any) -> NDArray[np.int64]:
    names = file.schema_arrow.names
    if "label" not in names:
        raise UserError(f"{path} has no column label; its columns are {', '.join(names)}")
    column = file.read(columns=["label"]).column("label")
    if not str(column.type).startswith(("int", "uint")) or column.null_count:
        raise UserError(f"{path} has labels of type {column.type} ({column.null_count} absent); store whole numbers")
    labels = column.to_numpy()
    if len(labels) and int(labels.max()) >= 2**62:
        raise UserError(f"{path} has label {labels.max()}; labels count from 0, one a class")
    return labels.astype(np.int64)


def _class_names(schema: Any) -> tuple[str, ...]:
    """The names of a ClassLabel, if the schema's metadata has them."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


# --- pages ---------------------------------------------------------------------------------------------------------


def values(reader: Reader, start: int, end: int, count: int, max_level: int) -> Iterator[tuple[int, int]]:
    """Offset and bytes of each of `count` values of an uncompressed column chunk of byte arrays."""
    at, left = start, count
    while left > 0:
        page, body = _struct(reader, at, end)
        kind, length = _get(reader, at, page, 1), _get(reader, at, page, 3)
        if length < 0 or body + length > min(end, reader.size):
            raise reader.damaged(at, f"a page has {length} bytes, which is past its column's end")
        if kind in (_DATA, _DATA_V2):
            n, first = _levels(reader, at, page, body, body + length, max_level)
            if n < 0 or n > left:
                raise reader.damaged(at, f"a page has {n} values where {left} are left")
            yield from _plain(reader, first, body + length, n)
            left -= n
        elif kind != _INDEX:
            raise _rewrite(reader.path, "keeps pictures in a dictionary")
        at = body + length


def _levels(reader: Reader, at: int, page: dict[int, Any], body: int, end: int, max_level: int) -> tuple[int, int]:
    """How many values a data page has and where they begin, behind the levels that say that none is absent."""
    second = _get(reader, at, page, 1) == _DATA_V2
    header = page.get(8 if second else 5)
    if not isinstance(header, dict):
        raise reader.damaged(at, "a page's header lacks its number of values")
    n = _get(reader, at, header, 1)
    if _get(reader, at, header, 4 if second else 2) != _PLAIN:
        raise _rewrite(reader.path, "encodes its column of pictures")
    if second:
        first, bytes_ = body + _get(reader, at, header, 6), _get(reader, at, header, 5)
        if _get(reader, at, header, 6) or (bytes_ and not max_level):
            raise reader.damaged(at, "a page has levels that its schema does not")
    elif max_level:
        first, bytes_ = body + 4, int.from_bytes(reader.at(body, 4, end), "little")
    else:
        first, bytes_ = body, 0
    if bytes_ < 0 or first + bytes_ > end:
        raise reader.damaged(at, "a page's levels are longer than the page")
    if max_level and not _all_there(reader, first, first + bytes_, n, max_level):
        raise UserError(f"{reader.path} has rows without a picture; remove them")
    return n, first + bytes_


def _all_there(reader: Reader, start: int, end: int, n: int, level: int) -> bool:
    """Whether all n levels, in runs that are repeated or packed bit by bit, are `level`."""
    width, at, left = level.bit_length(), start, n
    while left > 0:
        head, at = reader.varint(at, end)
        size = (width + 7) // 8 if not head & 1 else (head >> 1) * width
        run = reader.at(at, size, end)
        at += size
        number = int.from_bytes(run, "little")
        if not head & 1:
            if head >> 1 and number != level:
                return False
            left -= head >> 1
        else:
            count = min((head >> 1) * 8, left)
            expected = sum(level << width * place for place in range(8))  # eight levels, whole bytes
            whole, rest = divmod(count, 8)
            if run[: whole * width] != expected.to_bytes(width, "little") * whole:
                return False
            tail = (1 << rest * width) - 1
            if (number >> whole * 8 * width) & tail != expected & tail:
                return False
            left -= count
    return True


def _plain(reader: Reader, start: int, end: int, n: int) -> Iterator[tuple[int, int]]:
    at = start
    for _ in range(n):
        length = int.from_bytes(reader.at(at, 4, end), "little")
        at += 4
        if at + length > end:
            raise reader.damaged(at, f"a picture has {length} bytes, which is past its page's end")
        yield at, length
        at += length


# --- Thrift's compact protocol ---------------------------------------------------------------------------------------


def _get(reader: Reader, at: int, fields: dict[int, Any], number: int) -> int:
    value = fields.get(number)
    if not isinstance(value, int):
        raise reader.damaged(at, "a page's header makes no sense")
    return value


def _struct(reader: Reader, at: int, end: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The numbers and inner structs of a struct, by field, and where it ends; all else is passed over."""
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
        fields[number], at = _value(reader, head & 15, at, end, depth)


def _value(reader: Reader, kind: int, at: int, end: int, depth: int) -> tuple[Any, int]:
    if depth > MOST_DEPTH:
        raise reader.damaged(at, "a page's header is nested too deeply")
    if kind in (1, 2):  # true and false, which have no bytes
        return kind == 1, at
    if kind in (4, 5, 6):
        return _signed(reader, at, end)
    if kind == 8:
        length, at = reader.varint(at, end)
        if at + length > end:
            raise reader.damaged(at, "a text in a page's header is longer than the column")
        return None, at + length
    if kind in (3, 7):
        return None, at + (1 if kind == 3 else 8)
    if kind == 12:
        return _struct(reader, at, end, depth + 1)
    raise reader.damaged(at, "a page's header makes no sense")  # no list, set or map is in any page's header


def _signed(reader: Reader, at: int, end: int) -> tuple[int, int]:
    value, at = reader.varint(at, end)
    return (value >> 1) ^ -(value & 1), at


FORMAT = Format(find, scan, packed=True)
