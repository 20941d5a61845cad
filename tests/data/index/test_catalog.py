"""The index of a data set is scanned once, stored, and renewed when the data changes."""

import os
import resource
import threading
from pathlib import Path

import pytest
from support import writers
from support.tables import is_same_table

from podscale.data import decode
from podscale.data.index import catalog
from podscale.data.index.dataset import index_files, open_index
from podscale.data.index.table import Strings, Table, Tables, load_tables, save_tables
from podscale.errors import UserError
from podscale.recipe import Data


class HeaderCounter:
    """Counts the image headers that are read."""

    def __init__(self, monkeypatch):
        self.images, self.lock = 0, threading.Lock()
        read_header = decode.read_header

        def count_and_read(file, *arguments):
            with self.lock:
                self.images += 1
            return read_header(file, *arguments)

        monkeypatch.setattr(decode, "read_header", count_and_read)

    def reset(self):
        """Return the number of headers read since the last call."""
        count, self.images = self.images, 0
        return count


@pytest.fixture
def headers(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return HeaderCounter(monkeypatch)


KINDS = [("folder", writers.write_folder), ("tar", writers.write_tar), ("tfrecord", writers.write_tfrecord)]


def open_data_set(kind, root, **options):
    return open_index(Data(source=kind, path=str(root)), **options)


@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_image_headers_are_read_once(tmp_path, headers, kind, write):
    root = write(tmp_path / "data")
    writers.backdate(root)
    first = open_data_set(kind, root)
    assert headers.reset() == 18
    again = open_data_set(kind, root)
    assert headers.reset() == 0
    assert first.classes == again.classes
    for split in writers.SPLITS:
        ours, theirs = getattr(first, split), getattr(again, split)
        assert is_same_table(ours.files.table, theirs.files.table)
        assert [ours.read(i) for i in range(6)] == [theirs.read(i) for i in range(6)]
        assert [ours.name(i) for i in range(6)] == [theirs.name(i) for i in range(6)]
    (stored,) = (tmp_path / "cache" / "podscale" / "index").iterdir()
    content = stored.read_bytes()
    stored.write_bytes(content[:-1] + b"\1")
    open_data_set(kind, root)
    assert headers.reset() == 18  # damaged: scanned, and written again
    assert stored.read_bytes() == content


def test_index_of_data_that_has_just_changed_is_not_stored(tmp_path, headers):
    root = writers.write_folder(tmp_path / "data")
    open_data_set("folder", root)
    open_data_set("folder", root)
    assert headers.reset() == 36


def add_sample(root, kind):
    if kind == "folder":
        (root / "train" / "ant" / "new.jpg").write_bytes(writers.make_image(0))
    else:
        shard = sorted(root.glob("train-*"))[-1]
        sorted(root.glob("train-*"))[0].replace(shard)


def remove_sample(root, kind):
    (root / "train" / "ant" / "00.jpg" if kind == "folder" else sorted(root.glob("train-*"))[0]).unlink()


def rename_sample(root, kind):
    path = root / "train" / "ant" / "00.jpg" if kind == "folder" else sorted(root.glob("train-*"))[0]
    path.rename(path.with_name("train-00009-of-00010.tar" if kind != "folder" else "09.jpg"))


def touch_container(root, kind):
    (root / "val" / "cat" if kind == "folder" else sorted(root.glob("val*"))[0]).touch()


@pytest.mark.parametrize("change", [add_sample, remove_sample, rename_sample, touch_container])
@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_changed_data_is_scanned_again(tmp_path, headers, kind, write, change):
    root = write(tmp_path / "data")
    writers.backdate(root)
    open_data_set(kind, root)
    headers.reset()
    change(root, kind)
    try:
        open_data_set(kind, root)
    except UserError:
        assert change is not touch_container  # missing classes, or a shard of another format
    else:
        assert headers.reset() > 0


def test_a_changed_class_list_is_read_again(tmp_path, headers):
    root = writers.write_tar(tmp_path / "data", style="cls")
    writers.backdate(root)
    assert open_data_set("tar", root).classes == writers.CLASSES
    (root / "classes.txt").write_text("x\ny\nz\n")
    writers.backdate(root)
    assert open_data_set("tar", root).classes == ("x", "y", "z")


def test_an_image_overwritten_in_place_is_detected_when_it_is_read(tmp_path, headers):
    root = writers.write_folder(tmp_path / "data")
    writers.backdate(root)
    path = root / "train" / "ant" / "00.jpg"
    before = len(path.read_bytes())
    path.write_bytes(path.read_bytes() + b"x")
    index = open_data_set("folder", root).train
    assert index.read(0) == path.read_bytes()
    path.write_bytes(writers.make_image(77))
    now = len(path.read_bytes())
    with pytest.raises(UserError) as error:
        index.read(0)
    assert str(error.value) == (
        f"cannot read {path}: it has {now} bytes but had {before + 1} when it was indexed; "
        "restore the old file, or run `touch` on its folder to rebuild the index"
    )
    headers.reset()
    path.parent.touch()
    assert open_data_set("folder", root).train.read(0) == path.read_bytes()
    assert headers.reset() == 18


def test_without_a_cache_folder_the_index_stays_in_memory(tmp_path, headers, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    root = writers.write_folder(tmp_path / "data")
    writers.backdate(root)
    for _ in range(2):
        assert len(open_data_set("folder", root).train) == 12
        assert headers.reset() == 18


def test_default_cache_is_in_the_home_folder(tmp_path, headers, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = writers.write_folder(tmp_path / "data")
    writers.backdate(root)
    for relative in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        open_data_set("folder", root)
    assert headers.reset() == 18
    assert len(list((tmp_path / "home" / ".cache" / "podscale" / "index").iterdir())) == 1


@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_an_index_beside_the_data_is_valid_after_a_move(tmp_path, headers, kind, write):
    root = write(tmp_path / "data")
    assert catalog.store_beside(kind, root) == root / ".podscale-index"
    headers.reset()
    expected = [data for _, _, data in writers.make_samples("train")]
    index = open_data_set(kind, root).train
    assert headers.reset() == 0
    assert [index.read(i) for i in range(12)] == expected
    moved = root.rename(tmp_path / "moved")
    if kind != "folder":
        writers.backdate(moved)  # as after a copy that does not preserve times
    index = open_data_set(kind, moved).train
    assert [index.read(i) for i in range(12)] == expected
    assert headers.reset() == 0
    assert not (tmp_path / "cache").exists()


def test_paths_in_an_index_beside_the_data_cannot_lead_elsewhere(tmp_path, headers):
    root = writers.write_tar(tmp_path / "data")
    path = catalog.store_beside("tar", root)
    stored = load_tables(path)
    for paths in (("/etc/passwd", stored.train.paths[1]), ("../x", stored.train.paths[1])):
        bad = Table(**{**vars(stored.train), "paths": paths})
        save_tables(path, Tables(stored.kind, stored.fingerprint, stored.classes, bad, stored.val))
        headers.reset()
        assert open_data_set("tar", root).train.name(0).startswith(str(root))
        assert headers.reset() == 18
    save_tables(path, Tables("folder", stored.fingerprint, stored.classes, stored.train, stored.val))
    open_data_set("tar", root)
    assert headers.reset() == 18


def test_names_in_an_index_beside_the_data_cannot_lead_elsewhere(tmp_path, headers):
    root = writers.write_folder(tmp_path / "data")
    stored = load_tables(catalog.store_beside("folder", root))
    names = Strings.from_names(["../../../secret.jpg"] * len(stored.train))
    bad = Table(**{**vars(stored.train), "names": names})
    save_tables(root / ".podscale-index", Tables(stored.kind, stored.fingerprint, stored.classes, bad, stored.val))
    index = open_data_set("folder", root).train
    for access in (index.read, lambda i: index.locate_bytes([i])):
        with pytest.raises(UserError, match=r"names a file '../../../secret.jpg'; remove the index"):
            access(0)


def test_concurrent_scans_give_the_same_index(tmp_path, headers):
    root = writers.write_tar(tmp_path / "data")
    writers.backdate(root)
    results = []
    threads = [threading.Thread(target=lambda: results.append(open_data_set("tar", root))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(is_same_table(each.train.files.table, results[0].train.files.table) for each in results)
    assert len(list((tmp_path / "cache" / "podscale" / "index").iterdir())) == 1


@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_progress_counts_to_the_end(tmp_path, headers, kind, write):
    root = write(tmp_path / "data")
    calls = []
    open_data_set(kind, root, progress=lambda *arguments: calls.append(arguments))
    unit, count = ("folders", 6) if kind == "folder" else ("files", 4)
    assert [call for call in calls if call[0] == unit] == [(unit, i + 1, count) for i in range(count)]
    assert calls[-1] == ("images", 18, 18)


def test_the_limit_of_open_files_is_raised_for_many_containers(tmp_path, headers):
    root = writers.write_tar(tmp_path / "data")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    index = open_data_set("tar", root).train
    index = type(index)(index.labels, index.sizes, files=type(index.files)(str(root), index.files.table, True))
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
        sources, _, _ = index.locate_bytes(range(12))
        assert len(set(sources)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_loose_files_may_be_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "deep/b.png"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(writers.make_image(1, "png"))
    index = index_files(["a.png", Path("deep/b.png"), tmp_path / "a.png"])
    assert [index.name(i) for i in range(3)] == ["a.png", "deep/b.png", str(tmp_path / "a.png")]
    assert index.locate_bytes([1, 2])[0] == ["deep/b.png", str(tmp_path / "a.png")]
    assert len({index.read(i) for i in range(3)}) == 1
