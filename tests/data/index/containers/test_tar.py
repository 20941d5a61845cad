"""WebDataset's tars: which members are samples, what is refused, and that damage harms nobody."""

import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import writers
from support.damage import DAMAGE, damaged, refused_or_within

from podscale.data.index.containers import tar
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.recipe import Data


def one_tar(path, *files, form=tarfile.GNU_FORMAT):
    """A shard of (name, bytes, attributes)."""
    with tarfile.open(path, "w", format=form) as archive:
        for name, data, *attributes in files:
            writers.add(archive, name, data, **(attributes[0] if attributes else {}))
    return str(path)


def scanned(path):
    """(name, label) of every sample of a shard."""
    part = tar.scan(path)
    labels = [part.words[label] if part.words else label for label in part.labels.tolist()]
    with open(path, "rb") as file:
        for offset, length in zip(part.offsets.tolist(), part.lengths.tolist(), strict=True):
            file.seek(offset)
            assert len(file.read(length)) == length
    return list(zip([part.names[i] for i in range(len(part.names))], labels, strict=True))


def refusal(path):
    with pytest.raises(UserError) as error:
        tar.scan(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_other_alphabets_work(tmp_path, form):
    long = f"cat/{'x' * 300}.jpg"
    path = one_tar(tmp_path / "a.tar", (long, b"1"), ("cat/größe.jpg", b"2"), ("bee/short.jpg", b"3"), form=form)
    assert scanned(path) == [(long, "cat"), ("cat/größe.jpg", "cat"), ("bee/short.jpg", "bee")]


def test_ustar_prefixes_work(tmp_path):
    long = f"{'d' * 60}/{'e' * 60}/cat/x.jpg"
    assert scanned(one_tar(tmp_path / "a.tar", (long, b"1"), form=tarfile.USTAR_FORMAT)) == [(long, "cat")]


def test_labels_and_pictures_of_a_key_meet_in_any_order(tmp_path):
    path = one_tar(
        tmp_path / "a.tar",
        ("b.cls", b"7\n"),
        ("a.jpg", b"a"),
        ("a.txt", b"a caption"),
        ("b.seg.png", b"mask"),
        ("b.JPG", b"b"),
        ("a.json", b'{"label": 3}'),
        ("info.json", b'{"made": "today"}'),
    )
    assert scanned(path) == [("a.jpg", 3), ("b.JPG", 7)]


def test_json_may_name_the_class(tmp_path):
    assert scanned(one_tar(tmp_path / "a.tar", ("a.jpg", b"a"), ("a.json", b'{"label": "cat"}'))) == [("a.jpg", "cat")]


def test_dots_in_the_names_of_unlabelled_pictures_are_just_dots(tmp_path):
    files = [("cat/IMG.1.jpg", b"1"), ("cat/IMG.2.jpg", b"2"), ("./bee/a.png", b"3"), ("./bee/a.jpg", b"4")]
    names = [("cat/IMG.1.jpg", "cat"), ("cat/IMG.2.jpg", "cat"), ("./bee/a.png", "bee"), ("./bee/a.jpg", "bee")]
    assert scanned(one_tar(tmp_path / "a.tar", *files)) == names


def test_links_devices_and_folders_without_picture_names_are_ignored(tmp_path):
    path = one_tar(
        tmp_path / "a.tar",
        ("cat", b"", {"type": tarfile.DIRTYPE}),
        ("/latest", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("../pipe", b"", {"type": tarfile.FIFOTYPE}),
        ("cat/a.jpg", b"a"),
    )
    assert scanned(path) == [("cat/a.jpg", "cat")]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
@pytest.mark.parametrize("name", ["cat/a.jpg", "a.cls"])
def test_refuses_pictures_and_labels_that_are_links_or_devices(tmp_path, kind, name):
    path = one_tar(tmp_path / "a.tar", (name, b"", {"type": kind, "linkname": "/etc/passwd"}))
    assert f"the member {name} is a link or a device" in refusal(path)


@pytest.mark.parametrize("name", ["/cat/a.jpg", "../cat/a.jpg", "cat/../../a.jpg", "/a.cls"])
def test_refuses_names_that_lead_out_of_the_archive(tmp_path, name):
    path = one_tar(tmp_path / "a.tar", (name, b"a"))
    assert f"the member {name!r} has a name that leads out of the archive" in refusal(path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([("a.jpg", b"a")], "the picture a.jpg has no .cls, no .json with a label and no class folder"),
        ([("a.txt", b"a")], "holds no pictures"),
        ([("a.jpg", b"a"), ("a.cls", b"cat")], "the label a.cls is neither a whole number nor JSON"),
        ([("a.jpg", b"a"), ("a.cls", b"9" * 30)], "the label a.cls is neither"),
        ([("a.jpg", b"a"), ("a.cls", b"9" * 5000)], "the label a.cls is neither"),
        ([("a.jpg", b"a"), ("a.json", b"[" * 100_000)], "the label a.json is neither"),
        ([("a.jpg", b"a"), ("a.json", b'{"label": true}')], "the label a.json is neither"),
        ([("a.jpg", b"a"), ("a.json", b'{"label": "\\ud800"}')], "the label a.json is neither"),
        ([("a.jpg", b"a"), ("a.json", b" " * (2**20 + 1))], "the label a.json has 1048577 bytes"),
        ([("a.jpg", b"a"), ("a.png", b"a"), ("a.cls", b"1")], "has two pictures with one label, a.jpg and a.png"),
        ([("cat/a.jpg", b"a"), ("b.jpg", b"b"), ("b.cls", b"1")], "with numbers and samples with class names"),
    ],
)
def test_refuses_samples_that_make_no_sense(tmp_path, files, words):
    assert words in refusal(one_tar(tmp_path / "a.tar", *files))


def test_refuses_a_length_past_the_end(tmp_path):
    path = Path(one_tar(tmp_path / "a.tar", ("cat/a.jpg", b"a" * 5000)))
    whole = path.read_bytes()
    for length in (513, 3000, 5511):
        path.write_bytes(whole[:length])
        assert "the member cat/a.jpg has 5000 bytes, which is past the end" in refusal(path)
    path.write_bytes(whole[:5512])
    assert len(tar.scan(str(path)).labels) == 1


def test_numbers_of_more_than_8_gib_are_read_and_refused(tmp_path):
    member = tarfile.TarInfo("cat/a.jpg")
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        member.size = 2**40
        path = tmp_path / "a.tar"
        path.write_bytes(member.tobuf(form) + bytes(1024))
        assert f"has {2**40} bytes, which is past the end" in refusal(path)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar"])
def test_refuses_compressed_shards(tmp_path, name):
    path = tmp_path / name
    with tarfile.open(path, "w:gz") as archive:
        writers.add(archive, "cat/a.jpg", np.random.default_rng(0).bytes(2000))
    assert "compressed" in refusal(path) if name == "a.tar" else "is compressed;" in refusal(str(path))


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 2000])
def test_refuses_what_is_no_tar(tmp_path, content):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    assert f"cannot read {path}: " in refusal(path)


