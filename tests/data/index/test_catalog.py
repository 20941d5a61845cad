"""The index of a data set is scanned once, kept, and renewed when the data changes."""

import os
import resource
import threading
from pathlib import Path

import pytest
from data.index.test_table import same
from support import writers

from podscale.data import decode
from podscale.data.index import catalog
from podscale.data.index.dataset import files_index, open_index
from podscale.data.index.table import Strings, Table, Tables, load, save
from podscale.errors import UserError
from podscale.recipe import Data


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
