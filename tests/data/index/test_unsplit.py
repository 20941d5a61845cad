"""Image folders without splits: CLASS/FILE, as most people have them."""

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
    import os

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


def test_refuses_a_train_folder_without_a_val_folder(photos):
    (photos / "train").mkdir()
    with pytest.raises(UserError, match="has no folder val"):
        open_index(Data(source="folder", path=str(photos)))
