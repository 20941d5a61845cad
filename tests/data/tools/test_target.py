"""The folder that a data set is prepared into: other settings, sources, contents and processes are refused."""

import os
import shutil
import tarfile

import numpy as np
import pytest
from support import writers
from support.prepared import assert_refused, read_contents

from podscale.data.index import catalog
from podscale.data.tools import prepare
from podscale.data.tools.prepare import Settings
from podscale.data.tools.target import lock_folder
from podscale.errors import UserError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(), "--shard-mib 1, now 256"),
        (Settings(longest=300, shard_mib=1), "--longest not given, now 300"),
        (Settings(quality=90, shard_mib=1), "--quality not given, now 90"),
        (Settings(raw=True, shard_mib=1), "--raw not given, now given"),
    ],
)
def test_other_settings_are_refused(many, uninterrupted, settings, message):
    before = read_contents(uninterrupted)
    assert_refused(f"was started with other settings ({message})", many, uninterrupted, settings)
    assert read_contents(uninterrupted) == before


def test_another_source_is_refused(photos, many, uninterrupted, tmp_path):
    before = read_contents(uninterrupted)
    assert_refused("was started from other data", photos, uninterrupted, Settings(shard_mib=1))
    assert read_contents(uninterrupted) == before
    shutil.copytree(many, tmp_path / "moved")  # the same data elsewhere is the same data
    assert prepare.prepare_data_set(tmp_path / "moved", uninterrupted, Settings(shard_mib=1))["already"]


def test_a_folder_that_holds_something_else_is_refused(photos, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert_refused("is not empty and holds nothing that was prepared", photos, tmp_path, Settings())
    assert_refused("is a file; name a folder", photos, tmp_path / "mine.txt", Settings())
    assert_refused("cannot make the folder", photos, tmp_path / "mine.txt" / "to", Settings())
    assert os.listdir(tmp_path) == ["mine.txt"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": {"longest": "x"}}', '{"settings": {"wrong": 1}}'])
def test_a_damaged_journal_is_refused(photos, tmp_path, text):
    (tmp_path / "prepare.json").write_text(text)
    assert_refused("prepare.json is damaged; remove the folder", photos, tmp_path, Settings())


def test_source_and_target_must_be_apart(photos, tmp_path):
    before = read_contents(photos)
    assert_refused("is the source itself", photos, photos, Settings())
    assert_refused("is inside ", photos, photos / "to", Settings())
    assert_refused("is inside ", photos, photos.parent, Settings())
    (tmp_path / "link").symlink_to(photos)
    assert_refused("is inside ", photos, tmp_path / "link" / "to", Settings())
    assert read_contents(photos) == before


def test_paths_that_are_not_data_sets_are_refused(photos, tmp_path):
    assert_refused("there is no folder", tmp_path / "nowhere", tmp_path / "to", Settings())
    np.savez(tmp_path / "data.npz", train_images=np.zeros((1, 2, 2, 3), np.uint8))
    assert_refused("data.npz is a file; name a folder", tmp_path / "data.npz", tmp_path / "to", Settings())
    (tmp_path / "empty").mkdir()
    assert_refused("is empty; put the images of each class", tmp_path / "empty", tmp_path / "to", Settings())
    both = writers.write_tfrecord(writers.write_tar(tmp_path / "both"))
    assert_refused("can be read as tar and as tfrecord; choose one with --source", both, tmp_path / "to", Settings())
    assert prepare.prepare_data_set(both, tmp_path / "to", Settings(), kind="tar")["source"] == "tar"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"longest": 0}, "--longest is 0; it must be from 1 to"),
        ({"quality": 101}, "--quality is 101"),
        ({"shard_mib": -1}, "--shard-mib is -1"),
        ({"subsampling": "422", "quality": 90}, "it must be 420 or 444"),
        ({"subsampling": "444"}, "add --quality or --longest"),
        ({"raw": True, "quality": 90}, "--raw stores pixels"),
    ],
)
def test_invalid_settings_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Settings(**fields)


def test_only_one_process_prepares_a_folder_at_a_time(photos, tmp_path):
    with lock_folder(tmp_path / "to"):
        assert_refused("another process is preparing", photos, tmp_path / "to", Settings())
    prepare.prepare_data_set(photos, tmp_path / "to", Settings())


def test_a_source_that_changes_meanwhile_is_refused(photos, tmp_path, monkeypatch):
    store_beside = catalog.store_beside

    def replace_shard_and_store(kind, root, *arguments):
        with tarfile.open(root / "train-00000.tar", "w") as tar:
            for name, data in (("0.jpg", writers.make_image(0)), ("0.cls", b"0"), ("1.jpg", writers.make_image(1))):
                writers.add_member(tar, name, data)
            for label in b"12":
                writers.add_member(tar, f"{label}.png", writers.make_image(2, "png"))
                writers.add_member(tar, f"{label}.cls", bytes([label]))
            writers.add_member(tar, "1.cls", b"1")
        return store_beside(kind, root, *arguments)

    monkeypatch.setattr(catalog, "store_beside", replace_shard_and_store)
    assert_refused("has changed while it was prepared", photos, tmp_path / "to", Settings())
