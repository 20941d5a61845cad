"""WebDataset's tars: which members are samples, which files are refused, and that damaged files are harmless."""

import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import writers
from support.damage import DAMAGE, apply_damage, assert_refused_or_within

from podscale.data.index.containers import tar
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.recipe import Data


def write_shard(path, *files, form=tarfile.GNU_FORMAT):
    """Write a shard of (name, bytes, attributes)."""
    with tarfile.open(path, "w", format=form) as archive:
        for name, data, *attributes in files:
            writers.add_member(archive, name, data, **(attributes[0] if attributes else {}))
    return str(path)


def scan_labels(path):
    """Return (name, label) of every sample of a shard."""
    samples = tar.scan(path)
    labels = [samples.class_names[label] if samples.class_names else label for label in samples.labels.tolist()]
    with open(path, "rb") as file:
        for offset, length in zip(samples.offsets.tolist(), samples.lengths.tolist(), strict=True):
            file.seek(offset)
            assert len(file.read(length)) == length
    return list(zip([samples.names[i] for i in range(len(samples.names))], labels, strict=True))


def get_refusal(path):
    with pytest.raises(UserError) as error:
        tar.scan(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_non_ascii_names_are_read(tmp_path, form):
    long = f"cat/{'x' * 300}.jpg"
    path = write_shard(tmp_path / "a.tar", (long, b"1"), ("cat/größe.jpg", b"2"), ("bee/short.jpg", b"3"), form=form)
    assert scan_labels(path) == [(long, "cat"), ("cat/größe.jpg", "cat"), ("bee/short.jpg", "bee")]


def test_ustar_prefixes_are_part_of_the_name(tmp_path):
    long = f"{'d' * 60}/{'e' * 60}/cat/x.jpg"
    assert scan_labels(write_shard(tmp_path / "a.tar", (long, b"1"), form=tarfile.USTAR_FORMAT)) == [(long, "cat")]


def test_labels_and_images_of_a_key_are_joined_in_any_order(tmp_path):
    path = write_shard(
        tmp_path / "a.tar",
        ("b.cls", b"7\n"),
        ("a.jpg", b"a"),
        ("a.txt", b"a caption"),
        ("b.seg.png", b"mask"),
        ("b.JPG", b"b"),
        ("a.json", b'{"label": 3}'),
        ("info.json", b'{"made": "today"}'),
    )
    assert scan_labels(path) == [("a.jpg", 3), ("b.JPG", 7)]


def test_json_label_may_be_a_class_name(tmp_path):
    assert scan_labels(write_shard(tmp_path / "a.tar", ("a.jpg", b"a"), ("a.json", b'{"label": "cat"}'))) == [
        ("a.jpg", "cat")
    ]


def test_unlabelled_images_may_have_dots_in_their_names(tmp_path):
    files = [("cat/IMG.1.jpg", b"1"), ("cat/IMG.2.jpg", b"2"), ("./bee/a.png", b"3"), ("./bee/a.jpg", b"4")]
    names = [("cat/IMG.1.jpg", "cat"), ("cat/IMG.2.jpg", "cat"), ("./bee/a.png", "bee"), ("./bee/a.jpg", "bee")]
    assert scan_labels(write_shard(tmp_path / "a.tar", *files)) == names


def test_links_devices_and_folders_without_image_extensions_are_ignored(tmp_path):
    path = write_shard(
        tmp_path / "a.tar",
        ("cat", b"", {"type": tarfile.DIRTYPE}),
        ("/latest", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("../pipe", b"", {"type": tarfile.FIFOTYPE}),
        ("cat/a.jpg", b"a"),
    )
    assert scan_labels(path) == [("cat/a.jpg", "cat")]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
@pytest.mark.parametrize("name", ["cat/a.jpg", "a.cls"])
def test_refuses_images_and_labels_that_are_links_or_devices(tmp_path, kind, name):
    path = write_shard(tmp_path / "a.tar", (name, b"", {"type": kind, "linkname": "/etc/passwd"}))
    assert f"the member {name} is a link or a device" in get_refusal(path)


@pytest.mark.parametrize("name", ["/cat/a.jpg", "../cat/a.jpg", "cat/../../a.jpg", "/a.cls"])
def test_refuses_names_that_lead_out_of_the_archive(tmp_path, name):
    path = write_shard(tmp_path / "a.tar", (name, b"a"))
    assert f"the member {name!r} has a name that leads out of the archive" in get_refusal(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("a.jpg", b"a")], "the image a.jpg has no .cls, no .json with a label and no class folder"),
        ([("a.txt", b"a")], "holds no images"),
        ([("a.jpg", b"a"), ("a.cls", b"cat")], "the label a.cls is neither a whole number nor JSON"),
        ([("a.jpg", b"a"), ("a.cls", b"9" * 30)], "the label a.cls is neither"),
        ([("a.jpg", b"a"), ("a.cls", b"9" * 5000)], "the label a.cls is neither"),
        ([("a.jpg", b"a"), ("a.json", b"[" * 100_000)], "the label a.json is neither"),
        ([("a.jpg", b"a"), ("a.json", b'{"label": true}')], "the label a.json is neither"),
        ([("a.jpg", b"a"), ("a.json", b'{"label": "\\ud800"}')], "the label a.json is neither"),
        ([("a.jpg", b"a"), ("a.json", b" " * (2**20 + 1))], "the label a.json has 1048577 bytes"),
        ([("a.jpg", b"a"), ("a.png", b"a"), ("a.cls", b"1")], "has two images with one label, a.jpg and a.png"),
        ([("cat/a.jpg", b"a"), ("b.jpg", b"b"), ("b.cls", b"1")], "with numbers and samples with class names"),
    ],
)
def test_refuses_invalid_samples(tmp_path, files, message):
    assert message in get_refusal(write_shard(tmp_path / "a.tar", *files))


