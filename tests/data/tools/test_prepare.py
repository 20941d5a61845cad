"""A prepared data set has the samples of its source: same order, labels and, by default, pixels."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import writers
from support.photos import save_image
from support.prepared import SPLITS, assert_refused, assert_same_samples, open_data_set, read_contents

from podscale.data import decode
from podscale.data.index import catalog
from podscale.data.tools import prepare
from podscale.data.tools.prepare import Settings
from podscale.errors import UserError

native = pytest.mark.skipif(decode.select_decoder() != "native", reason="the native decoder was not built")


# --- without loss --------------------------------------------------------------------------------------------------


def write_sources(tmp_path):
    yield "folder", writers.write_folder(tmp_path / "folder")
    for style in ("folders", "cls", "json"):
        yield "tar", writers.write_tar(tmp_path / f"tar {style}", style)
    yield "tfrecord", writers.write_tfrecord(tmp_path / "tfrecord")
    if writers.pyarrow:
        yield "parquet", writers.write_parquet(tmp_path / "parquet")


def test_every_kind_of_source_keeps_its_samples_and_their_order(tmp_path):
    for number, (kind, root) in enumerate(write_sources(tmp_path)):
        summary = prepare.prepare_data_set(root, tmp_path / f"to {number}", Settings())
        assert summary["source"] == kind
        assert summary["images"] == {"train": 12, "val": 6}
        assert_same_samples(open_data_set(tmp_path / f"to {number}"), open_data_set(root, kind))


@pytest.mark.parametrize("decoder", ["native", "plain"])
def test_training_sees_the_same_pixels_of_every_kind_of_image(photos, tmp_path, monkeypatch, decoder):
    prepare.prepare_data_set(photos, tmp_path / "to", Settings())
    monkeypatch.setenv("PODSCALE_DECODER", decoder)
    if decode.select_decoder().startswith(decoder):
        assert_same_samples(open_data_set(tmp_path / "to"), open_data_set(photos, "folder"))
        assert_same_samples(open_data_set(tmp_path / "to", shrink=77), open_data_set(photos, "folder", shrink=77))


@native
def test_jpegs_are_tiled_and_other_images_are_copied_and_counted(photos, tmp_path):
    summary = prepare.prepare_data_set(photos, tmp_path / "to", Settings())
    assert summary["how"] == {"tiled": 14, "copied (png)": 4, "copied (webp)": 2}
    assert summary["bytes_out"] == sum(path.stat().st_size for path in (tmp_path / "to").glob("*.tar"))
    before, after = open_data_set(photos, "folder").train, open_data_set(tmp_path / "to").train
    for i in range(len(before)):
        new, old = after.read(i), before.read(i)
        if old.startswith(b"\xff\xd8"):
            assert b"podscale tiles" in new
            image = Image.open(io.BytesIO(new))
            assert "progressive" not in image.info
            assert image.getexif() == Image.open(io.BytesIO(old)).getexif()
        else:
            assert new == old


def test_without_the_native_decoder_everything_is_copied_and_the_summary_says_so(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    summary = prepare.prepare_data_set(photos, tmp_path / "to", Settings())
    assert summary["how"]["copied (JPEG: there is no native decoder)"] == 14
    before, after = open_data_set(photos, "folder").val, open_data_set(tmp_path / "to").val
    assert all(before.read(i) == after.read(i) for i in range(len(before)))


def test_members_are_regular_files_and_depend_only_on_the_images(photos, tmp_path):
    prepare.prepare_data_set(photos, tmp_path / "to", Settings())
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


def test_a_prepared_data_set_needs_no_scan(photos, tmp_path, monkeypatch):
    prepare.prepare_data_set(photos, tmp_path / "to", Settings())
    monkeypatch.setattr(catalog, "scan_data_set", lambda *_: pytest.fail("scanned"))
    shutil.copytree(tmp_path / "to", tmp_path / "elsewhere")
    assert len(open_data_set(tmp_path / "elsewhere").train) == 10


def test_a_prepared_data_set_can_be_prepared_again(photos, tmp_path):
    prepare.prepare_data_set(photos, tmp_path / "one", Settings())
    prepare.prepare_data_set(tmp_path / "one", tmp_path / "two", Settings())
    assert_same_samples(open_data_set(tmp_path / "two"), open_data_set(photos, "folder"))


def test_classes_of_the_same_name_and_classes_without_images_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "CLASSES", ("crane", "a/b", "crane"))
    prepare.prepare_data_set(writers.write_tfrecord(tmp_path / "from"), tmp_path / "to", Settings())
    assert open_data_set(tmp_path / "to").classes == ("crane", "a/b", "crane")
    root = writers.write_tar(tmp_path / "tar", "cls")
    (root / "classes.txt").write_text("x\ny\nz\nnever seen\n")
    prepare.prepare_data_set(root, tmp_path / "tar to", Settings())
    assert open_data_set(tmp_path / "tar to").classes == ("x", "y", "z", "never seen")


@pytest.mark.parametrize("name", ["two\nlines", " blank", "a\x85b"])
def test_a_class_name_that_classes_txt_cannot_hold_is_refused(tmp_path, name):
    for split in SPLITS:
        save_image(tmp_path / "from" / split / name / "a.jpg", 0, 20, 20)
    with pytest.raises(UserError, match=r"cannot be a line of classes\.txt; rename the class"):
        prepare.prepare_data_set(tmp_path / "from", tmp_path / "to", Settings())
    assert not (tmp_path / "to").exists()


# --- smaller, encoded again, raw -----------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [None, 100])
def test_raw_pixels_equal_those_that_a_recipe_shrinks_to(photos, tmp_path, longest):
    summary = prepare.prepare_data_set(photos, tmp_path / "to", Settings(raw=True, longest=longest))
    assert summary["how"] == {"raw": 20}
    assert_same_samples(open_data_set(tmp_path / "to"), open_data_set(photos, "folder", shrink=longest or 0))


def encode_with_pillow(pixels, quality, subsampling):
    """Return the pixels after encoding and decoding by Pillow."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling=subsampling)
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
def test_shrunk_images_are_encoded_and_others_only_with_quality(photos, tmp_path, settings, quality, subsampling):
    prepare.prepare_data_set(photos, tmp_path / "to", settings)
    full, ours = open_data_set(photos, "folder"), open_data_set(tmp_path / "to")
    theirs = open_data_set(photos, "folder", shrink=settings.longest or 0)
    assert ours.classes == theirs.classes
    for split in SPLITS:
        a, b = getattr(ours, split), getattr(theirs, split)
        assert np.array_equal(a.labels, b.labels)
        assert np.array_equal(a.sizes, b.sizes)
        for i in range(len(a)):
            small = max(getattr(full, split).sizes[i]) <= (settings.longest or 0)
            lossless = small and settings.quality is None
            expected = b.load_pixels(i) if lossless else encode_with_pillow(b.load_pixels(i), quality, subsampling)
            assert np.array_equal(a.load_pixels(i), expected)
            assert lossless or a.name(i).endswith(".jpg")


