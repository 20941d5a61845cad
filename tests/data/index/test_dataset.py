"""Indexes of real files: their samples, their order, and refusals in one sentence."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from podscale.data.index.dataset import index_files, open_index
from podscale.data.tools.survey import survey_data_set
from podscale.errors import UserError
from podscale.recipe import Data


def save_image(path, size=(6, 4), color=(10, 20, 30), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 3), ("val", 1)):
        for name in ("cat", "ant"):
            for i in range(count):
                save_image(tmp_path / "pets" / split / name / f"{i}.png", size=(6 + i, 4))
    return tmp_path / "pets"


@pytest.fixture
def arrays():
    return {
        "train_images": np.arange(5 * 4 * 6 * 3, dtype=np.uint8).reshape(5, 4, 6, 3),
        "train_labels": np.array([0, 1, 2, 1, 0]),
        "test_images": np.zeros((2, 4, 6, 3), np.uint8),
        "test_labels": np.array([2, 0]),
    }


def get_refusal(call, *arguments):
    with pytest.raises(UserError) as error:
        call(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


def get_folder_refusal(path):
    return get_refusal(open_index, Data(source="folder", path=str(path)))


def get_npz_refusal(tmp_path, arrays):
    np.savez(tmp_path / "data.npz", **arrays)
    return get_refusal(open_index, Data(source="npz", path=str(tmp_path / "data.npz")))


# --- digits --------------------------------------------------------------------------------------------------------


def test_every_fifth_digit_validates_and_pixels_span_the_full_range():
    splits = open_index(Data(source="digits"))
    assert (len(splits.train), len(splits.val)) == (1437, 360)
    assert splits.classes == tuple("0123456789")
    assert splits.train.images.shape == (1437, 8, 8, 3)
    assert (splits.train.images.min(), splits.train.images.max()) == (0, 255)
    assert splits.val.name(17) == "digit 17"
    assert splits.val.labels[:3].tolist() == [0, 5, 0]
    assert splits.train.sizes[0].tolist() == [8, 8]
    assert np.array_equal(splits.train.load_pixels(3)[..., 0], splits.train.images[3, ..., 2])


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    digits, splits = load_digits(), open_index(Data(source="digits"))
    val = np.arange(1797) % 5 == 0
    for index, part in ((splits.train, ~val), (splits.val, val)):
        expected = (digits.images[part] * (255 / 16) + 0.5).astype(np.uint8)
        assert all(np.array_equal(index.images[..., channel], expected) for channel in range(3))
        assert np.array_equal(index.labels, digits.target[part])
    assert splits.digest() == "752c7703"


# --- folder --------------------------------------------------------------------------------------------------------


def test_a_folder_is_sorted_by_class_and_name(folder):
    (folder / "train" / "ant" / ".hidden.png").write_bytes(b"not an image")
    (folder / "train" / "ant" / "notes.txt").write_text("not an image")
    (folder / "train" / ".cache").mkdir()
    save_image(folder / "train" / "ant" / "0A.JPG", size=(9, 9))
    splits = open_index(Data(source="folder", path=str(folder), classes=2, train_samples=7, val_samples=2))
    assert splits.classes == ("ant", "cat")
    assert [name.rsplit("/", 2)[1:] for name in map(splits.train.name, range(7))] == [
        *(["ant", name] for name in ("0.png", "0A.JPG", "1.png", "2.png")),
        *(["cat", name] for name in ("0.png", "1.png", "2.png")),
    ]
    assert splits.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert splits.train.labels.dtype == splits.train.sizes.dtype == np.int32
    assert splits.train.sizes.tolist() == [[6, 4], [9, 9], [7, 4], [8, 4], [6, 4], [7, 4], [8, 4]]
    assert splits.val.read(0) == (folder / "val" / "ant" / "0.png").read_bytes()
    assert splits.val.load_pixels(0)[0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("extension", ["jpg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_are_those_of_the_upright_image(folder, extension, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    path = save_image(folder / "train" / "ant" / f"0.{extension}", size=(20, 10), exif=exif)
    expected = [10, 20] if orientation >= 5 else [20, 10]
    assert index_files([path]).sizes.tolist() == [expected]
    assert index_files([path]).load_pixels(0).shape[:2] == tuple(expected[::-1])


def test_refuses_missing_paths(tmp_path):
    assert get_folder_refusal("") == "data.path is empty; name the folder that holds the images"
    missing = tmp_path / "none"
    assert get_folder_refusal(missing) == f"data.path {missing} does not exist; name the folder that holds the images"


def test_refuses_a_file_for_a_folder(tmp_path):
    file = save_image(tmp_path / "x.png")
    assert get_folder_refusal(file).startswith(f"{file} is not a folder; data.path must hold train/CLASS/FILE")


def test_refuses_an_empty_folder(tmp_path):
    assert get_folder_refusal(tmp_path).startswith(f"the folder {tmp_path} is empty; put the images of each class")


def test_refuses_folders_without_images(tmp_path):
    (tmp_path / "ant").mkdir()
    assert get_folder_refusal(tmp_path) == f"no class folder of {tmp_path} holds an image (.jpg .jpeg .png .webp): ant"
    (tmp_path / "ant" / "notes.txt").write_text("mine")
    (tmp_path / "ant").rename(tmp_path / "notes.txt")
    assert get_folder_refusal(tmp_path).startswith(f"no class folder of {tmp_path} holds an image")


def test_refuses_images_without_class_folders(tmp_path):
    for i in range(3):
        save_image(tmp_path / f"{i}.png")
    expected = f"{tmp_path} holds 3 images but no class folders; move each into a folder of its class, such as"
    assert get_folder_refusal(tmp_path).startswith(expected)


def test_refuses_a_single_class_and_names_it(tmp_path):
    for i in range(4):
        save_image(tmp_path / "ant" / f"{i}.png")
    expected = f"{tmp_path} holds images of one class only, ant; a classifier needs at least two"
    assert get_refusal(survey_data_set, str(tmp_path)) == expected


def test_names_the_folder_inside_that_holds_the_classes(tmp_path):
    save_image(tmp_path / "photos" / "ant" / "0.png")
    expected = f"{tmp_path} holds no class folders with images, but {tmp_path}/photos does; use that path"
    assert get_folder_refusal(tmp_path) == expected


def test_a_split_by_another_name_is_named(folder):
    (folder / "val").rename(folder / "validation")
    assert get_folder_refusal(folder) == f"{folder} has no folder val; rename validation"


@pytest.mark.parametrize(("present", "absent"), [("train", "val"), ("val", "train")])
def test_refuses_a_missing_split(tmp_path, present, absent):
    save_image(tmp_path / present / "ant" / "0.png")
    assert get_folder_refusal(tmp_path).startswith(f"{tmp_path} has no folder {absent}; it must hold")


def test_refuses_a_split_without_classes(folder):
    (folder / "val").rename(folder / "elsewhere")
    save_image(folder / "val" / "0.png")
    assert get_folder_refusal(folder).startswith(f"{folder}/val holds an image but no class folders; move")


def test_class_folders_without_images_are_skipped_with_a_warning(folder):
    for split in ("train", "val"):
        (folder / split / "bee").mkdir()
    splits = open_index(Data(source="folder", path=str(folder)))
    assert splits.classes == ("ant", "cat")
    assert [text.partition(" holds")[0] for text in splits.warnings] == [
        f"class folder {folder}/{split}/bee" for split in ("train", "val")
    ]


def test_refuses_a_class_without_images_in_one_split(folder):
    save_image(folder / "train" / "bee" / "0.png")
    (folder / "val" / "bee").mkdir()
    expected = f"class folder {folder}/val/bee holds no images, but {folder}/train/bee does; add some to it, or remove"
    assert get_folder_refusal(folder).startswith(expected)


@pytest.mark.parametrize(("here", "there"), [("train", "val"), ("val", "train")])
def test_refuses_a_class_that_is_in_one_split_only(folder, here, there):
    save_image(folder / here / "bee" / "0.png")
    expected = f"class bee is in {folder}/{here} but not in {folder}/{there}; both need the same classes"
    assert get_folder_refusal(folder) == expected


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\nxx", b"RIFF....WEBPVP8 "])
def test_refuses_a_header_that_cannot_be_read(folder, content):
    bad = folder / "val" / "cat" / "9.jpg"
    bad.write_bytes(content)
    tolerated = open_index(Data(source="folder", path=str(folder)))  # one image, at any data.bad_share above 0
    assert [tolerated.val.name(i) for i in tolerated.val.list_unreadable()] == [str(bad)]
    message = get_refusal(open_index, Data(source="folder", path=str(folder), bad_share=0.0))
    counts = f"1 of {len(tolerated.val)} validation images cannot be read, and data.bad_share 0 allows 0"
    assert message.startswith(f"{counts}; the first: cannot read {bad}: ")
    assert message.endswith(f"`podscale data check {folder}` lists all, and a larger --data.bad_share tolerates them")


def test_a_suggested_command_quotes_its_path(folder, tmp_path_factory):
    (folder / "val" / "cat" / "9.jpg").write_bytes(b"")
    path = tmp_path_factory.mktemp("quoted") / "my photos"
    path.symlink_to(folder)
    message = get_refusal(open_index, Data(source="folder", path=str(path), bad_share=0.0))
    assert f"`podscale data check '{path}'` lists all" in message


def test_refuses_counts_that_differ_from_the_recipe(folder):
    for field, count in (("classes", 2), ("train_samples", 6), ("val_samples", 2)):
        message = get_refusal(open_index, Data(source="folder", path=str(folder), **{field: 99}))
        assert message == f"data.{field} is 99 but {folder} has {count}; correct the recipe or the path"
    assert get_refusal(open_index, Data(classes=3)).startswith("data.classes is 3 but digits has 10;")


# --- loose files ---------------------------------------------------------------------------------------------------


def test_loose_files_keep_their_order_and_have_no_labels(tmp_path):
    paths = [save_image(tmp_path / name, size=(5, i + 1)) for i, name in enumerate(("b.png", "a.jpg"))]
    index = index_files(paths)
    assert [index.name(i) for i in range(2)] == [str(path) for path in paths]
    assert index.labels.tolist() == [-1, -1]
    assert index.sizes.tolist() == [[5, 1], [5, 2]]


def test_refuses_no_files_and_paths_that_are_not_files(tmp_path):
    assert get_refusal(index_files, []) == "no images are named; name at least one file"
    assert get_refusal(index_files, [tmp_path]) == f"there is no image file {tmp_path}; check the path"


def test_error_names_a_file_that_was_deleted(tmp_path):
    path = save_image(tmp_path / "a.png")
    index = index_files([path])
    path.unlink()
    assert get_refusal(index.read, 0).startswith(f"cannot read {path}: No such file")


# --- npz -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["test", "val"])
def test_npz_arrays_are_used_unchanged(tmp_path, arrays, split):
    np.savez(tmp_path / "data.npz", **{key.replace("test", split): array for key, array in arrays.items()})
    splits = open_index(Data(source="npz", path=str(tmp_path / "data.npz")))
    assert np.array_equal(splits.train.images, arrays["train_images"])
    assert splits.train.sizes.tolist() == [[6, 4]] * 5
    assert splits.train.labels.tolist() == [0, 1, 2, 1, 0]
    assert splits.classes == ("0", "1", "2")
    assert splits.val.name(1) == f"{split} image 1"


def test_gray_npz_arrays_get_three_equal_channels(tmp_path, arrays):
    gray = arrays | {key: arrays[key][..., 0] for key in ("train_images", "test_images")}
    np.savez(tmp_path / "data.npz", **gray | {"train_labels": arrays["train_labels"][:, None]})
    train = open_index(Data(source="npz", path=str(tmp_path / "data.npz"))).train
    assert np.array_equal(train.images, np.repeat(arrays["train_images"][..., :1], 3, axis=3))
    assert train.labels.shape == (5,)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_images": np.zeros((5, 4, 6, 3), np.float32)}, "is float32; store pixels as uint8"),
        (
            {"train_images": np.zeros((5, 4, 6, 4), np.uint8)},
            "has shape (5, 4, 6, 4); it must be [n, height, width, 3]",
        ),
        ({"train_images": np.zeros((0, 4, 6, 3), np.uint8)}, "has shape (0, 4, 6, 3); it must be"),
        ({"train_images": np.zeros(5, np.uint8)}, "has shape (5,); it must be"),
        ({"train_labels": np.zeros(5)}, "is float64; store labels as whole numbers from 0"),
        ({"train_labels": np.zeros(4, int)}, "has shape (4,); it must be [5], one label per image"),
        ({"train_labels": np.array([0, -1, 0, 0, 0])}, "runs from -1 to 0; labels count from 0"),
        ({"test_labels": np.array([3, 0])}, "has validation label 3 but no training label above 2"),
    ],
)
def test_refuses_npz_arrays_of_the_wrong_kind(tmp_path, arrays, changes, expected):
    message = get_npz_refusal(tmp_path, arrays | changes)
    assert expected in message
    assert str(tmp_path / "data.npz") in message


@pytest.mark.parametrize("key", ["train_images", "train_labels", "test_labels"])
def test_refuses_an_npz_without_an_array(tmp_path, arrays, key):
    del arrays[key]
    assert get_npz_refusal(tmp_path, arrays).startswith(f"{tmp_path}/data.npz has no array {key}; it has ")


def test_refuses_an_npz_without_validation(tmp_path, arrays):
    only = {key: array for key, array in arrays.items() if key.startswith("train")}
    assert "has no array val_images; it has train_images, train_labels" in get_npz_refusal(tmp_path, only)


def test_refuses_files_that_are_not_npz(tmp_path, arrays):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    intact = path.read_bytes()
    for content in (b"", b"hello", intact[: len(intact) // 2], struct.pack("<I", 7)):
        path.write_bytes(content)
        assert get_refusal(open_index, Data(source="npz", path=str(path))).startswith(
            f"{path} is not a readable .npz file"
        )
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert "one bare array" in get_refusal(open_index, Data(source="npz", path=str(path)))


def test_npz_files_are_never_unpickled(tmp_path, arrays):
    assert "is not a readable .npz file" in get_npz_refusal(tmp_path, arrays | {"train_labels": np.array([print] * 5)})


# --- held out ----------------------------------------------------------------------------------------------------


def test_held_out_images_validate_and_are_not_trained_on(tmp_path):
    images = np.arange(1000, dtype=np.uint16).view(np.uint8).reshape(1000, 1, 2, 1).repeat(3, axis=3)
    labels = np.arange(1000) % 10
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels, val_images=images[:5], val_labels=labels[:5])
    data = Data(source="npz", path=str(tmp_path / "a.npz"), hold_out=0.1)
    splits = open_index(data)
    assert (len(splits.train), len(splits.val)) == (900, 100)
    numbers = [index.images[:, 0, :, 0].copy().view(np.uint16)[:, 0] for index in (splits.train, splits.val)]
    assert sorted(np.concatenate(numbers).tolist()) == list(range(1000))
    for index, number in zip((splits.train, splits.val), numbers, strict=True):
        assert index.labels.tolist() == (number % 10).tolist()
    assert len(np.unique(splits.val.labels)) == 10
    assert open_index(data).val.labels.tolist() == splits.val.labels.tolist()
    with pytest.raises(UserError, match=r"data.hold_out 0.0001 of 1000 training images is 0"):
        open_index(replace(data, hold_out=0.0001))


def test_held_out_files_keep_their_labels_sizes_and_bytes(tmp_path):
    for split, count in (("train", 20), ("val", 2)):
        for label in ("ant", "bee"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(count):
                size = (4 + i, 3)
                Image.new("RGB", size).save(tmp_path / split / label / f"{'x' * (i % 3)}{i}.png")
    data = Data(source="folder", path=str(tmp_path))
    full, splits = open_index(data).train, open_index(replace(data, hold_out=0.25))
    assert (len(splits.train), len(splits.val)) == (30, 10)
    expected = {full.name(i): (int(full.labels[i]), full.sizes[i].tolist(), full.read(i)) for i in range(len(full))}
    for index in (splits.train, splits.val):
        for i in range(len(index)):
            assert expected.pop(index.name(i)) == (index.labels[i], index.sizes[i].tolist(), index.read(i))
    assert not expected
