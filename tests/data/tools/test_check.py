"""`data check`: real files of every kind of trouble, loose and in shards, each named as what it is."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from support import writers

from podscale.cli.main import main
from podscale.data import decode
from podscale.data.tools.check import check, format_of
from podscale.errors import UserError


def found_in(root, **more):
    found = check(str(root), **more)
    assert found["clean"] == (not found["findings"])
    return {(one["kind"], one["name"].rpartition("/")[2]) for one in found["findings"]}


@pytest.fixture
def photos(tmp_path):
    """A folder in which nothing is wrong."""
    for split in writers.SPLITS:
        for label, name, data in writers.samples(split):
            place = tmp_path / split / writers.CLASSES[label] / f"{split}{label}{name}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    return tmp_path


def bomb():
    """A PNG of 50 bytes that asks for 400 gigapixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2**21, 2**21 // 10, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_a_clean_folder_is_clean_by_either_decoder(photos, monkeypatch):
    assert found_in(photos) == set()
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    assert found_in(photos) == set()


def test_every_kind_of_trouble_is_named_as_what_it_is(photos):
    bees, cats = photos / "train" / "bee", photos / "val" / "cat"
    whole = writers.picture(77)
    troubles = {
        bees / "empty.jpg": ("empty", b""),
        bees / "cut.jpg": ("corrupt", whole[: len(whole) * 2 // 3]),
        bees / "text.png": ("corrupt", b"<html>not found</html>"),
        bees / "bomb.png": ("huge", bomb()),
        cats / "other.jpg": ("mislabelled", writers.picture(78, "png")),
        cats / "leak.jpg": ("in both splits", (photos / "train" / "cat" / "train200.jpg").read_bytes()),
        bees / "label.jpg": ("two labels", (photos / "train" / "ant" / "train000.jpg").read_bytes()),
        cats / "copy.jpg": ("twice", (cats / "val200.jpg").read_bytes()),
    }
    for path, (_, data) in troubles.items():
        path.write_bytes(data)
    copies = {"leak.jpg", "label.jpg", "copy.jpg"}
    found = found_in(photos)
    expected = {(kind, path.name) for path, (kind, _) in troubles.items()}
    # Which of two copies is told as the second one depends on their names alone.
    assert {one for one in found if one[1] not in copies} >= {one for one in expected if one[1] not in copies}
    assert sorted(kind for kind, _ in found) == sorted(kind for kind, _ in expected)


def test_a_third_copy_is_told_too(photos):
    original = photos / "train" / "ant" / "train000.jpg"
    for name in ("x.jpg", "y.jpg"):
        (photos / "train" / "ant" / name).write_bytes(original.read_bytes())
    findings = check(str(photos))["findings"]
    assert [(one["kind"], str(original) in one["why"]) for one in findings] == [("twice", True)] * 2


def test_a_class_folder_without_pictures_is_told_and_the_rest_is_looked_at(photos):
    for split in writers.SPLITS:
        (photos / split / "dog").mkdir()
    (photos / "train" / "ant" / "empty.png").touch()
    assert found_in(photos) == {("unreadable", "dog"), ("empty", "empty.png")}


def test_classes_far_apart_in_size_are_told_but_not_wrong(photos):
    for i in range(60):
        (photos / "train" / "bee" / f"more{i}.png").write_bytes(writers.picture(5000 + i, "png"))
    found = check(str(photos))
    assert found["clean"]
    assert found["classes"]["train"] == {"fewest": ["ant", 4], "most": ["bee", 64], "uneven": True}
    assert not found["classes"]["val"]["uneven"]


def test_pictures_in_tars_and_records_are_looked_at_where_they_are(tmp_path):
    for kind, write in (("tar", writers.write_tar), ("tfrecord", writers.write_tfrecord)):
        root = tmp_path / kind
        root.mkdir()
        write(root)
        assert check(str(root))["clean"]
        shard = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 3000)[0]
        data = bytearray(shard.read_bytes())
        at = data.index(b"\xff\xd8\xff") + 3
        data[at : at + 60] = bytes(60)
        shard.write_bytes(data)
        (found,) = check(str(root))["findings"]
        assert found["kind"] == "corrupt"
        assert str(shard) in found["name"]


def test_a_shard_that_is_cut_off_is_told(tmp_path):
    """With it go some classes of the split, so that nothing can be said of the rest."""
    writers.write_tar(tmp_path)
    shard = sorted(tmp_path.rglob("train*.tar"))[0]
    shard.write_bytes(shard.read_bytes()[:700])
    with pytest.raises(UserError, match=f"cannot read {shard}"):
        check(str(tmp_path))


def test_the_command_says_it_in_words_in_json_and_by_its_exit_code(photos, capfd):
    assert main.main(["data", "check", str(photos)]) == 0
    assert "nothing wrong" in capfd.readouterr().out
    (photos / "train" / "ant" / "empty.png").touch()
    assert main.main(["data", "check", str(photos)]) == 1
    said = capfd.readouterr().out
    assert "empty: 1" in said
    assert "empty.png has no bytes; replace or remove it" in " ".join(said.split())
    assert main.main(["data", "check", str(photos), "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert found["counts"] == {"empty": 1}
    assert found["pictures"] == {"train": 13, "val": 6}
    assert main.main(["data", "check", str(photos / "nowhere")]) == 2


def test_everything_is_told_of_while_it_goes_on(photos):
    told = []
    check(str(photos), progress=lambda *what: told.append(what))
    assert told[-1] == ("checking pictures", 18, 18)


def test_a_format_is_told_by_content():
    for extension, name in (("jpg", "JPEG"), ("png", "PNG"), ("webp", "WebP")):
        assert format_of(writers.picture(1, extension)) == name
    held = io.BytesIO()
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(held, "PPM")
    assert format_of(held.getvalue()) == "PPM"
    assert format_of(b"GIF89a") == "unknown"


def test_too_many_pixels_are_an_error_of_their_own():
    with pytest.raises(decode.TooLargeError, match="more than 268435456"):
        decode.decode(bomb())
    with pytest.raises(UserError) as refusal:
        decode.decode(b"nothing")
    assert not isinstance(refusal.value, decode.TooLargeError)
