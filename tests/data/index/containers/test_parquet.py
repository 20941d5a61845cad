"""Parquet files: images in PLAIN pages are read in place; any other file is refused, with what to do."""

import functools
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import writers
from support.damage import DAMAGE, apply_damage, assert_refused_or_within

from podscale.data.index.containers import parquet
from podscale.data.index.containers.container import Reader
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.recipe import Data

needs_pyarrow = pytest.mark.skipif(writers.pyarrow is None, reason="pyarrow is not installed")


def open_data_set(root):
    return open_index(Data(source="parquet", path=str(root)))


def get_refusal(root):
    with pytest.raises(UserError) as error:
        open_data_set(root)
    assert "\n" not in str(error.value)
    return str(error.value)


@needs_pyarrow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "snappy"}, "compresses its column of images (SNAPPY)"),
        ({"use_dictionary": True}, "keeps images in a dictionary"),
        ({"use_dictionary": False, "column_encoding": {"image.bytes": "DELTA_BYTE_ARRAY"}}, "encodes its column"),
    ],
)
def test_refusal_of_compressed_or_encoded_parquet_says_how_to_rewrite_it(tmp_path, options, message):
    root = writers.write_parquet(tmp_path / "data", **options)
    refusal = get_refusal(root)
    assert message in refusal
    _, command = refusal.split("rewrite it: ")
    names = {"pyarrow": writers.pyarrow}
    for file in root.glob("*.parquet"):
        exec(command, names | {"FILE": str(file), "NEW": f"{file}.new"})
        Path(f"{file}.new").replace(file)
    assert open_data_set(root).classes == writers.CLASSES


@needs_pyarrow
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_refuses_rows_without_an_image(tmp_path, version):
    table = writers.make_parquet_table([(0, "a", b"1"), (1, "b", None), (1, "c", b"3")])
    path = str(tmp_path / "train.parquet")
    writers.parquet.write_table(table, path, compression="none", use_dictionary=False, data_page_version=version)
    with pytest.raises(UserError, match="has rows without an image; remove them"):
        parquet.scan(path)


@needs_pyarrow
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"1"]}, "has no column label; its columns are image"),
        ({"photo": [b"1"], "label": [0]}, "has no column image with the bytes of images; its columns are label"),
        ({"image": [[b"1"]], "label": [0]}, "has no column image with the bytes"),
        ({"image": [7], "label": [0]}, "does not have one image per row"),
        ({"image": [b"1"], "label": ["cat"]}, "has labels of type string"),
        ({"image": [b"1"], "label": [None]}, "has labels of type"),
    ],
)
def test_refuses_parquet_without_images_or_labels(tmp_path, columns, message):
    path = str(tmp_path / "train.parquet")
    writers.parquet.write_table(writers.pyarrow.table(columns), path, compression="none", use_dictionary=False)
    with pytest.raises(UserError) as error:
        parquet.scan(path)
    assert message in str(error.value)


@needs_pyarrow
def test_refuses_files_that_are_not_parquet(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(UserError, match=f"cannot read {path}: "):
        parquet.scan(str(path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).write_bytes(b"")
    assert get_refusal(tmp_path) == "parquet files need pyarrow; install it: pip install 'podscale[parquet]'"


def test_definition_levels_are_read_packed_and_repeated(tmp_path):
    def has_all_values(levels, n, level):
        path = tmp_path / "levels"
        path.write_bytes(levels)
        with Reader(str(path)) as reader:
            return parquet._has_all_values(reader, 0, len(levels), n, level)

    assert has_all_values(b"\x14\x01", 10, 1)
    assert not has_all_values(b"\x14\x00", 10, 1)
    assert has_all_values(b"\x05\xff\x03", 10, 1)  # two packed groups of eight, ten of them used
    assert not has_all_values(b"\x05\xff\x01", 10, 1)
    assert not has_all_values(b"\x05\xfe\x03", 10, 1)
    assert has_all_values(b"\x03\xaa\xaa\x04\x02", 10, 2)  # two bits a level: eight packed, two repeated
    assert not has_all_values(b"\x03\xaa\xa9\x04\x02", 10, 2)
    with pytest.raises(UserError, match="past the end"):
        has_all_values(b"\x05\xff", 10, 1)


# --- damage --------------------------------------------------------------------------------------------------------


@functools.cache
def make_intact_file():
    with tempfile.TemporaryDirectory() as folder:
        options = {"data_page_version": "2.0", "compression": "none", "use_dictionary": False}
        return (writers.write_parquet(Path(folder) / "data", **options) / "train-00000.parquet").read_bytes()


@needs_pyarrow
@settings(max_examples=150, deadline=None)
@given(DAMAGE)
def test_damaged_parquet_is_refused_or_harmless(damage):
    assert_refused_or_within(parquet.scan, apply_damage(make_intact_file(), damage), "train.parquet")


@needs_pyarrow
@settings(max_examples=300, deadline=None)
@given(DAMAGE)
def test_damaged_footers_are_refused_or_harmless(damage):
    length = int.from_bytes(make_intact_file()[-8:-4], "little")
    footer = apply_damage(make_intact_file()[-8 - length : -8], damage)
    data = make_intact_file()[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    assert_refused_or_within(parquet.scan, data, "train.parquet")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 100), st.integers(0, 3))
def test_any_bytes_give_values_within_bounds_or_are_refused(data, end, count, level):
    header = bytes.fromhex("15001580011580012c15041500150615061c00000000")  # of a data page with two values
    data = header * (len(data) % 2) + data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pages"
        path.write_bytes(data)
        with Reader(str(path)) as reader:
            try:
                ranges = list(parquet.iterate_values(reader, 0, end, count, level))
            except UserError:
                return
    assert len(ranges) == count
    assert all(0 <= offset <= offset + length <= min(end, len(data)) for offset, length in ranges)
