"""Files that are no files, links to themselves, an index that changes, and names that are not UTF-8."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from support import writers

from podscale.cli.main import main
from podscale.data.crop import crop_batch
from podscale.data.image_files import list_image_files
from podscale.data.index import catalog
from podscale.data.index.dataset import open_index
from podscale.data.index.table import load_tables
from podscale.data.tools.check import check_data_set
from podscale.data.tools.prepare import Settings, prepare_data_set
from podscale.errors import UserError
from podscale.recipe import Data, load_recipe
from podscale.storage.files import read_lines, write_atomically

NAME = b"caf\xe9.jpg"
OTHERS = ("pipe", "socket", "loop", "dangling", "folder")


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    writers.write_folder(root)
    return root


def put(kind, path):
    """Put something that is not a regular file at a path."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path may have 107 bytes only
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if kind == "loop" else "nowhere")


def read_all(splits):
    """Crop every image of both splits; return the reasons of those that cannot be read."""
    bad = []
    for index in (splits.train, splits.val):
        n = len(index)
        boxes, out = np.tile([0, 0, 4, 4.0], (n, 1)), np.zeros((n, 4, 4, 3), np.uint8)
        crop_batch(index, np.arange(n), boxes, np.zeros(n, bool), out, bad=bad)
    return [reason for _, reason in bad]


@pytest.mark.parametrize("kind", OTHERS)
def test_entries_that_are_no_files_are_ignored_and_counted(photos, kind):
    before = open_index(Data(source="folder", path=str(photos)))
    folder = next(path for path in sorted((photos / "train").iterdir()))
    put(kind, folder / "odd.jpg")
    put("loop", photos / "train" / "loop")
    put("loop", photos / "loop")
    after = open_index(Data(source="folder", path=str(photos)))
    assert (len(after.train), len(after.val), after.classes) == (len(before.train), len(before.val), before.classes)
    assert read_all(after) == []
    result = check_data_set(str(photos), threads=1)
    assert result["counts"] == {"unreadable": 1}
    assert "odd.jpg is a" in result["findings"][0]["why"]
    assert "not a file, and is ignored; replace or remove it" in result["findings"][0]["why"]
    assert len(list_image_files([folder])) == sum(path.is_file() for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["tar", "folder"])
@pytest.mark.parametrize("other", ["pipe", "socket", "loop"])
def test_what_has_become_no_file_since_it_was_indexed_is_a_sentence(tmp_path, kind, other):
    root = tmp_path / "data"
    root.mkdir()
    {"tar": writers.write_tar, "folder": writers.write_folder}[kind](root)
    splits = open_index(Data(source=kind, path=str(root)))
    path = next(path for path in sorted((root).rglob("train*")) if path.is_file()) if kind == "tar" else None
    path = path or sorted(path for path in (root / "train").rglob("*") if path.is_file())[0]
    path.unlink()
    put(other, path)
    reasons = read_all(splits)
    assert reasons
    assert all("cannot" in reason and path.name in reason for reason in reasons)


def test_a_pipe_among_the_shards_is_no_shard(tmp_path):
    root = tmp_path / "shards"
    root.mkdir()
    writers.write_tar(root)
    before = len(open_index(Data(source="tar", path=str(root))).train)
    put("pipe", root / "train-99999.tar")
    put("loop", root / "train-99998.tar")
    assert len(open_index(Data(source="tar", path=str(root))).train) == before


@pytest.mark.parametrize("kind", ["pipe", "socket", "loop"])
def test_prepare_json_must_be_a_file(photos, tmp_path, kind):
    put(kind, photos / "prepare.json")
    with pytest.raises(UserError, match=r"cannot read .*prepare\.json: .*; remove it"):
        open_index(Data(source="folder", path=str(photos)))
    (photos / "prepare.json").unlink()
    target = tmp_path / "prepared"
    target.mkdir()
    put(kind, target / "prepare.json")
    with pytest.raises(UserError, match=r"cannot read .*prepare\.json: .*; remove it"):
        prepare_data_set(photos, target, Settings())


@pytest.mark.parametrize("kind", OTHERS)
def test_an_index_that_is_no_file_is_made_again_elsewhere(photos, kind):
    put(kind, photos / ".podscale-index")
    assert read_all(open_index(Data(source="folder", path=str(photos)))) == []


