"""The table of a data set: a file that is accepted only if it is intact."""

import json
import os
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import is_same_table

from podscale.data.index.table import MAGIC, Strings, Table, Tables, load_tables, save_tables


def make_table(n, names=True, paths=("train/a", "train/b"), seed=0):
    rng = np.random.default_rng(seed)
    return Table(
        rng.integers(0, 3, n, np.int32),
        rng.integers(1, 500, (n, 2), np.int32),
        rng.integers(0, len(paths), n, np.int32),
        rng.integers(0, 2**40, n, np.int64),
        rng.integers(0, 2**20, n, np.int64),
        Strings.from_names(f"sample {i}.jpg" for i in range(n if names else 0)),
        paths,
    )


def make_tables(n=20, names=True):
    return Tables(
        "tar", "0123", ("ant", "größe", "a\udcffb"), make_table(n, names), make_table(7, names, ("val/a",), 1)
    )


# --- names ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.text() | st.just("\udc80"))))
def test_names_round_trip_exactly(lists):
    lists = [[name for name in names if name == "\udc80" or name.isascii() or name.isprintable()] for names in lists]
    joined = Strings.concatenate([Strings.from_names(names) for names in lists])
    assert [joined[i] for i in range(len(joined))] == [name for names in lists for name in names]


# --- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [True, False])
def test_tables_round_trip_exactly(tmp_path, names):
    written = make_tables(names=names)
    save_tables(tmp_path / "deep" / "er" / "index", written)
    read = load_tables(tmp_path / "deep" / "er" / "index")
    assert (read.kind, read.fingerprint, read.classes) == (written.kind, written.fingerprint, written.classes)
    assert is_same_table(read.train, written.train)
    assert is_same_table(read.val, written.val)
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["index"]


def test_loaded_arrays_are_read_only(tmp_path):
    save_tables(tmp_path / "index", make_tables())
    assert not load_tables(tmp_path / "index").train.labels.flags.writeable


def test_saving_keeps_tables_loaded_from_the_old_file_valid(tmp_path):
    path = tmp_path / "index"
    save_tables(path, make_tables(20))
    before = load_tables(path)
    save_tables(path, make_tables(5000))
    assert is_same_table(before.train, make_tables(20).train)
    assert len(load_tables(path).train) == 5000


def test_a_missing_file_or_a_folder_loads_as_none(tmp_path):
    assert load_tables(tmp_path / "index") is None
    assert load_tables(tmp_path) is None


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    save_tables(tmp_path / "index", make_tables(20))

    def raise_disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", raise_disk_full)
    with pytest.raises(OSError, match="No space"):
        save_tables(tmp_path / "index", make_tables(30))
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert len(load_tables(tmp_path / "index").train) == 20


def make_intact_file():
    with tempfile.TemporaryDirectory() as folder:
        save_tables(Path(folder) / "index", make_tables())
        return (Path(folder) / "index").read_bytes()


INTACT = make_intact_file()


def load_bytes(content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "index").write_bytes(content)
        return load_tables(Path(folder) / "index")


@settings(deadline=None)
@given(st.integers(0, 8 * len(INTACT) - 1))
def test_any_flipped_bit_is_detected_or_harmless(bit):
    content = bytearray(INTACT)
    content[bit // 8] ^= 1 << bit % 8
    read = load_bytes(bytes(content))
    expected = make_tables()  # read if the bit is padding between arrays
    assert read is None or (is_same_table(read.train, expected.train) and is_same_table(read.val, expected.val))


@settings(deadline=None)
@given(st.integers(0, len(INTACT) - 1), st.binary(max_size=100))
def test_files_of_another_length_are_refused(length, tail):
    assert load_bytes(INTACT[:length]) is None
    assert load_bytes(INTACT + b"x" + tail) is None
    assert load_bytes(INTACT[:length] + tail) is None or INTACT[:length] + tail == INTACT


def seal_header(header, arrays=b""):
    """Return a file whose header has a correct length and checksum, whatever its content."""
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    start = MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little") + text
    return start + bytes(-len(start) % 64) + arrays


def split_header():
    length = int.from_bytes(INTACT[16:24], "little")
    return json.loads(INTACT[32 : 32 + length]), INTACT[32 + length + -(32 + length) % 64 :]


def test_a_header_with_other_json_spacing_is_accepted():
    assert is_same_table(load_bytes(seal_header(*split_header())).train, make_tables().train)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda s: st.lists(s, max_size=3))


@settings(deadline=None)
@given(st.sampled_from(["kind", "fingerprint", "classes", "splits", "sum"]), JSON)
def test_headers_with_other_values_are_refused(key, value):
    header, arrays = split_header()
    if header[key] != value:
        assert load_bytes(seal_header(header | {key: value}, arrays)) is None or key in (
            "kind",
            "fingerprint",
            "classes",
        )


@settings(deadline=None)
@given(st.sampled_from(["train", "val"]), st.sampled_from(["samples", "names", "name_bytes"]), JSON)
def test_counts_that_do_not_fit_the_file_are_refused(split, key, value):
    header, arrays = split_header()
    if header["splits"][split][key] != value:
        header["splits"][split][key] = value
        assert load_bytes(seal_header(header, arrays)) is None


def test_huge_counts_are_refused_before_any_allocation(tmp_path):
    header, arrays = split_header()
    header["splits"]["train"]["samples"] = header["splits"]["train"]["names"] = 2**62
    assert load_bytes(seal_header(header, arrays)) is None
    assert load_bytes(MAGIC + (2**62).to_bytes(8, "little") + bytes(100)) is None
    assert load_bytes(seal_header(b"[" * 100_000)) is None


@pytest.mark.parametrize(
    ("column", "value"),
    [("labels", -1), ("labels", 3), ("sizes", -1), ("files", 2), ("files", -1), ("offsets", -1), ("lengths", -1)],
)
def test_numbers_out_of_range_are_refused_in_an_otherwise_intact_file(tmp_path, column, value):
    written = make_tables()
    getattr(written.train, column)[3] = value
    save_tables(tmp_path / "index", written)
    assert load_tables(tmp_path / "index") is None


def test_names_out_of_order_are_refused(tmp_path):
    written = make_tables()
    written.train.names.starts[3] = 10**9
    save_tables(tmp_path / "index", written)
    assert load_tables(tmp_path / "index") is None


def test_a_million_samples_take_less_than_100_mb(tmp_path):
    n = 10**6
    names = Strings(np.frombuffer(b"n01440764_1234567.JPEG" * n, np.uint8), np.arange(n + 1) * 22)
    zeros = np.zeros(n, np.int64)
    big = Table(zeros.astype(np.int32), np.ones((n, 2), np.int32), zeros.astype(np.int32), zeros, zeros, names, ("a",))
    save_tables(tmp_path / "index", Tables("folder", "", ("a", "b", "c"), big, make_table(7, True, ("val/a",))))
    assert (tmp_path / "index").stat().st_size < 100e6
    assert load_tables(tmp_path / "index").train.names[n - 1] == "n01440764_1234567.JPEG"
