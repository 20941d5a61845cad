"""What is prepared is the source, sample for sample: same order, labels and, unless told otherwise, pixels."""

import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import writers

from podscale.data import crop, decode
from podscale.data.index import catalog
from podscale.data.index.dataset import open_index
from podscale.data.order import crop_boxes
from podscale.data.tools import prepare, shards
from podscale.data.tools.prepare import Settings
from podscale.data.tools.survey import survey
from podscale.data.tools.target import claimed
from podscale.errors import UserError
from podscale.recipe import Augment, Data

native = pytest.mark.skipif(decode.decoder() != "native", reason="the native decoder was not built")
SPLITS = ("train", "val")


def pixels(seed, width, height):
    """Smooth colours and some noise, as photos have."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return np.clip(np.asarray(coarse) + rng.normal(0, 12, (height, width, 3)), 0, 255).astype(np.uint8)


def save(path, seed, width, height, mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, width, height)).convert(mode).save(path, **options)


def turned(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    return exif


def write_photos(root):
    """Every kind of picture, larger and smaller than 100 pixels, with names that tar keys do not like."""
    for number, split in enumerate(SPLITS):
        seed = 100 * number
        save(root / split / "ant" / "a.jpg", seed, 160, 120, quality=92)
        save(root / split / "ant" / "b.progressive.scan.jpeg", seed + 1, 140, 150, quality=85, progressive=True)
        save(root / split / "ant" / "b.progressive.jpeg", seed + 2, 90, 70, quality=95, subsampling=0, progressive=True)
        save(root / split / "bee é" / "gray.jpg", seed + 3, 131, 97, "L", quality=90)
        save(root / split / "bee é" / "turned 1.JPG", seed + 4, 150, 110, quality=90, exif=turned(6))
        save(root / split / "bee é" / "turned 2.jpg", seed + 5, 60, 80, quality=90, exif=turned(3))
        save(root / split / "cat" / "inks.jpg", seed + 6, 120, 80, "CMYK", quality=90)
        save(root / split / "cat" / "p.png", seed + 7, 110, 60)
        save(root / split / "cat" / "q.png", seed + 8, 50, 60)
        save(root / split / "cat" / "w.webp", seed + 9, 120, 110, quality=80)
    return root


def write_many(root, count=18):
    """Noise, so that a shard of 1 MiB holds but a few."""
    rng = np.random.default_rng(0)
    for split, n in (("train", count), ("val", count // 2)):
        for i in range(n):
            path = root / split / "ab"[i % 2] / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (400, 500, 3), np.uint8)).save(
                path, quality=95, progressive=i % 3 == 0
            )
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return write_many(tmp_path_factory.mktemp("many"))


def opened(root, source="tar", **fields):
    return open_index(Data(source=source, path=str(root), **fields))


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def crops(index, size=48):
    """What training would see of every sample."""
    samples = np.arange(len(index))
    boxes, flips = crop_boxes(Augment(), 7, np.zeros_like(samples), samples, index.sizes, size)
    out = np.zeros((len(index), size, size, 3), np.uint8)
    crop.crop_batch(index, samples, boxes, flips, size, out)
    return out


def assert_same(ours, theirs):
    """The same samples under the same numbers, with the same labels, sizes, crops and pixels."""
    assert ours.classes == theirs.classes
    for split in SPLITS:
        a, b = getattr(ours, split), getattr(theirs, split)
        assert np.array_equal(a.labels, b.labels)
        assert np.array_equal(a.sizes, b.sizes)
        assert np.array_equal(crops(a), crops(b))
        assert all(np.array_equal(a.pixels(i), b.pixels(i)) for i in range(len(a)))


# --- without loss --------------------------------------------------------------------------------------------------


def sources(tmp_path):
    yield "folder", writers.write_folder(tmp_path / "folder")
    for style in ("folders", "cls", "json"):
        yield "tar", writers.write_tar(tmp_path / f"tar {style}", style)
    yield "tfrecord", writers.write_tfrecord(tmp_path / "tfrecord")
    if writers.pyarrow:
        yield "parquet", writers.write_parquet(tmp_path / "parquet")


def test_every_source_gives_the_same_samples_in_the_same_order(tmp_path):
    for number, (kind, root) in enumerate(sources(tmp_path)):
        found = prepare.prepare(root, tmp_path / f"to {number}", Settings())
        assert found["source"] == kind
        assert found["pictures"] == {"train": 12, "val": 6}
        assert_same(opened(tmp_path / f"to {number}"), opened(root, kind))


@pytest.mark.parametrize("decoder", ["native", "plain"])
def test_training_sees_the_same_pixels_of_every_kind_of_picture(photos, tmp_path, monkeypatch, decoder):
    prepare.prepare(photos, tmp_path / "to", Settings())
    monkeypatch.setenv("PODSCALE_DECODER", decoder)
    if decode.decoder().startswith(decoder):
        assert_same(opened(tmp_path / "to"), opened(photos, "folder"))
        assert_same(opened(tmp_path / "to", shrink=77), opened(photos, "folder", shrink=77))


@native
def test_jpegs_are_tiled_and_all_else_is_copied_and_counted(photos, tmp_path):
    found = prepare.prepare(photos, tmp_path / "to", Settings())
    assert found["how"] == {"tiled": 14, "copied (png)": 4, "copied (webp)": 2}
    assert found["bytes_out"] == sum(path.stat().st_size for path in (tmp_path / "to").glob("*.tar"))
    before, after = opened(photos, "folder").train, opened(tmp_path / "to").train
    for i in range(len(before)):
        new, old = after.read(i), before.read(i)
        if old.startswith(b"\xff\xd8"):
            assert b"podscale tiles" in new
            picture = Image.open(io.BytesIO(new))
            assert "progressive" not in picture.info
            assert picture.getexif() == Image.open(io.BytesIO(old)).getexif()
        else:
            assert new == old


def test_without_the_native_decoder_everything_is_copied_and_it_is_said(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    found = prepare.prepare(photos, tmp_path / "to", Settings())
    assert found["how"]["copied (JPEG: there is no native decoder)"] == 14
    before, after = opened(photos, "folder").val, opened(tmp_path / "to").val
    assert all(before.read(i) == after.read(i) for i in range(len(before)))


def test_members_are_plain_and_depend_on_nothing_but_the_pictures(photos, tmp_path):
    prepare.prepare(photos, tmp_path / "to", Settings())
    with tarfile.open(tmp_path / "to" / "train-00000.tar") as tar:
        members = tar.getmembers()
        assert all(m.isreg() and (m.mtime, m.uid, m.gid, m.uname, m.gname) == (0, 0, 0, "", "") for m in members)
        assert [m.name for m in members[:4]] == [
            "00000000-a.jpg",
            "00000000-a.cls",
            "00000001-b_progressive.jpg",
            "00000001-b_progressive.cls",
        ]
        assert [tar.extractfile(m).read() for m in members[1::2]] == [b"0"] * 3 + [b"1"] * 3 + [b"2"] * 4
    assert (tmp_path / "to" / "classes.txt").read_text() == "ant\nbee é\ncat\n"


def test_what_is_prepared_needs_no_scan(photos, tmp_path, monkeypatch):
    prepare.prepare(photos, tmp_path / "to", Settings())
    monkeypatch.setattr(catalog, "scan", lambda *_: pytest.fail("scanned"))
    shutil.copytree(tmp_path / "to", tmp_path / "elsewhere")
    assert len(opened(tmp_path / "elsewhere").train) == 10


def test_what_was_prepared_can_be_prepared_again(photos, tmp_path):
    prepare.prepare(photos, tmp_path / "one", Settings())
    prepare.prepare(tmp_path / "one", tmp_path / "two", Settings())
    assert_same(opened(tmp_path / "two"), opened(photos, "folder"))


def test_classes_of_one_name_and_labels_without_pictures_survive(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "CLASSES", ("crane", "a/b", "crane"))
    prepare.prepare(writers.write_tfrecord(tmp_path / "from"), tmp_path / "to", Settings())
    assert opened(tmp_path / "to").classes == ("crane", "a/b", "crane")
    root = writers.write_tar(tmp_path / "tar", "cls")
    (root / "classes.txt").write_text("x\ny\nz\nnever seen\n")
    prepare.prepare(root, tmp_path / "tar to", Settings())
    assert opened(tmp_path / "tar to").classes == ("x", "y", "z", "never seen")


@pytest.mark.parametrize("name", ["two\nlines", " blank", "a\x85b"])
def test_a_class_name_that_no_list_can_hold_is_refused(tmp_path, name):
    for split in SPLITS:
        save(tmp_path / "from" / split / name / "a.jpg", 0, 20, 20)
    with pytest.raises(UserError, match=r"cannot be a line of classes\.txt; rename the class"):
        prepare.prepare(tmp_path / "from", tmp_path / "to", Settings())
    assert not (tmp_path / "to").exists()


# --- smaller, encoded again, raw -----------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [None, 100])
def test_raw_pixels_are_those_that_a_recipe_would_shrink_to(photos, tmp_path, longest):
    found = prepare.prepare(photos, tmp_path / "to", Settings(raw=True, longest=longest))
    assert found["how"] == {"raw": 20}
    assert_same(opened(tmp_path / "to"), opened(photos, "folder", shrink=longest or 0))


def by_pillow(picture, quality, subsampling):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality, subsampling=subsampling)
    return np.asarray(Image.open(io.BytesIO(file.getvalue())).convert("RGB"))


@pytest.mark.parametrize(
    ("settings", "quality", "subsampling"),
    [
        (Settings(longest=100), 90, "4:2:0"),
        (Settings(longest=100, subsampling="444"), 90, "4:4:4"),
        (Settings(longest=100, quality=70), 70, "4:2:0"),
        (Settings(quality=80, subsampling="444"), 80, "4:4:4"),
    ],
)
def test_what_is_shrunk_is_encoded_and_the_rest_only_if_asked(photos, tmp_path, settings, quality, subsampling):
    prepare.prepare(photos, tmp_path / "to", settings)
    whole, ours = opened(photos, "folder"), opened(tmp_path / "to")
    theirs = opened(photos, "folder", shrink=settings.longest or 0)
    assert ours.classes == theirs.classes
    for split in SPLITS:
        a, b = getattr(ours, split), getattr(theirs, split)
        assert np.array_equal(a.labels, b.labels)
        assert np.array_equal(a.sizes, b.sizes)
        for i in range(len(a)):
            small = max(getattr(whole, split).sizes[i]) <= (settings.longest or 0)
            lossless = small and settings.quality is None
            expected = b.pixels(i) if lossless else by_pillow(b.pixels(i), quality, subsampling)
            assert np.array_equal(a.pixels(i), expected)
            assert lossless or a.name(i).endswith(".jpg")


# --- shards, threads, stopping and going on ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(many, tmp_path_factory):
    """`many`, prepared without a break by two threads."""
    folder = tmp_path_factory.mktemp("whole") / "to"
    prepare.prepare(many, folder, Settings(shard_mib=1), threads=2)
    return folder


def test_shards_keep_their_size(whole):
    sizes = [path.stat().st_size for path in sorted(whole.glob("train-*.tar"))]
    assert len(sizes) > 3
    assert all(2**19 < size <= 2**20 + 20 * 512 for size in sizes[:-1])
    assert not list(whole.glob("*.part"))


@pytest.mark.parametrize("threads", [1, 5])
def test_bytes_do_not_depend_on_threads(many, whole, tmp_path, threads):
    prepare.prepare(many, tmp_path / "to", Settings(shard_mib=1), threads=threads)
    assert contents(tmp_path / "to") == contents(whole)


KILLED = """
import os, signal, sys
from podscale.data.index import catalog
from podscale.data.tools import prepare, shards, target