# --- an index that changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["truncate", "overwrite"])
def test_an_index_cannot_change_under_a_run(photos, change):
    path = catalog.store_beside("folder", photos)
    tables = load_tables(path)
    before = [array.copy() for array in (tables.train.labels, tables.train.lengths, tables.train.names.blob)]
    size = path.stat().st_size
    with path.open("r+b") as file:
        if change == "truncate":
            file.truncate(0)  # reading a mapped file now would end the process
        else:
            file.write(b"\xff" * size)
    after = (tables.train.labels, tables.train.lengths, tables.train.names.blob)
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert load_tables(path) is None
    assert len(open_index(Data(source="folder", path=str(photos))).train) == len(before[0])


def test_swapped_numbers_in_an_index_are_noticed(photos):
    """They leave the sum of all words as it was."""
    path = catalog.store_beside("folder", photos)
    tables, data = load_tables(path), bytearray(path.read_bytes())
    lengths = tables.train.lengths
    assert lengths[0] != lengths[1]
    at = bytes(data).index(lengths.tobytes())
    data[at : at + 16] = data[at + 8 : at + 16] + data[at : at + 8]
    path.write_bytes(data)
    assert load_tables(path) is None


def test_an_index_without_a_crc_is_still_read(photos, monkeypatch):
    import zlib

    path = catalog.store_beside("folder", photos)
    data = path.read_bytes()
    length = int.from_bytes(data[16:24], "little")
    header = json.loads(data[32 : 32 + length])
    del header["crc"]
    text = json.dumps(header, separators=(",", ":")).encode()
    body = data[32 + length + -(32 + length) % 64 :]
    start = data[:16] + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little") + text
    path.write_bytes(start + bytes(-len(start) % 64) + body)
    assert len(load_tables(path).train) == len(open_index(Data(source="folder", path=str(photos))).train)


# --- names that are not UTF-8 ----------------------------------------------------------------------------------------


def test_file_names_that_are_not_utf8_are_indexed_read_checked_and_prepared(photos, tmp_path, capfd):
    folder = os.fsencode(sorted((photos / "train").iterdir())[0])
    names = sorted(os.listdir(folder))
    os.rename(os.path.join(folder, names[0]), os.path.join(folder, b"caf\xe9.jpg"))
    for _ in range(2):  # scanned, then stored
        splits = open_index(Data(source="folder", path=str(photos)))
        assert read_all(splits) == []
    assert main(["data", "check", str(photos)]) == 0
    with open(os.path.join(folder, b"caf\xe9.jpg"), "r+b") as file:
        file.truncate(40)
    assert main(["data", "check", str(photos), "--json"]) == 1
    assert json.loads(capfd.readouterr().out.strip().splitlines()[-1])["counts"] == {"corrupt": 1}
    assert main(["data", "check", str(photos)]) == 1
    assert "caf" in capfd.readouterr().out


def test_a_path_that_is_not_utf8_is_refused_since_no_recipe_could_hold_it():
    with pytest.raises(UserError, match=r"data\.path 'photos-\\udcff' is not text in UTF-8; rename what it names"):
        load_recipe("digits").override({"data.path": os.fsdecode(b"photos-\xff")})


def test_messages_about_names_that_are_not_utf8_are_written_and_read_back(tmp_path):
    message = f"cannot read {os.fsdecode(NAME)}"
    write_atomically(tmp_path / "page", f"{message}\n")
    assert (tmp_path / "page").read_bytes() == b"cannot read caf\xe9.jpg\n"
    assert read_lines(tmp_path / "page") == [message]


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_class_names_that_are_not_utf8_never_end_in_a_traceback(photos, tmp_path, locale):
    for split in ("train", "val"):
        folder = os.fsencode(sorted((photos / split).iterdir())[0])
        os.rename(folder, os.path.join(os.path.dirname(folder), b"a-\xff"))
    environment = {**os.environ, "LC_ALL": locale}
    for command in (
        ["data", "index", str(photos)],
        ["data", "check", str(photos)],
        ["data", "prepare", str(photos), str(tmp_path / "prepared")],
    ):
        program = [sys.executable, "-m", "podscale", *command]
        ended = subprocess.run(program, env=environment, capture_output=True, check=False)
        assert b"Traceback" not in ended.stderr, ended.stderr
        assert ended.returncode in (0, 2)
