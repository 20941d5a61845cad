"""Image folders without splits: CLASS/FILE, as most people have them."""

import os

import numpy as np
import pytest
from PIL import Image

from podscale.data.index.dataset import open_index
from podscale.data.tools.survey import survey_data_set
from podscale.errors import UserError
from podscale.recipe import Data


@pytest.fixture
def photos(tmp_path):
    for shade, name in ((30, "cat"), (200, "dog")):
        (tmp_path / name).mkdir()
        for i in range(11):
            Image.new("RGB", (10, 8), (shade, i, 0)).save(tmp_path / name / f"{i:02}.png")
    return tmp_path


def test_every_fifth_image_validates_and_none_is_in_both_splits(photos):
    splits = open_index(Data(source="folder", path=str(photos)))
    assert splits.classes == ("cat", "dog")
    assert (len(splits.train), len(splits.val)) == (16, 6)
    names = {split: [getattr(splits, split).name(i) for i in range(n)] for split, n in (("train", 16), ("val", 6))}
    assert names["val"][:3] == [f"{photos}/cat/{i}.png" for i in ("00", "05", "10")]
    assert not set(names["train"]) & set(names["val"])
    assert splits.val.load_pixels(4)[0, 0].tolist() == [200, 5, 0]
    assert np.array_equal(splits.val.labels, [0, 0, 0, 1, 1, 1])


def test_the_index_is_stored_and_follows_changes(photos):
    past = 1_600_000_000
    for folder in ("cat", "dog"):
        os.utime(photos / folder, (past, past))
    assert not survey_data_set(str(photos))["kept"]
    second = survey_data_set(str(photos))
    assert second["kept"]
    assert second["unsplit"]
    (photos / "cat" / "10.png").unlink()
    assert survey_data_set(str(photos))["splits"]["val"]["images"] == 5


def test_refuses_a_class_with_a_single_image(photos):
    (photos / "bird").mkdir()
    Image.new("RGB", (10, 8)).save(photos / "bird" / "0.png")
    with pytest.raises(UserError, match="bird holds 1 image; a class needs two"):
        open_index(Data(source="folder", path=str(photos)))


def test_an_empty_class_folder_is_skipped_with_a_warning(photos):
    (photos / "bird").mkdir()
    splits = open_index(Data(source="folder", path=str(photos)))
    assert splits.classes == ("cat", "dog")
    assert splits.warnings == (
        f"class folder {photos}/bird holds no images (.jpg .jpeg .png .webp) and is skipped; add some or remove it",
    )
    assert survey_data_set(str(photos))["warnings"] == list(splits.warnings)


def test_images_of_other_formats_are_counted_in_a_warning_also_from_a_stored_index(photos):
    past = 1_600_000_000
    for name in ("cat/a.heic", "cat/b.HEIC", "dog/c.gif", "dog/notes.txt"):
        (photos / name).write_bytes(b"x")
    (photos / "bird").mkdir()
    (photos / "bird" / "1.heic").write_bytes(b"x")
    for folder in ("cat", "dog"):
        os.utime(photos / folder, (past, past))
    expected = [
        f"3 files of {photos} cannot be read and are ignored (.gif .heic); convert them to .jpg or .png",
        f"class folder {photos}/bird holds only .heic files, which cannot be read, and is skipped; "
        "convert them to .jpg or .png",
    ]
    for is_stored in (False, True):
        survey = survey_data_set(str(photos))
        assert (survey["kept"], survey["warnings"]) == (is_stored, expected)


def test_many_class_folders_of_other_formats_get_one_warning(photos):
    for name in ("ant", "bee", "fly", "owl"):
        (photos / name).mkdir()
        (photos / name / "1.bmp").write_bytes(b"x")
    (warning,) = open_index(Data(source="folder", path=str(photos))).warnings
    assert warning == (
        f"4 class folders of {photos} hold no images and are skipped: ant, bee, fly, ...; "
        "some hold .bmp files, which cannot be read; convert them to .jpg or .png"
    )


def test_refuses_a_train_folder_without_a_val_folder(photos):
    (photos / "train").mkdir()
    with pytest.raises(UserError, match="has no folder val"):
        open_index(Data(source="folder", path=str(photos)))