# --- damaged images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [Settings(), Settings(longest=100), Settings(raw=True), Settings(quality=80)])
@pytest.mark.parametrize("victim", ["train/ant/a.jpg", "val/cat/p.png"])
def test_a_corrupt_image_is_named_and_prepare_resumes_once_it_is_repaired(photos, tmp_path, victim, settings):
    root = Path(shutil.copytree(photos, tmp_path / "from"))
    data = (root / victim).read_bytes()
    (root / victim).write_bytes(data[: len(data) // 2] + b"\xff" * (len(data) - len(data) // 2))
    assert_refused(victim, root, tmp_path / "to", settings)
    assert not list((tmp_path / "to").glob("*.part"))
    (root / victim).write_bytes(data)
    prepare.prepare_data_set(root, tmp_path / "to", settings)
    prepare.prepare_data_set(photos, tmp_path / "at once", settings)
    assert read_contents(tmp_path / "to") == read_contents(tmp_path / "at once")


@native
def test_a_flawed_jpeg_that_pillow_can_read_is_copied(tmp_path):
    for split in SPLITS:
        path = tmp_path / "from" / split / "a" / "a.jpg"
        save_image(path, 0, 64, 48)
        data = path.read_bytes()
        start = data.index(b"\xff\xda")
        path.write_bytes(data[:start] + bytes(7) + data[start:])
    summary = prepare.prepare_data_set(tmp_path / "from", tmp_path / "to", Settings())
    assert list(summary["how"].values()) == [2]
    assert next(iter(summary["how"])).startswith("copied (JPEG: ")
    assert_same_samples(open_data_set(tmp_path / "to"), open_data_set(tmp_path / "from", "folder"))