def test_refuses_a_member_that_exceeds_the_file(tmp_path):
    path = Path(write_shard(tmp_path / "a.tar", ("cat/a.jpg", b"a" * 5000)))
    intact = path.read_bytes()
    for length in (513, 3000, 5511):
        path.write_bytes(intact[:length])
        assert "the member cat/a.jpg has 5000 bytes, which is past the end" in get_refusal(path)
    path.write_bytes(intact[:5512])
    assert len(tar.scan(str(path)).labels) == 1


def test_lengths_over_8_gib_are_read_and_refused(tmp_path):
    member = tarfile.TarInfo("cat/a.jpg")
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        member.size = 2**40
        path = tmp_path / "a.tar"
        path.write_bytes(member.tobuf(form) + bytes(1024))
        assert f"has {2**40} bytes, which is past the end" in get_refusal(path)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar"])
def test_refuses_compressed_shards(tmp_path, name):
    path = tmp_path / name
    with tarfile.open(path, "w:gz") as archive:
        writers.add_member(archive, "cat/a.jpg", np.random.default_rng(0).bytes(2000))
    assert "compressed" in get_refusal(path) if name == "a.tar" else "is compressed;" in get_refusal(str(path))


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 2000])
def test_refuses_files_that_are_not_tars(tmp_path, content):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    assert f"cannot read {path}: " in get_refusal(path)


def test_refusal_names_the_member_that_is_not_an_image(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    write_shard(root / "train-002.tar", ("cat/bad.jpg", b"GIF89a"))
    with pytest.raises(UserError, match=f"the first: cannot read {root}/train-002.tar/cat/bad.jpg: it is neither JPEG"):
        open_index(Data(source="tar", path=str(root), bad_share=0.0))


def test_shard_truncated_after_indexing_is_refused(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    index = open_index(Data(source="tar", path=str(root))).train
    shard = root / "train-000.tar"
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(UserError, match=f"{shard} is shorter than when it was indexed"):
        [index.read(i) for i in range(6)]


# --- damage --------------------------------------------------------------------------------------------------------


def make_intact_file():
    files = [("größe.jpg", b"a" * 700), ("größe.cls", b"1"), ("b.jpg", b"b"), ("b.json", b'{"label": 2}')]
    with tempfile.TemporaryDirectory() as folder:
        return Path(write_shard(Path(folder) / "a.tar", *files, form=tarfile.PAX_FORMAT)).read_bytes()[:7000]


INTACT = make_intact_file()


def repair_checksums(data):
    """Return a tar whose header checksums are correct again, so that damaged headers are read."""
    data = bytearray(data)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(DAMAGE, st.booleans())
def test_damaged_tars_are_refused_or_harmless(damage, reseal):
    data = apply_damage(INTACT, damage)
    assert_refused_or_within(tar.scan, repair_checksums(data) if reseal else data, "train.tar")
