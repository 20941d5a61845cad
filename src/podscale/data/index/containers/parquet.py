"""Parquet files as Hugging Face's image data sets have them: a column of encoded pictures, a column of labels.

The pictures are read in place, so their column must be uncompressed and its pages PLAIN: then each value is four bytes
of length and the picture. The footer says where the column's pages are, and has the class names in its "huggingface"
metadata; pages are walked by their headers. The labels, which may be compressed, are pyarrow's to read.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.data.index.containers import thrift
from podscale.data.index.containers.container import Format, Found, Part, Reader, find_shards
from podscale.errors import UserError

LAYOUT = "train*.parquet and validation*.parquet (or val*, test*), or folders of these names"
COLUMNS = ((b"image", b"bytes"), (b"image",))
REWRITE = 'pyarrow.parquet.write_table(pyarrow.parquet.read_table(FILE), NEW, compression="none", use_dictionary=False)'
CODECS = {1: "SNAPPY", 2: "GZIP", 3: "LZO", 4: "BROTLI", 5: "LZ4", 6: "ZSTD", 7: "LZ4_RAW"}
MOST_FOOTER_BYTES = 2**23
_BYTE_ARRAY = 6
_DATA, _INDEX, _DATA_V2 = 0, 1, 3
_PLAIN = 0


def find(root: Path) -> Found:
    """The shards: parquet files."""
    return find_shards(root, lambda name: name.endswith(".parquet"), LAYOUT)


def scan(path: str) -> Part:
    """The samples of a file, in the order of its rows."""
    _check_pyarrow()
    with Reader(path) as reader:
        footer = _footer(reader)
        ranges = _pictures(reader, footer)
        names = _class_names(footer)
    labels = _labels(path)
    if len(ranges) != len(labels) or not len(labels):
        raise UserError(f"{path} has {len(ranges)} pictures and {len(labels)} labels; write it again")
    return Part(ranges[:, 0].copy(), ranges[:, 1].copy(), labels, classes=names)


def _check_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError("parquet files need pyarrow; install it: pip install 'podscale[parquet]'") from error


def _labels(path: str) -> NDArray[np.int64]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            column = file.read(columns=["label"]).column("label") if "label" in names else None
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"cannot read {path}: {why}; copy or write it again") from error
    if column is None:
        raise UserError(f"{path} has no column label; its columns are {', '.join(names)}")
    if not str(column.type).startswith(("int", "uint")) or column.null_count:
        raise UserError(f"{path} has labels of type {column.type} ({column.null_count} absent); store whole numbers")
    labels = column.to_numpy()
    if len(labels) and int(labels.max()) >= 2**62:
        raise UserError(f"{path} has label {labels.max()}; labels count from 0, one a class")
    return labels.astype(np.int64)


# --- the footer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """A column that has values: its path, the level of a value that is there, and of what type it is."""

    path: tuple[bytes, ...]
    level: int
    repeated: bool
    kind: int | None


def _footer(reader: Reader) -> dict[int, Any]:
    end = reader.at(max(reader.size - 8, 0), min(8, reader.size))
    length = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or length > min(reader.size - 8, MOST_FOOTER_BYTES):
        raise reader.damaged(reader.size, "it does not end as a parquet file does")
    start = reader.size - 8 - length
    return thrift.struct(reader, start, start + length)[0]


def _structs(values: Any) -> list[dict[int, Any]]:
    """The structs of a list, of whatever is said to be one."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _leaves(reader: Reader, footer: dict[int, Any]) -> list[_Leaf]:
    """The schema is a tree, written parents first."""
    leaves: list[_Leaf] = []
    open_: list[list[Any]] = []  # path, level, repeated, children to come
    for element in _structs(footer.get(2)):
        while open_ and open_[-1][3] == 0:
            open_.pop()
        path, level, repeated = ((), 0, False) if not open_ else open_[-1][:3]
        if open_:
            open_[-1][3] -= 1
            name = element.get(4)
            path = (*path, name if isinstance(name, bytes) else b"")
            repetition = thrift.number(element, 3)
            level, repeated = level + (repetition in (1, 2)), repeated or repetition == 2
        children = thrift.number(element, 5) or 0
        if len(path) > thrift.MOST_DEPTH:
            raise reader.damaged(reader.size, "its columns are nested too deeply")
        if children > 0:
            open_.append([path, level, repeated, children])
        elif open_:
            leaves.append(_Leaf(path, level, repeated, thrift.number(element, 1)))
    return leaves


def _pictures(reader: Reader, footer: dict[int, Any]) -> NDArray[np.int64]:
    """Offset and bytes of every picture [n, 2], over all row groups."""
    leaf = _picture_leaf(reader, _leaves(reader, footer))
    ranges = [np.zeros((0, 2), np.int64)]
    for group in _structs(footer.get(4)):
        chunks = [chunk.get(3) for chunk in _structs(group.get(1)) if 1 not in chunk]  # 1: in another file
        chunk = next((c for c in chunks if isinstance(c, dict) and c.get(3) == list(leaf.path)), None)
        codec, count, length, start = (thrift.number(chunk, key) for key in (4, 5, 7, 9))
        if chunk is None or codec is None or count is None or length is None or start is None:
            raise reader.damaged(reader.size, "a row group has no pictures")
        if codec:
            raise _rewrite(reader.path, f"compresses its column of pictures ({CODECS.get(codec, codec)})")
        if thrift.number(chunk, 11):
            raise _rewrite(reader.path, "keeps pictures in a dictionary")
        found = list(values(reader, start, start + length, count, leaf.level))
        ranges.append(np.array(found, np.int64).reshape(-1, 2))
    return np.concatenate(ranges)


def _picture_leaf(reader: Reader, leaves: list[_Leaf]) -> _Leaf:
    leaf = next((leaf for wanted in COLUMNS for leaf in leaves if leaf.path == wanted), None)
    if leaf is None:
        names = ", ".join(sorted({leaf.path[0].decode("utf-8", "replace") for leaf in leaves}))
        raise UserError(f"{reader.path} has no column image with the bytes of pictures; its columns are {names}")
    if leaf.repeated or leaf.kind != _BYTE_ARRAY:
        raise UserError(f"{reader.path} has no single picture a row in its column image; store one as bytes")
    return leaf


def _class_names(footer: dict[int, Any]) -> tuple[str, ...]:
    """The names of a ClassLabel, if the schema's metadata has them."""
    text = next((pair.get(2) for pair in _structs(footer.get(5)) if pair.get(1) == b"huggingface"), None)
    try:
        names = json.loads(text or b"")["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def _rewrite(path: str, why: str) -> UserError:
    return UserError(f"{path} {why}, so they cannot be read in place; rewrite it: {REWRITE}")


# --- pages ---------------------------------------------------------------------------------------------------------


def values(reader: Reader, start: int, end: int, count: int, max_level: int) -> Iterator[tuple[int, int]]:
    """Offset and bytes of each of `count` values of an uncompressed column chunk of byte arrays."""
    at, left = start, count
    while left > 0:
        page, body = thrift.struct(reader, at, end)
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


def _get(reader: Reader, at: int, fields: dict[int, Any], number: int) -> int:
    value = thrift.number(fields, number)
    if value is None:
        raise reader.damaged(at, "a page's header makes no sense")
    return value


FORMAT = Format(find, scan, packed=True)
