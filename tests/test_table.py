"""The table of a data set: one file that is taken whole or not at all, kept as long as the data stays what it was."""

import json
import os
import tempfile
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import writers
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.data import catalog, decode
from podscale.data.index import files_index, open_index
from podscale.data.table import MAGIC, Strings, Table, Tables, load, save
from podscale.errors import UserError
from podscale.recipe import Data


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


# --- kept and renewed ----------------------------------------------------------------------------------------------


class Scans:
    """Counts what is really looked at."""

    def __init__(self, monkeypatch):
        self.pictures, self.lock = 0, threading.Lock()
        real = decode.read_header

        def counted(file, name):
            with self.lock:
                self.pictures += 1
            return real(file, name)

        monkeypatch.setattr(decode, "read_header", counted)

    def taken(self):
        found, self.pictures = self.pictures, 0
        return found


@pytest.fixture
def scans(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Scans(monkeypatch)


KINDS = [("folder", writers.write_folder), ("tar", writers.write_tar), ("tfrecord", writers.write_tfrecord)]


def opened(kind, root, **options):
    return open_index(Data(source=kind, path=str(root)), **options)


@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_pictures_are_looked_at_once(tmp_path, scans, kind, write):
    root = write(tmp_path / "data")
    writers.old(root)
    first = opened(kind, root)
    assert scans.taken() == 18
    again = opened(kind, root)
    assert scans.taken() == 0
    assert first.classes == again.classes
    for split in writers.SPLITS:
        ours, theirs = getattr(first, split), getattr(again, split)
        assert same(ours.files.table, theirs.files.table)
        assert [ours.read(i) for i in range(6)] == [theirs.read(i) for i in range(6)]
        assert [ours.name(i) for i in range(6)] == [theirs.name(i) for i in range(6)]
    (kept,) = (tmp_path / "cache" / "podscale" / "index").iterdir()
    content = kept.read_bytes()
    kept.write_bytes(content[:-1] + b"\1")
    opened(kind, root)
    assert scans.taken() == 18  # damaged: scanned, and written again
    assert kept.read_bytes() == content


def test_what_has_just_changed_is_not_kept(tmp_path, scans):
    root = writers.write_folder(tmp_path / "data")
    opened("folder", root)
    opened("folder", root)
    assert scans.taken() == 36


def grown(root, kind):
    if kind == "folder":
        (root / "train" / "ant" / "new.jpg").write_bytes(writers.picture(0))
    else:
        shard = sorted(root.glob("train-*"))[-1]
        sorted(root.glob("train-*"))[0].replace(shard)


def shrunk(root, kind):
    (root / "train" / "ant" / "00.jpg" if kind == "folder" else sorted(root.glob("train-*"))[0]).unlink()


def renamed(root, kind):
    path = root / "train" / "ant" / "00.jpg" if kind == "folder" else sorted(root.glob("train-*"))[0]
    path.rename(path.with_name("train-00009-of-00010.tar" if kind != "folder" else "09.jpg"))


def touched(root, kind):
    (root / "val" / "cat" if kind == "folder" else sorted(root.glob("val*"))[0]).touch()


@pytest.mark.parametrize("change", [grown, shrunk, renamed, touched])
@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_data_that_changes_is_scanned_again(tmp_path, scans, kind, write, change):
    root = write(tmp_path / "data")
    writers.old(root)
    opened(kind, root)
    scans.taken()
    change(root, kind)
    try:
        opened(kind, root)
    except UserError:
        assert change is not touched  # classes that are missing, or a shard of another form
    else:
        assert scans.taken() > 0


def test_a_list_of_classes_that_changes_is_read_again(tmp_path, scans):
    root = writers.write_tar(tmp_path / "data", style="cls")
    writers.old(root)
    assert opened("tar", root).classes == writers.CLASSES
    (root / "classes.txt").write_text("x\ny\nz\n")
    writers.old(root)
    assert opened("tar", root).classes == ("x", "y", "z")


def test_a_picture_overwritten_in_place_is_noticed_when_it_is_read(tmp_path, scans):
    root = writers.write_folder(tmp_path / "data")
    writers.old(root)
    path = root / "train" / "ant" / "00.jpg"
    before = len(path.read_bytes())
    path.write_bytes(path.read_bytes() + b"x")
    index = opened("folder", root).train
    assert index.read(0) == path.read_bytes()
    path.write_bytes(writers.picture(77))
    now = len(path.read_bytes())
    with pytest.raises(UserError) as error:
        index.read(0)
    assert str(error.value) == (
        f"cannot read {path}: it has {now} bytes but had {before + 1} when it was indexed; "
        "put the old file back, or touch its folder to have it indexed again"
    )
    scans.taken()
    path.parent.touch()
    assert opened("folder", root).train.read(0) == path.read_bytes()
    assert scans.taken() == 18


def test_without_a_cache_folder_the_index_is_made_in_memory(tmp_path, scans, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    root = writers.write_folder(tmp_path / "data")
    writers.old(root)
    for _ in range(2):
        assert len(opened("folder", root).train) == 12
        assert scans.taken() == 18


def test_the_cache_is_in_the_home_folder_by_default(tmp_path, scans, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = writers.write_folder(tmp_path / "data")
    writers.old(root)
    for relative in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        opened("folder", root)
    assert scans.taken() == 18
    assert len(list((tmp_path / "home" / ".cache" / "podscale" / "index").iterdir())) == 1


@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_an_index_beside_the_data_travels_with_it(tmp_path, scans, kind, write):
    root = write(tmp_path / "data")
    assert catalog.store_beside(kind, root) == root / ".podscale-index"
    scans.taken()
    expected = [data for _, _, data in writers.samples("train")]
    index = opened(kind, root).train
    assert scans.taken() == 0
    assert [index.read(i) for i in range(12)] == expected
    moved = root.rename(tmp_path / "moved")
    if kind != "folder":
        writers.old(moved)  # copied by something that does not keep times
    index = opened(kind, moved).train
    assert [index.read(i) for i in range(12)] == expected
    assert scans.taken() == 0
    assert not (tmp_path / "cache").exists()


def test_an_index_beside_the_data_cannot_lead_elsewhere(tmp_path, scans):
    root = writers.write_tar(tmp_path / "data")
    path = catalog.store_beside("tar", root)
    kept = load(path)
    for places in (("/etc/passwd", kept.train.places[1]), ("../x", kept.train.places[1])):
        bad = Table(**{**vars(kept.train), "places": places})
        save(path, Tables(kept.kind, kept.fingerprint, kept.classes, bad, kept.val))
        scans.taken()
        assert opened("tar", root).train.name(0).startswith(str(root))
        assert scans.taken() == 18
    save(path, Tables("folder", kept.fingerprint, kept.classes, kept.train, kept.val))
    opened("tar", root)
    assert scans.taken() == 18


def test_a_name_beside_the_data_cannot_lead_elsewhere(tmp_path, scans):
    root = writers.write_folder(tmp_path / "data")
    kept = load(catalog.store_beside("folder", root))
    names = Strings.of(["../../../secret.jpg"] * len(kept.train))
    bad = Table(**{**vars(kept.train), "names": names})
    save(root / ".podscale-index", Tables(kept.kind, kept.fingerprint, kept.classes, bad, kept.val))
    index = opened("folder", root).train
    for use in (index.read, lambda i: index.sources([i])):
        with pytest.raises(UserError, match=r"names a file '../../../secret.jpg'; remove the index"):
            use(0)


def test_processes_that_scan_at_once_do_not_disturb_each_other(tmp_path, scans):
    root = writers.write_tar(tmp_path / "data")
    writers.old(root)
    found = []
    threads = [threading.Thread(target=lambda: found.append(opened("tar", root))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(same(each.train.files.table, found[0].train.files.table) for each in found)
    assert len(list((tmp_path / "cache" / "podscale" / "index").iterdir())) == 1


@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_progress_counts_to_the_end(tmp_path, scans, kind, write):
    root = write(tmp_path / "data")
    told = []
    opened(kind, root, progress=lambda *words: told.append(words))
    places = ("folders", 6) if kind == "folder" else ("files", 4)
    assert [words for words in told if words[0] == places[0]] == [
        (places[0], i + 1, places[1]) for i in range(places[1])
    ]
    assert told[-1] == ("pictures", 18, 18)


def test_containers_beyond_the_limit_of_open_files_raise_it(tmp_path, scans):
    import resource

    root = writers.write_tar(tmp_path / "data")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    index = opened("tar", root).train
    index = type(index)(index.labels, index.sizes, files=type(index.files)(str(root), index.files.table, True))
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
        sources, _, _ = index.sources(range(12))
        assert len(set(sources)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_loose_files_may_be_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "deep/b.png"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(writers.picture(1, "png"))
    index = files_index(["a.png", Path("deep/b.png"), tmp_path / "a.png"])
    assert [index.name(i) for i in range(3)] == ["a.png", "deep/b.png", str(tmp_path / "a.png")]
    assert index.sources([1, 2])[0] == ["deep/b.png", str(tmp_path / "a.png")]
    assert len({index.read(i) for i in range(3)}) == 1