def killed_at(owner, name, call):
    real, calls = getattr(owner, name), []
    def counted(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    setattr(owner, name, counted)

place, name, call, source, folder = sys.argv[1:]
killed_at({"shard": shards.Shard, "target": target.Target, "catalog": catalog}[place], name, int(call))
prepare.prepare(source, folder, target.Settings(shard_mib=1), threads=2)
"""


@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        ("target", "_save", 1),  # nothing there yet
        ("shard", "add", 1),
        ("shard", "add", 6),  # in the middle of a shard
        ("shard", "finish", 3),
        ("target", "add", 2),  # the shard is there, and not noted down
        ("shard", "add", 22),  # in the other split
        ("catalog", "store_beside", 1),
        ("target", "finish", 1),
    ],
)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(many, whole, tmp_path, place, name, call):
    command = [sys.executable, "-c", KILLED, place, name, str(call), str(many), str(tmp_path / "to")]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -9
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "to").glob("*.tar")}
    noted = tmp_path / "to" / "prepare.json"
    kept = [s["name"] for part in json.loads(noted.read_text())["shards"].values() for s in part] if call > 1 else []
    found = prepare.prepare(many, tmp_path / "to", Settings(shard_mib=1), threads=2)
    assert not found["already"]
    assert contents(tmp_path / "to") == contents(whole)
    assert all((tmp_path / "to" / shard).stat().st_mtime_ns == before[shard] for shard in kept)  # not written twice


def test_what_is_prepared_in_part_is_not_taken_for_the_whole(photos, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "store_beside", lambda *_: (_ for _ in ()).throw(UserError("stopped")))
        refused("stopped", photos, tmp_path / "to", Settings())
    for use in (
        opened,
        lambda root: survey(str(root)),
        lambda root: prepare.prepare(root, tmp_path / "on", Settings()),
    ):
        with pytest.raises(UserError, match="is prepared only in part; repeat podscale data prepare"):
            use(tmp_path / "to")
    prepare.prepare(photos, tmp_path / "to", Settings())
    assert len(opened(tmp_path / "to").train) == 10


def test_interrupted_it_says_how_to_go_on(many, tmp_path):
    program = KILLED.replace("SIGKILL", "SIGINT").rpartition("prepare.prepare(")[0]
    program += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which may be ignored where tests run
    program += (
        "from podscale.cli.main import main; sys.exit(main(['data', 'prepare', source, folder, '--shard-mib', '1']))"
    )
    command = [sys.executable, "-c", program, "shard", "add", "6", str(many), str(tmp_path / "to")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "podscale: interrupted; the same command goes on after the last whole shard\n"
    assert (tmp_path / "to" / "train-00000.tar").exists()
    assert not list((tmp_path / "to").glob("*.part"))


def test_when_all_is_done_nothing_is(many, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "to")
    first = prepare.prepare(many, whole, Settings(shard_mib=1))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "to").iterdir()}
    monkeypatch.setattr(prepare, "stored", lambda *_: pytest.fail("worked"))
    again = prepare.prepare(many, tmp_path / "to", Settings(shard_mib=1))
    assert again["already"]
    assert {k: v for k, v in again.items() if k not in ("seconds", "prepared")} == {
        k: v for k, v in first.items() if k not in ("seconds", "prepared")
    }
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "to").iterdir()} == before


@pytest.mark.parametrize("victim", ["train-00001.tar", ".podscale-index"])
def test_what_is_lost_afterwards_is_made_again(many, whole, tmp_path, victim):
    shutil.copytree(whole, tmp_path / "to")
    (tmp_path / "to" / victim).unlink()
    assert not prepare.prepare(many, tmp_path / "to", Settings(shard_mib=1))["already"]
    assert contents(tmp_path / "to") == contents(whole)


def test_threads_are_not_far_ahead(many, tmp_path, monkeypatch):
    """However slow the disk is that is written to, few pictures wait for it."""
    made, most, real = [], [], prepare.stored
    monkeypatch.setattr(prepare, "stored", lambda index, i, settings: made.append(i) or real(index, i, settings))
    index = opened(many, "folder").train
    target = prepare.Target(tmp_path, Settings())
    for taken, _ in enumerate(prepare._made(index, 0, target, threads=1)):
        most.append(len(made) - taken)
    assert max(most) <= prepare.AHEAD_PER_THREAD + 1
    made.clear()
    monkeypatch.setattr(prepare, "AHEAD_BYTES", 1)
    for taken, _ in enumerate(prepare._made(index, 0, target, threads=4)):
        assert len(made) <= taken + 2


# --- refusals ------------------------------------------------------------------------------------------------------


def refused(words, *arguments, **options):
    with pytest.raises(UserError) as error:
        prepare.prepare(*arguments, **options)
    assert "\n" not in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), "--shard-mib 1, now 256"),
        (Settings(longest=300, shard_mib=1), "--longest not given, now 300"),
        (Settings(quality=90, shard_mib=1), "--quality not given, now 90"),
        (Settings(raw=True, shard_mib=1), "--raw not given, now given"),
    ],
)
def test_other_settings_are_refused(many, whole, settings, words):
    before = contents(whole)
    refused(f"was begun with other settings ({words})", many, whole, settings)
    assert contents(whole) == before


def test_another_source_is_refused(photos, many, whole, tmp_path):
    before = contents(whole)
    refused("was begun from other data", photos, whole, Settings(shard_mib=1))
    assert contents(whole) == before
    shutil.copytree(many, tmp_path / "moved")  # the same data elsewhere is the same data
    assert prepare.prepare(tmp_path / "moved", whole, Settings(shard_mib=1))["already"]


def test_a_folder_that_holds_something_else_is_refused(photos, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    refused("is not empty and holds nothing that was prepared", photos, tmp_path, Settings())
    refused("is a file; name a folder", photos, tmp_path / "mine.txt", Settings())
    refused("cannot make the folder", photos, tmp_path / "mine.txt" / "to", Settings())
    assert os.listdir(tmp_path) == ["mine.txt"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": {"longest": "x"}}', '{"settings": {"wrong": 1}}'])
def test_a_damaged_journal_is_refused(photos, tmp_path, text):
    (tmp_path / "prepare.json").write_text(text)
    refused("prepare.json is damaged; remove the folder", photos, tmp_path, Settings())


def test_source_and_target_must_be_apart(photos, tmp_path):
    before = contents(photos)
    refused("is the source itself", photos, photos, Settings())
    refused("is inside of", photos, photos / "to", Settings())
    refused("is inside of", photos, photos.parent, Settings())
    (tmp_path / "link").symlink_to(photos)
    refused("is inside of", photos, tmp_path / "link" / "to", Settings())
    assert contents(photos) == before


def test_a_source_that_is_none_is_refused(photos, tmp_path):
    refused("there is no folder", tmp_path / "nowhere", tmp_path / "to", Settings())
    np.savez(tmp_path / "data.npz", train_images=np.zeros((1, 2, 2, 3), np.uint8))
    refused("data.npz is a file; name a folder", tmp_path / "data.npz", tmp_path / "to", Settings())
    (tmp_path / "empty").mkdir()
    refused("holds neither train/CLASS/FILE", tmp_path / "empty", tmp_path / "to", Settings())
    both = writers.write_tfrecord(writers.write_tar(tmp_path / "both"))
    refused("can be read as tar and as tfrecord; choose one with --source", both, tmp_path / "to", Settings())
    assert prepare.prepare(both, tmp_path / "to", Settings(), kind="tar")["source"] == "tar"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"longest": 0}, "--longest is 0; it must be from 1 to"),
        ({"quality": 101}, "--quality is 101"),
        ({"shard_mib": -1}, "--shard-mib is -1"),
        ({"subsampling": "422", "quality": 90}, "it must be 420 or 444"),
        ({"subsampling": "444"}, "add --quality or --longest"),
        ({"raw": True, "quality": 90}, "--raw stores pixels"),
    ],
)
def test_nonsense_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        Settings(**fields)


@pytest.mark.parametrize("settings", [Settings(), Settings(longest=100), Settings(raw=True), Settings(quality=80)])
@pytest.mark.parametrize("victim", ["train/ant/a.jpg", "val/cat/p.png"])
def test_a_picture_that_cannot_be_read_is_named_and_the_rest_goes_on(photos, tmp_path, victim, settings):
    root = Path(shutil.copytree(photos, tmp_path / "from"))
    data = (root / victim).read_bytes()
    (root / victim).write_bytes(data[: len(data) // 2] + b"\xff" * (len(data) - len(data) // 2))
    refused(victim, root, tmp_path / "to", settings)
    assert not list((tmp_path / "to").glob("*.part"))
    (root / victim).write_bytes(data)
    prepare.prepare(root, tmp_path / "to", settings)
    prepare.prepare(photos, tmp_path / "at once", settings)
    assert contents(tmp_path / "to") == contents(tmp_path / "at once")


@native
def test_a_flawed_jpeg_that_pillow_reads_is_copied(tmp_path):
    for split in SPLITS:
        path = tmp_path / "from" / split / "a" / "a.jpg"
        save(path, 0, 64, 48)
        data = path.read_bytes()
        start = data.index(b"\xff\xda")
        path.write_bytes(data[:start] + bytes(7) + data[start:])
    found = prepare.prepare(tmp_path / "from", tmp_path / "to", Settings())
    assert list(found["how"].values()) == [2]
    assert next(iter(found["how"])).startswith("copied (JPEG: ")
    assert_same(opened(tmp_path / "to"), opened(tmp_path / "from", "folder"))


def test_a_full_disk_is_one_sentence_and_what_is_whole_stays(many, whole, tmp_path):
    program = (
        "import resource; from podscale.cli.main import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); "
        f"raise SystemExit(main(['data', 'prepare', {str(many)!r}, 'to']))"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "podscale: cannot write to/train-00000.tar: File too large; once it can, the same command goes on\n"
    )
    assert sorted(os.listdir(tmp_path / "to")) == ["classes.txt", "prepare.json"]


def test_one_process_at_a_time(photos, tmp_path):
    with claimed(tmp_path / "to"):
        refused("another process is preparing", photos, tmp_path / "to", Settings())
    prepare.prepare(photos, tmp_path / "to", Settings())


def test_a_source_that_changes_meanwhile_is_noticed(photos, tmp_path, monkeypatch):
    real = catalog.store_beside

    def other(kind, root, progress=None):
        with tarfile.open(root / "train-00000.tar", "w") as tar:
            for name, data in (("0.jpg", writers.picture(0)), ("0.cls", b"0"), ("1.jpg", writers.picture(1))):
                writers.add(tar, name, data)
            for label in b"12":
                writers.add(tar, f"{label}.png", writers.picture(2, "png"))
                writers.add(tar, f"{label}.cls", bytes([label]))
            writers.add(tar, "1.cls", b"1")
        return real(kind, root, progress)

    monkeypatch.setattr(catalog, "store_beside", other)
    refused("has changed while it was prepared", photos, tmp_path / "to", Settings())


def test_shards_never_get_names_that_sort_wrongly(monkeypatch):
    assert shards.shard_name("train", 99_999) == "train-99999.tar"
    with pytest.raises(UserError, match="make them larger by --shard-mib"):
        shards.shard_name("train", 100_000)


def test_the_longest_names_fit_a_plain_header():
    key = shards.key_of(10**8 - 1, "dir/" + "é" * 200 + ".jpeg")
    assert len(f"{key}.webp".encode()) <= 100


# --- a look at what there is ---------------------------------------------------------------------------------------


def test_a_survey_counts_what_is_there(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    writers.old(photos)
    told = []
    found = survey(str(photos), progress=lambda *count: told.append(count))
    assert told[-1] == ("pictures", 20, 20)
    assert not found["kept"]
    assert (found["source"], found["classes"]) == ("folder", ["ant", "bee é", "cat"])
    train = found["splits"]["train"]
    assert train["pictures"] == 10
    assert train["bytes"] == sum(path.stat().st_size for path in (photos / "train").rglob("*.*"))
    assert train["sizes"] == {"smallest": [50, 60], "median": [120, 80], "largest": [140, 150]}
    assert train["extensions"] == {".jpg": 5, ".jpeg": 2, ".png": 2, ".webp": 1}
    assert train["pictures_per_class"] == {"fewest": 3, "most": 4}
    again = survey(str(photos))
    assert again["kept"]
    assert again["splits"] == found["splits"]


def test_a_survey_of_samples_without_names(tmp_path):
    found = survey(str(writers.write_tfrecord(tmp_path)))
    assert found["splits"]["val"]["pictures"] == 6
    assert found["splits"]["val"]["extensions"] == {}
