"""`data check`: real files with every kind of problem, loose and in shards, each reported as its kind."""

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
from podscale.data.tools.check import check_data_set, detect_format
from podscale.errors import UserError


def find_problems(root, **options):
    """Return (kind, base name) of every problem."""
    summary = check_data_set(str(root), **options)
    assert summary["clean"] == (not summary["findings"])
    return {(problem["kind"], problem["name"].rpartition("/")[2]) for problem in summary["findings"]}


@pytest.fixture
def photos(tmp_path):
    """An image folder without problems."""
    for split in writers.SPLITS:
        for label, name, data in writers.make_samples(split):
            path = tmp_path / split / writers.CLASSES[label] / f"{split}{label}{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return tmp_path


def make_bomb():
    """Return a PNG of 50 bytes that asks for 400 gigapixels."""

    def encode_chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2**21, 2**21 // 10, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + encode_chunk(b"IHDR", header) + encode_chunk(b"IDAT", b"") + encode_chunk(b"IEND", b"")
    )


def test_an_intact_folder_is_clean_with_either_decoder(photos, monkeypatch):
    assert find_problems(photos) == set()
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    assert find_problems(photos) == set()


def test_every_kind_of_problem_is_reported_as_its_kind(photos):
    bees, cats = photos / "train" / "bee", photos / "val" / "cat"
    intact = writers.make_image(77)
    problems = {
        bees / "empty.jpg": ("empty file", b""),
        bees / "cut.jpg": ("corrupt", intact[: len(intact) * 2 // 3]),
        bees / "text.png": ("corrupt", b"<html>not found</html>"),
        bees / "bomb.png": ("huge", make_bomb()),
        cats / "other.jpg": ("mislabelled", writers.make_image(78, "png")),
        cats / "leak.jpg": ("in both splits", (photos / "train" / "cat" / "train200.jpg").read_bytes()),
        bees / "label.jpg": ("two labels", (photos / "train" / "ant" / "train000.jpg").read_bytes()),
        cats / "copy.jpg": ("twice", (cats / "val200.jpg").read_bytes()),
    }
    for path, (_, data) in problems.items():
        path.write_bytes(data)
    copies = {"leak.jpg", "label.jpg", "copy.jpg"}
    reported = find_problems(photos)
    expected = {(kind, path.name) for path, (kind, _) in problems.items()}
    # Which of two copies is reported as the second depends on their names alone.
    assert {item for item in reported if item[1] not in copies} >= {item for item in expected if item[1] not in copies}
    assert sorted(kind for kind, _ in reported) == sorted(kind for kind, _ in expected)


def test_a_third_copy_is_reported_too(photos):
    original = photos / "train" / "ant" / "train000.jpg"
    for name in ("x.jpg", "y.jpg"):
        (photos / "train" / "ant" / name).write_bytes(original.read_bytes())
    findings = check_data_set(str(photos))["findings"]
    assert [(problem["kind"], str(original) in problem["why"]) for problem in findings] == [("twice", True)] * 2


def test_an_image_with_two_labels_is_reported_with_both_files(photos):
    ant, bee = photos / "train" / "ant" / "train000.jpg", photos / "train" / "bee" / "copy.jpg"
    bee.write_bytes(ant.read_bytes())
    (problem,) = check_data_set(str(photos))["findings"]
    assert problem["why"] == f"an image has two labels, ant ({ant}) and bee ({bee}); remove the wrong one"


def test_an_empty_class_folder_is_reported_and_the_others_are_checked(photos):
    for split in writers.SPLITS:
        (photos / split / "dog").mkdir()
    (photos / "train" / "ant" / "empty.png").touch()
    assert find_problems(photos) == {("empty class", "dog"), ("empty file", "empty.png")}


def test_a_single_class_and_files_of_other_formats_are_reported(tmp_path):
    (tmp_path / "cat").mkdir()
    for i in range(3):
        (tmp_path / "cat" / f"{i}.png").write_bytes(writers.make_image(i, "png"))
    for name in ("a.heic", "b.HEIC", "c.gif", "notes.txt"):
        (tmp_path / "cat" / name).write_bytes(b"x")
    unreadable, single = check_data_set(str(tmp_path))["findings"]
    expected = f"3 files of class folder {tmp_path}/cat cannot be read and are ignored (.gif .heic); convert them to"
    assert unreadable["why"].startswith(expected)
    assert single["why"] == f"{tmp_path} holds images of one class only, cat; a classifier needs at least two"


def test_a_folder_of_other_formats_alone_says_which(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.heic").write_bytes(b"x")
    with pytest.raises(UserError, match=r"are \.heic files, which cannot be read; convert them to \.jpg or \.png"):
        check_data_set(str(tmp_path))


def test_uneven_classes_are_reported_but_are_no_problem(photos):
    for i in range(60):
        (photos / "train" / "bee" / f"more{i}.png").write_bytes(writers.make_image(5000 + i, "png"))
    summary = check_data_set(str(photos))
    assert summary["clean"]
    assert summary["classes"]["train"] == {"fewest": ["ant", 4], "most": ["bee", 64], "uneven": True}
    assert not summary["classes"]["val"]["uneven"]


def test_images_in_tars_and_records_are_checked_in_place(tmp_path):
    for kind, write in (("tar", writers.write_tar), ("tfrecord", writers.write_tfrecord)):
        root = tmp_path / kind
        root.mkdir()
        write(root)
        assert check_data_set(str(root))["clean"]
        shard = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 3000)[0]
        data = bytearray(shard.read_bytes())
        at = data.index(b"\xff\xd8\xff") + 3
        data[at : at + 60] = bytes(60)
        shard.write_bytes(data)
        (problem,) = check_data_set(str(root))["findings"]
        assert problem["kind"] == "corrupt"
        assert str(shard) in problem["name"]


def test_a_truncated_shard_is_reported(tmp_path):
    """Some classes of the split are lost with it, so the other samples cannot be checked."""
    writers.write_tar(tmp_path)
    shard = sorted(tmp_path.rglob("train*.tar"))[0]
    shard.write_bytes(shard.read_bytes()[:700])
    with pytest.raises(UserError, match=f"cannot read {shard}"):
        check_data_set(str(tmp_path))


def test_the_command_reports_problems_as_text_as_json_and_by_its_exit_code(photos, capfd):
    assert main(["data", "check", str(photos)]) == 0
    assert "problems  none" in capfd.readouterr().out
    (photos / "train" / "ant" / "empty.png").touch()
    assert main(["data", "check", str(photos)]) == 1
    output = capfd.readouterr().out
    assert "empty file: 1" in output
    assert "empty.png has no bytes; replace or remove it" in " ".join(output.split())
    assert main(["data", "check", str(photos), "--json"]) == 1
    summary = json.loads(capfd.readouterr().out)
    assert summary["counts"] == {"empty file": 1}
    assert summary["images"] == {"train": 13, "val": 6}
    assert main(["data", "check", str(photos / "nowhere")]) == 2


def test_progress_counts_to_the_end(photos):
    calls = []
    check_data_set(str(photos), progress=lambda *arguments: calls.append(arguments))
    assert calls[-1] == ("checking images", 18, 18)


def test_the_format_is_detected_from_the_content():
    for extension, name in (("jpg", "JPEG"), ("png", "PNG"), ("webp", "WebP")):
        assert detect_format(writers.make_image(1, extension)) == name
    file = io.BytesIO()
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(file, "PPM")
    assert detect_format(file.getvalue()) == "PPM"
    assert detect_format(b"GIF89a") == "unknown"


def test_too_many_pixels_raise_their_own_error():
    with pytest.raises(decode.TooLargeError, match=r"more than the 1024 of data\.max_image_mib"):
        decode.decode_image(make_bomb())
    with pytest.raises(UserError) as refusal:
        decode.decode_image(b"nothing")
    assert not isinstance(refusal.value, decode.TooLargeError)