def test_pictures_in_shards_are_named_when_they_are_none(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    one_tar(root / "train-002.tar", ("cat/bad.jpg", b"GIF89a"))
    with pytest.raises(UserError, match=f"cannot read {root}/train-002.tar/cat/bad.jpg: it is neither JPEG"):
        open_index(Data(source="tar", path=str(root)))


def test_a_shard_that_becomes_shorter_is_noticed(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    index = open_index(Data(source="tar", path=str(root))).train
    shard = root / "train-000.tar"
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(UserError, match=f"{shard} is shorter than when it was indexed"):
        [index.read(i) for i in range(6)]


# --- damage --------------------------------------------------------------------------------------------------------


def whole():
    files = [("größe.jpg", b"a" * 700), ("größe.cls", b"1"), ("b.jpg", b"b"), ("b.json", b'{"label": 2}')]
    with tempfile.TemporaryDirectory() as folder:
        return Path(one_tar(Path(folder) / "a.tar", *files, form=tarfile.PAX_FORMAT)).read_bytes()[:7000]


WHOLE = whole()


def resealed(data):
    """A tar whose header sums are made right again, so that what is damaged in them is read."""
    data = bytearray(data)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(DAMAGE, st.booleans())
def test_damaged_tars_are_refused_or_harmless(damage, reseal):
    data = damaged(WHOLE, damage)
    refused_or_within(tar.scan, resealed(data) if reseal else data, "train.tar")
