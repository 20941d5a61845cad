"""The table of a data set: one file that is taken whole or not at all."""

import json
import os
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.data.index.table import MAGIC, Strings, Table, Tables, load, save


def table(n, names=True, places=("train/a", "train/b"), seed=0):
    rng = np.random.default_rng(seed)
    return Table(
        rng.integers(0, 3, n, np.int32),
        rng.integers(1, 500, (n, 2), np.int32),
        rng.integers(0, len(places), n, np.int32),
        rng.integers(0, 2**40, n, np.int64),
        rng.integers(0, 2**20, n, np.int64),
        Strings.of(f"sample {i}.jpg" for i in range(n if names else 0)),
        places,
    )


def tables(n=20, names=True):
    return Tables("tar", "0123", ("ant", "größe", "a\udcffb"), table(n, names), table(7, names, ("val/a",), 1))


def same(ours, theirs):
    columns = ("labels", "sizes", "files", "offsets", "lengths")
    return (
        all(np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in columns)
        and all(getattr(ours, name).dtype == getattr(theirs, name).dtype for name in columns)
        and [ours.names[i] for i in range(len(ours.names))] == [theirs.names[i] for i in range(len(theirs.names))]
        and ours.places == theirs.places
    )


# --- names ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.text() | st.just("\udc80"))))
def test_names_come_back_as_they_were(lists):
    lists = [[name for name in names if name == "\udc80" or name.isascii() or name.isprintable()] for names in lists]
    joined = Strings.joined([Strings.of(names) for names in lists])
    assert [joined[i] for i in range(len(joined))] == [name for names in lists for name in names]


# --- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [True, False])
def test_a_table_comes_back_as_it_was(tmp_path, names):
    written = tables(names=names)
    save(tmp_path / "deep" / "er" / "index", written)
    read = load(tmp_path / "deep" / "er" / "index")
    assert (read.kind, read.fingerprint, read.classes) == (written.kind, written.fingerprint, written.classes)
    assert same(read.train, written.train)
    assert same(read.val, written.val)
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["index"]


def test_what_is_read_cannot_be_written_to(tmp_path):
    save(tmp_path / "index", tables())
    assert not load(tmp_path / "index").train.labels.flags.writeable


def test_a_new_file_leaves_the_old_one_to_those_who_have_it_open(tmp_path):
    path = tmp_path / "index"
    save(path, tables(20))
    before = load(path)
    save(path, tables(5000))
    assert same(before.train, tables(20).train)
    assert len(load(path).train) == 5000


def test_no_file_is_no_table(tmp_path):
    assert load(tmp_path / "index") is None
    assert load(tmp_path) is None


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    save(tmp_path / "index", tables(20))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "index", tables(30))
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert len(load(tmp_path / "index").train) == 20


def whole():
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "index", tables())
        return (Path(folder) / "index").read_bytes()


WHOLE = whole()


def loaded(content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "index").write_bytes(content)
        return load(Path(folder) / "index")


@settings(deadline=None)
@given(st.integers(0, 8 * len(WHOLE) - 1))
def test_any_flipped_bit_is_noticed_or_harmless(bit):
    content = bytearray(WHOLE)
    content[bit // 8] ^= 1 << bit % 8
    read = loaded(bytes(content))
    assert read is None or (same(read.train, tables().train) and same(read.val, tables().val))  # between the arrays


@settings(deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=100))
def test_files_of_another_length_are_no_table(length, tail):
    assert loaded(WHOLE[:length]) is None
    assert loaded(WHOLE + b"x" + tail) is None
    assert loaded(WHOLE[:length] + tail) is None or WHOLE[:length] + tail == WHOLE


def sealed(header, arrays=b""):
    """A file whose header is sound, whatever it says."""
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    start = MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little") + text
    return start + bytes(-len(start) % 64) + arrays


def header():
    length = int.from_bytes(WHOLE[16:24], "little")
    return json.loads(WHOLE[32 : 32 + length]), WHOLE[32 + length + -(32 + length) % 64 :]


def test_a_header_may_be_written_by_others():
    assert same(loaded(sealed(*header())).train, tables().train)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda s: st.lists(s, max_size=3))


@settings(deadline=None)
@given(st.sampled_from(["kind", "fingerprint", "classes", "splits", "sum"]), JSON)
def test_headers_that_say_anything_else_are_refused(key, value):
    said, arrays = header()
    if said[key] != value:
        assert loaded(sealed(said | {key: value}, arrays)) is None or key in ("kind", "fingerprint", "classes")


@settings(deadline=None)
@given(st.sampled_from(["train", "val"]), st.sampled_from(["samples", "names", "name_bytes"]), JSON)
def test_counts_that_do_not_fit_the_file_are_refused(split, key, value):
    said, arrays = header()
    if said["splits"][split][key] != value:
        said["splits"][split][key] = value
        assert loaded(sealed(said, arrays)) is None


def test_huge_counts_are_refused_before_anything_is_made(tmp_path):
    said, arrays = header()
    said["splits"]["train"]["samples"] = said["splits"]["train"]["names"] = 2**62
    assert loaded(sealed(said, arrays)) is None
    assert loaded(MAGIC + (2**62).to_bytes(8, "little") + bytes(100)) is None
    assert loaded(sealed(b"[" * 100_000)) is None


@pytest.mark.parametrize(
    ("column", "value"),
    [("labels", -1), ("labels", 3), ("sizes", 0), ("files", 2), ("files", -1), ("offsets", -1), ("lengths", -1)],
)
def test_numbers_out_of_range_are_refused_however_sound_the_file(tmp_path, column, value):
    written = tables()
    getattr(written.train, column)[3] = value
    save(tmp_path / "index", written)
    assert load(tmp_path / "index") is None


def test_names_out_of_order_are_refused(tmp_path):
    written = tables()
    written.train.names.starts[3] = 10**9
    save(tmp_path / "index", written)
    assert load(tmp_path / "index") is None


def test_a_million_samples_are_less_than_100_mb(tmp_path):
    n = 10**6
    names = Strings(np.frombuffer(b"n01440764_1234567.JPEG" * n, np.uint8), np.arange(n + 1) * 22)
    zeros = np.zeros(n, np.int64)
    big = Table(zeros.astype(np.int32), np.ones((n, 2), np.int32), zeros.astype(np.int32), zeros, zeros, names, ("a",))
    save(tmp_path / "index", Tables("folder", "", ("a", "b", "c"), big, table(7, True, ("val/a",))))
    assert (tmp_path / "index").stat().st_size < 100e6
    assert load(tmp_path / "index").train.names[n - 1] == "n01440764_1234567.JPEG"
