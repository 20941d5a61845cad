"""Parquet files as in Hugging Face's image data sets: a column of encoded images and a column of labels.

The images are read in place, so their column must be uncompressed and its pages PLAIN: then each value is four bytes
of length and the image. The footer gives the position of the column's pages, and has the class names in its
"huggingface" metadata; the headers of the pages lead from one page to the next. pyarrow reads the labels, which may be
compressed.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.data.index.containers import thrift
from podscale.data.index.containers.container import (
    ContainerSamples,
    Format,
    Listing,
    Reader,
    find_shards,
)
from podscale.data.index.containers.entries import Folder
from podscale.data.index.containers.sources import BucketContainer
from podscale.data.index.containers.thrift import Struct
from podscale.errors import UserError
from podscale.storage.range_file import RangeFile

LAYOUT = "train*.parquet and validation*.parquet (or val*, test*), or folders of these names"
COLUMNS = ((b"image", b"bytes"), (b"image",))
REWRITE = 'pyarrow.parquet.write_table(pyarrow.parquet.read_table(FILE), NEW, compression="none", use_dictionary=False)'
CODECS = MappingProxyType({1: "SNAPPY", 2: "GZIP", 3: "LZO", 4: "BROTLI", 5: "LZ4", 6: "ZSTD", 7: "LZ4_RAW"})
MAX_FOOTER_BYTES = 2**23
LABEL_PAGE = 2**16  # bytes of a request for labels
_BYTE_ARRAY = 6
_DATA, _INDEX, _DATA_V2 = 0, 1, 3
_PLAIN = 0


def find(root: Folder) -> Listing:
    """List the shards: parquet files."""
    return find_shards(root, lambda name: name.endswith(".parquet"), LAYOUT)


def scan(path: str | BucketContainer) -> ContainerSamples:
    """Return the samples of a file, in the order of its rows."""
    _check_pyarrow()
    with Reader(path) as reader:
        footer = _read_footer(reader)
        ranges = _locate_images(reader, footer)
        names = _parse_class_names(footer)
        labels = _read_labels(reader, None if isinstance(path, str) else RangeFile(reader.read_range, 0, reader.size))
    if len(ranges) != len(labels) or not len(labels):
        raise UserError(f"{path} has {len(ranges)} images and {len(labels)} labels; write it again")
    measured = ranges[:, 2:].astype(np.int32) if reader.has_measured else None
    return ContainerSamples(ranges[:, 0].copy(), ranges[:, 1].copy(), labels, classes=names, sizes=measured)


def _check_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError("parquet files need pyarrow; install it: pip install 'podscale[parquet]'") from error


def _read_labels(reader: Reader, window: RangeFile | None) -> NDArray[np.int64]:
    """Return the labels of a file on disk, or of an object through a window."""
    import pyarrow
    from pyarrow import parquet

    path = reader.path
    try:
        with parquet.ParquetFile(path if window is None else io.BufferedReader(window, LABEL_PAGE)) as file:
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
        raise UserError(f"{path} has label {labels.max()}; labels count from 0, one per class")
    return labels.astype(np.int64)


# --- the footer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """A column that has values: its path, the definition level of a present value, and its type."""

    path: tuple[bytes, ...]
    level: int
    repeated: bool
    kind: int | None


def _read_footer(reader: Reader) -> Struct:
    end = reader.read_range(max(reader.size - 8, 0), min(8, reader.size))
    length = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or length > min(reader.size - 8, MAX_FOOTER_BYTES):
        raise reader.make_damage_error(reader.size, "it does not end as a parquet file does")
    start = reader.size - 8 - length
    return thrift.read_struct(reader, start, start + length)[0]


def _select_structs(values: object) -> list[Struct]:
    """Return the structs in a list; none if the value is not a list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _list_leaves(reader: Reader, footer: Struct) -> list[_Leaf]:
    """Return the columns that have values. The schema is a tree, stored parents first."""
    leaves: list[_Leaf] = []
    parents: list[list[Any]] = []  # path, level, repeated, number of children left
    for element in _select_structs(footer.get(2)):
        while parents and parents[-1][3] == 0:
            parents.pop()
        path, level, repeated = ((), 0, False) if not parents else parents[-1][:3]
        if parents:
            parents[-1][3] -= 1
            name = element.get(4)
            path = (*path, name if isinstance(name, bytes) else b"")
            repetition = thrift.get_number(element, 3)
            level, repeated = level + (repetition in (1, 2)), repeated or repetition == 2
        children = thrift.get_number(element, 5) or 0
        if len(path) > thrift.MAX_DEPTH:
            raise reader.make_damage_error(reader.size, "its columns are nested too deeply")
        if children > 0:
            parents.append([path, level, repeated, children])
        elif parents:
            leaves.append(_Leaf(path, level, repeated, thrift.get_number(element, 1)))
    return leaves


def _locate_images(reader: Reader, footer: Struct) -> NDArray[np.int64]:
    """Return offset, length, width and height of every image [n, 4], over all row groups; see `Reader.measure`."""
    leaf = _find_image_leaf(reader, _list_leaves(reader, footer))
    ranges = [np.zeros((0, 4), np.int64)]
    for group in _select_structs(footer.get(4)):
        chunks = [chunk.get(3) for chunk in _select_structs(group.get(1)) if 1 not in chunk]  # 1: in another file
        chunk = next((c for c in chunks if isinstance(c, dict) and c.get(3) == list(leaf.path)), None)
        codec, count, length, start = (thrift.get_number(chunk, key) for key in (4, 5, 7, 9))
        if chunk is None or codec is None or count is None or length is None or start is None:
            raise reader.make_damage_error(reader.size, "a row group has no images")
        if codec:
            raise _make_rewrite_error(reader.path, f"compresses its column of images ({CODECS.get(codec, codec)})")
        if thrift.get_number(chunk, 11):
            raise _make_rewrite_error(reader.path, "keeps images in a dictionary")
        values = iterate_values(reader, start, start + length, count, leaf.level)
        rows = [(at, size, *reader.measure(at, size)) for at, size in values]
        ranges.append(np.array(rows, np.int64).reshape(-1, 4))
    return np.concatenate(ranges)


