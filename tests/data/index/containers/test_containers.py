"""The same images in a folder, in tars, TFRecords and parquet files are the same data set."""

import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from support import writers

from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.recipe import Data

needs_pyarrow = pytest.mark.skipif(writers.pyarrow is None, reason="pyarrow is not installed")

WRITERS = [
    ("folder", writers.write_folder, {}),
    ("tar", writers.write_tar, {}),
    ("tar", writers.write_tar, {"style": "cls"}),
    ("tar", writers.write_tar, {"style": "json", "form": tarfile.PAX_FORMAT}),
    ("tar", writers.write_tar, {"form": tarfile.USTAR_FORMAT, "name": "{split}/{shard}.tar"}),
    ("tfrecord", writers.write_tfrecord, {}),
    ("tfrecord", writers.write_tfrecord, {"folders": True, "packed": False}),
    *(
        pytest.param("parquet", writers.write_parquet, options, marks=needs_pyarrow)
        for options in (
            {},
            {"plain": True},
            {"data_page_version": "2.0"},
            {"row_group_size": 100, "data_page_size": 1},
            {"data_page_version": "2.0", "compression": "none", "use_dictionary": False},
        )
    ),
]


def open_data_set(source, root, **counts):
    return open_index(Data(source=source, path=str(root), **counts))


def get_refusal(source, root):
    with pytest.raises(UserError) as error:
        open_data_set(source, root)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("source", "write", "options"), WRITERS)
def test_every_container_holds_the_same_samples_as_an_image_folder(tmp_path, source, write, options):
    splits = open_data_set(source, write(tmp_path / "data", **options), classes=3, train_samples=12, val_samples=6)
    folder = open_data_set("folder", writers.write_folder(tmp_path / "folder"))
    assert splits.classes == writers.CLASSES
    for split in writers.SPLITS:
        ours, theirs, expected = getattr(splits, split), getattr(folder, split), writers.make_samples(split)
        every = range(len(expected))
        assert ours.labels.tolist() == theirs.labels.tolist() == [label for label, _, _ in expected]
        assert ours.labels.dtype == ours.sizes.dtype == np.int32
        assert ours.sizes.tolist() == theirs.sizes.tolist()
        assert [ours.read(i) for i in every] == [data for _, _, data in expected]
        assert np.array_equal(ours.load_pixels(3), theirs.load_pixels(3))
        assert ours.sizes[3].tolist() == list(ours.load_pixels(3).shape[1::-1])
        assert ours.count_encoded_bytes()[every].tolist() == [len(data) for _, _, data in expected]
        assert len(set(map(ours.name, every))) == len(expected)


@pytest.mark.parametrize(("source", "write", "options"), WRITERS)
def test_locate_bytes_returns_where_each_image_is(tmp_path, source, write, options):
    index = open_data_set(source, write(tmp_path / "data", **options)).train
    samples = [7, 0, 7, 11]
    sources, offsets, lengths = index.locate_bytes(samples)
    assert offsets.dtype == lengths.dtype == np.int64
    for sample, source_, offset, length in zip(samples, sources, offsets.tolist(), lengths.tolist(), strict=True):
        if source == "folder":
            assert (source_, offset) == (index.name(sample), 0)
            assert Path(source_).read_bytes() == index.read(sample)
        else:
            assert os.pread(source_, length, offset) == index.read(sample)
    assert len(set(sources)) <= 3
    if source != "folder":
        assert index.locate_bytes(samples)[0] == sources  # opened once
        del index
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(sources[0])


def test_arrays_have_no_bytes_to_locate():
    with pytest.raises(ValueError, match="arrays, not files"):
        open_index(Data()).train.locate_bytes([0])


# --- splits and labels ---------------------------------------------------------------------------------------------


def test_validation_shards_take_precedence_over_test_shards(tmp_path):
    root = writers.write_tfrecord(tmp_path)
    (root / "test-00000-of-00001").write_bytes(b"not read")
    assert len(open_data_set("tfrecord", root).val) == 6
    for shard in root.glob("validation-*"):
        shard.unlink()
    assert get_refusal("tfrecord", root).startswith(f"cannot read {root}/test-00000-of-00001: ")


@pytest.mark.parametrize("source", ["tar", "tfrecord", "parquet"])
def test_refuses_a_folder_without_shards(tmp_path, source):
    assert get_refusal(source, tmp_path).startswith(f"{tmp_path} has no shards for train; it must hold train")
    file = tmp_path / "x"
    file.write_text("")
    assert get_refusal(source, file).startswith(f"{file} is not a folder; data.path must hold train")


def test_distinct_labels_without_a_class_list_are_counted_from_0(tmp_path):
    root = writers.write_tar(tmp_path / "tar", style="cls")
    (root / "classes.txt").unlink()
    assert open_data_set("tar", root).classes == ("0", "1", "2")


@needs_pyarrow
def test_parquet_without_class_names_is_named_by_its_numbers(tmp_path):
    assert open_data_set("parquet", writers.write_parquet(tmp_path / "data", named=False)).classes == ("0", "1", "2")


def test_class_list_sets_the_order_of_class_folders(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    (root / "classes.txt").write_text("dog\ncat\nbee\nant\n")
    splits = open_data_set("tar", root)
    assert splits.classes == ("dog", "cat", "bee", "ant")
    assert splits.train.labels.tolist() == [3] * 4 + [2] * 4 + [1] * 4
    (root / "classes.txt").write_text("dog\ncat\n")
    assert get_refusal("tar", root).startswith(f"class ant is not in {root}/classes.txt;")


def test_refuses_a_label_missing_from_the_class_list(tmp_path):
    root = writers.write_tar(tmp_path / "tar", style="cls")
    (root / "classes.txt").write_text("ant\nbee\n")
    assert get_refusal("tar", root) == f"the train shards of {root} have label 2 but only 2 classes are named"


def test_refuses_a_class_that_is_in_one_split_only(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    (root / "val-001.tar").unlink()
    expected = f"class cat is in the train shards of {root} but not in the val shards of {root}; both need the same"
    assert get_refusal("tar", root).startswith(expected)


def test_refuses_a_mix_of_labels_and_class_folders(tmp_path):
    root = writers.write_tar(tmp_path / "tar", style="cls")
    other = writers.write_tar(tmp_path / "other")
    shutil.copy(other / "train-000.tar", root / "train-002.tar")
    assert "has shards with labels and shards with class folders" in get_refusal("tar", root)