def _find_image_leaf(reader: Reader, leaves: list[_Leaf]) -> _Leaf:
    leaf = next((leaf for path in COLUMNS for leaf in leaves if leaf.path == path), None)
    if leaf is None:
        names = ", ".join(sorted({leaf.path[0].decode("utf-8", "replace") for leaf in leaves}))
        raise UserError(f"{reader.path} has no column image with the bytes of images; its columns are {names}")
    if leaf.repeated or leaf.kind != _BYTE_ARRAY:
        raise UserError(f"{reader.path} does not have one image per row in its column image; store one as bytes")
    return leaf


def _parse_class_names(footer: Struct) -> tuple[str, ...]:
    """Return the names of a ClassLabel, if the schema's metadata has them."""
    text = next((pair.get(2) for pair in _select_structs(footer.get(5)) if pair.get(1) == b"huggingface"), None)
    try:
        names = json.loads(text if isinstance(text, bytes) else b"")["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def _make_rewrite_error(path: str, why: str) -> UserError:
    return UserError(f"{path} {why}, so they cannot be read in place; rewrite it: {REWRITE}")


# --- pages ---------------------------------------------------------------------------------------------------------


def iterate_values(reader: Reader, start: int, end: int, count: int, max_level: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each of `count` values of an uncompressed column chunk of byte arrays."""
    at, remaining = start, count
    while remaining > 0:
        page, body = thrift.read_struct(reader, at, end)
        kind, length = _require_number(reader, at, page, 1), _require_number(reader, at, page, 3)
        if length < 0 or body + length > min(end, reader.size):
            raise reader.make_damage_error(at, f"a page has {length} bytes, which is past its column's end")
        if kind in (_DATA, _DATA_V2):
            n, first = _skip_levels(reader, at, page, body, body + length, max_level)
            if n < 0 or n > remaining:
                raise reader.make_damage_error(at, f"a page has {n} values where {remaining} are left")
            yield from _iterate_plain(reader, first, body + length, n)
            remaining -= n
        elif kind != _INDEX:
            raise _make_rewrite_error(reader.path, "keeps images in a dictionary")
        at = body + length


def _skip_levels(reader: Reader, at: int, page: Struct, body: int, end: int, max_level: int) -> tuple[int, int]:
    """Return the number of values of a data page and where they start, after the levels that prove none is absent."""
    is_v2 = _require_number(reader, at, page, 1) == _DATA_V2
    header = page.get(8 if is_v2 else 5)
    if not isinstance(header, dict):
        raise reader.make_damage_error(at, "a page's header lacks its number of values")
    n = _require_number(reader, at, header, 1)
    if _require_number(reader, at, header, 4 if is_v2 else 2) != _PLAIN:
        raise _make_rewrite_error(reader.path, "encodes its column of images")
    if is_v2:
        first, level_bytes = body + _require_number(reader, at, header, 6), _require_number(reader, at, header, 5)
        if _require_number(reader, at, header, 6) or (level_bytes and not max_level):
            raise reader.make_damage_error(at, "a page has levels that its schema does not")
    elif max_level:
        first, level_bytes = body + 4, int.from_bytes(reader.read_range(body, 4, end), "little")
    else:
        first, level_bytes = body, 0
    if level_bytes < 0 or first + level_bytes > end:
        raise reader.make_damage_error(at, "a page's levels are longer than the page")
    if max_level and not _has_all_values(reader, first, first + level_bytes, n, max_level):
        raise UserError(f"{reader.path} has rows without an image; remove them")
    return n, first + level_bytes


def _has_all_values(reader: Reader, start: int, end: int, n: int, level: int) -> bool:
    """Return whether all n levels, in runs that are repeated or bit-packed, equal `level`."""
    width, at, remaining = level.bit_length(), start, n
    while remaining > 0:
        header, at = reader.read_varint(at, end)
        size = (width + 7) // 8 if not header & 1 else (header >> 1) * width
        run = reader.read_range(at, size, end)
        at += size
        number = int.from_bytes(run, "little")
        if not header & 1:
            if header >> 1 and number != level:
                return False
            remaining -= header >> 1
        else:
            count = min((header >> 1) * 8, remaining)
            expected = sum(level << width * i for i in range(8))  # eight levels fill whole bytes
            whole, extra = divmod(count, 8)
            if run[: whole * width] != expected.to_bytes(width, "little") * whole:
                return False
            tail = (1 << extra * width) - 1
            if (number >> whole * 8 * width) & tail != expected & tail:
                return False
            remaining -= count
    return True


def _iterate_plain(reader: Reader, start: int, end: int, n: int) -> Iterator[tuple[int, int]]:
    at = start
    for _ in range(n):
        length = int.from_bytes(reader.read_range(at, 4, end), "little")
        at += 4
        if at + length > end:
            raise reader.make_damage_error(at, f"an image has {length} bytes, which is past its page's end")
        yield at, length
        at += length


def _require_number(reader: Reader, at: int, fields: Struct, number: int) -> int:
    value = thrift.get_number(fields, number)
    if value is None:
        raise reader.make_damage_error(at, "a page's header makes no sense")
    return value


FORMAT = Format(find, scan, packed=True)
