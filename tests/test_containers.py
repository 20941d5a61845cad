"""Data sets in tars, TFRecords and parquet files are those of a folder; damage is refused in one sentence."""

import functools
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
import writers
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.data.containers import Reader, parquet, tar, tfrecord
from podscale.data.index import open_index
from podscale.errors import UserError
from podscale.recipe import Data

needs_pyarrow = pytest.mark.skipif(writers.pyarrow is None, reason="pyarrow is not installed")

WAYS = [
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


def opened(source, root, **numbers):
    return open_index(Data(source=source, path=str(root), **numbers))


def refusal(source, root):
    with pytest.raises(UserError) as error:
        opened(source, root)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("source", "write", "options"), WAYS)
def test_every_container_holds_the_samples_of_the_folder(tmp_path, source, write, options):
    splits = opened(source, write(tmp_path / "data", **options), classes=3, train_samples=12, val_samples=6)
    folder = opened("folder", writers.write_folder(tmp_path / "folder"))
    assert splits.classes == writers.CLASSES
    for split in writers.SPLITS:
        ours, theirs, expected = getattr(splits, split), getattr(folder, split), writers.samples(split)
        every = range(len(expected))
        assert ours.labels.tolist() == theirs.labels.tolist() == [label for label, _, _ in expected]
        assert ours.labels.dtype == ours.sizes.dtype == np.int32
        assert ours.sizes.tolist() == theirs.sizes.tolist()
        assert [ours.read(i) for i in every] == [data for _, _, data in expected]
        assert np.array_equal(ours.pixels(3), theirs.pixels(3))
        assert ours.sizes[3].tolist() == list(ours.pixels(3).shape[1::-1])
        assert ours.bytes_of(every).tolist() == [len(data) for _, _, data in expected]
        assert len(set(map(ours.name, every))) == len(expected)


@pytest.mark.parametrize(("source", "write", "options"), WAYS)
def test_sources_say_where_the_bytes_are(tmp_path, source, write, options):
    index = opened(source, write(tmp_path / "data", **options)).train
    chosen = [7, 0, 7, 11]
    sources, offsets, lengths = index.sources(chosen)
    assert offsets.dtype == lengths.dtype == np.int64
    for sample, source_, offset, length in zip(chosen, sources, offsets.tolist(), lengths.tolist(), strict=True):
        if source == "folder":
            assert (source_, offset) == (index.name(sample), 0)
            assert Path(source_).read_bytes() == index.read(sample)
        else:
            assert os.pread(source_, length, offset) == index.read(sample)
    assert len(set(sources)) <= 3
    if source != "folder":
        assert index.sources(chosen)[0] == sources  # opened once
        del index
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(sources[0])


def test_arrays_have_no_sources():
    with pytest.raises(ValueError, match="arrays, not files"):
        open_index(Data()).train.sources([0])


# --- splits and labels ---------------------------------------------------------------------------------------------


def test_validation_is_preferred_to_test(tmp_path):
    root = writers.write_tfrecord(tmp_path)
    (root / "test-00000-of-00001").write_bytes(b"not looked at")
    assert len(opened("tfrecord", root).val) == 6
    for shard in root.glob("validation-*"):
        shard.unlink()
    assert refusal("tfrecord", root).startswith(f"cannot read {root}/test-00000-of-00001: ")


@pytest.mark.parametrize("source", ["tar", "tfrecord", "parquet"])
def test_refuses_a_folder_without_shards(tmp_path, source):
    assert refusal(source, tmp_path).startswith(f"{tmp_path} has no shards for train; it must hold train")
    file = tmp_path / "x"
    file.write_text("")
    assert refusal(source, file).startswith(f"{file} is not a folder; data.path must hold train")


def test_numbers_without_a_list_of_classes_are_counted_from_0(tmp_path):
    root = writers.write_tar(tmp_path / "tar", style="cls")
    (root / "classes.txt").unlink()
    assert opened("tar", root).classes == ("0", "1", "2")


@needs_pyarrow
def test_parquet_without_class_names_has_numbers(tmp_path):
    assert opened("parquet", writers.write_parquet(tmp_path / "data", named=False)).classes == ("0", "1", "2")


def test_a_list_of_classes_orders_the_class_folders(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    (root / "classes.txt").write_text("dog\ncat\nbee\nant\n")
    splits = opened("tar", root)
    assert splits.classes == ("dog", "cat", "bee", "ant")
    assert splits.train.labels.tolist() == [3] * 4 + [2] * 4 + [1] * 4
    (root / "classes.txt").write_text("dog\ncat\n")
    assert refusal("tar", root).startswith(f"class ant is not in {root}/classes.txt;")


def test_refuses_a_label_that_the_list_of_classes_lacks(tmp_path):
    root = writers.write_tar(tmp_path / "tar", style="cls")
    (root / "classes.txt").write_text("ant\nbee\n")
    assert refusal("tar", root) == f"the train shards of {root} have label 2 but only 2 classes are named"


def test_refuses_classes_of_one_split_only(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    (root / "val-001.tar").unlink()
    expected = f"class cat is in the train shards of {root} but not in the val shards of {root}; both need the same"
    assert refusal("tar", root).startswith(expected)


def test_refuses_labels_and_class_folders_at_once(tmp_path):
    root = writers.write_tar(tmp_path / "tar", style="cls")
    other = writers.write_tar(tmp_path / "other")
    shutil.copy(other / "train-000.tar", root / "train-002.tar")
    assert "has shards with labels and shards with class folders" in refusal("tar", root)


# --- tar -----------------------------------------------------------------------------------------------------------


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


def tar_refusal(path):
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
    assert f"the member {name} is a link or a device" in tar_refusal(path)


@pytest.mark.parametrize("name", ["/cat/a.jpg", "../cat/a.jpg", "cat/../../a.jpg", "/a.cls"])
def test_refuses_names_that_lead_out_of_the_archive(tmp_path, name):
    path = one_tar(tmp_path / "a.tar", (name, b"a"))
    assert f"the member {name!r} has a name that leads out of the archive" in tar_refusal(path)


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
    assert words in tar_refusal(one_tar(tmp_path / "a.tar", *files))


def test_refuses_a_length_past_the_end(tmp_path):
    path = Path(one_tar(tmp_path / "a.tar", ("cat/a.jpg", b"a" * 5000)))
    whole = path.read_bytes()
    for length in (513, 3000, 5511):
        path.write_bytes(whole[:length])
        assert "the member cat/a.jpg has 5000 bytes, which is past the end" in tar_refusal(path)
    path.write_bytes(whole[:5512])
    assert len(tar.scan(str(path)).labels) == 1


def test_numbers_of_more_than_8_gib_are_read_and_refused(tmp_path):
    member = tarfile.TarInfo("cat/a.jpg")
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        member.size = 2**40
        path = tmp_path / "a.tar"
        path.write_bytes(member.tobuf(form) + bytes(1024))
        assert f"has {2**40} bytes, which is past the end" in tar_refusal(path)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar"])
def test_refuses_compressed_shards(tmp_path, name):
    path = tmp_path / name
    with tarfile.open(path, "w:gz") as archive:
        writers.add(archive, "cat/a.jpg", np.random.default_rng(0).bytes(2000))
    assert "compressed" in tar_refusal(path) if name == "a.tar" else "is compressed;" in tar_refusal(str(path))


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 2000])
def test_refuses_what_is_no_tar(tmp_path, content):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    assert f"cannot read {path}: " in tar_refusal(path)


def test_pictures_in_shards_are_named_when_they_are_none(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    one_tar(root / "train-002.tar", ("cat/bad.jpg", b"GIF89a"))
    sentence = refusal("tar", root)
    assert sentence.startswith(f"cannot read {root}/train-002.tar/cat/bad.jpg: it is neither JPEG")


def test_a_shard_that_becomes_shorter_is_noticed(tmp_path):
    root = writers.write_tar(tmp_path / "tar")
    index = opened("tar", root).train
    shard = root / "train-000.tar"
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(UserError, match=f"{shard} is shorter than when it was indexed"):
        [index.read(i) for i in range(6)]


# --- tfrecord ------------------------------------------------------------------------------------------------------


def record_refusal(tmp_path, content):
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        tfrecord.scan(str(path))
    assert str(path) in str(error.value)
    return str(error.value)


def protobuf_example():
    """The message class of tf.train.Example, from a description of it: there is no TensorFlow here."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name, *fields, within=file.message_type):
        made = within.add(name=name)
        for number, (field, kind, label, *type_name) in enumerate(fields, 1):
            options = {"type_name": type_name[0]} if type_name else {}
            made.field.add(name=field, number=number, type=kind, label=label, **options)
        return made

    one, many, inner = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
    message("BytesList", ("value", kinds.TYPE_BYTES, many))
    message("FloatList", ("value", kinds.TYPE_FLOAT, many))
    message("Int64List", ("value", kinds.TYPE_INT64, many))
    lists = (("bytes", "Bytes"), ("float", "Float"), ("int64", "Int64"))
    message("Feature", *((f"{low}_list", inner, one, f".tensorflow.{high}List") for low, high in lists))
    features = message("Features", ("feature", inner, many, ".tensorflow.Features.FeatureEntry"))
    entry = (("key", kinds.TYPE_STRING, one), ("value", inner, one, ".tensorflow.Feature"))
    message("FeatureEntry", *entry, within=features.nested_type).options.map_entry = True
    message("Example", ("features", inner, one, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def test_reads_what_protobuf_and_tensorboard_write(tmp_path):
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = tmp_path / "train-00000-of-00001"
    pictures = [writers.picture(i) for i in range(5)]
    with path.open("wb") as file:
        for i, data in enumerate(pictures):
            example = protobuf_example()()
            feature = example.features.feature
            feature["image/encoded"].bytes_list.value.append(data)
            feature["image/class/label"].int64_list.value.append(300 + i)
            feature["image/class/text"].bytes_list.value.append(f"größe {i}".encode())
            feature["image/object/bbox/xmin"].float_list.value.extend([0.25, 0.5])
            feature["image/height"].int64_list.value.append(-1)
            RecordWriter(file).write(example.SerializeToString())
    part = tfrecord.scan(str(path))
    content = path.read_bytes()
    ranges = zip(part.offsets.tolist(), part.lengths.tolist(), strict=True)
    assert [content[offset : offset + length] for offset, length in ranges] == pictures
    assert part.labels.tolist() == [300, 301, 302, 303, 304]
    assert part.texts == {300 + i: f"größe {i}" for i in range(5)}


WHOLE = {"image/encoded": b"x" * 50, "image/class/label": 4}


def test_class_names_come_from_synset_then_text_then_the_number(tmp_path):
    path = tmp_path / "train-00000-of-00001"
    named = WHOLE | {"image/class/text": b"ant", "image/class/synset": b"n0001"}
    textual = WHOLE | {"image/class/text": b"bee", "image/class/label": 5}
    path.write_bytes(b"".join(writers.record(writers.example(each)) for each in (named, textual, WHOLE)))
    part = tfrecord.scan(str(path))
    assert part.texts == {4: "n0001", 5: "bee"}
    assert part.labels.tolist() == [4, 5, 4]
    assert part.lengths.tolist() == [50] * 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no records"),
        (b"x" * 11, "past the end"),
        (b"\x1f\x8b" + b"x" * 50, "the checksum of a record's length is wrong"),
        (writers.record(b""), "a record has no image/encoded"),
        (writers.record(writers.example(WHOLE))[:-5], "which is past the end"),
        (writers.record(writers.example(WHOLE)[:-5]), "longer than the record"),
        (writers.record(writers.example(WHOLE | {"image/class/label": b"4"})), "image/class/label is no number"),
        (writers.record(writers.example(WHOLE | {"image/encoded": 3})), "has 0 values of image/encoded"),
        (writers.record(writers.example({"image/encoded": b""})), "a record has no image/class/label"),
        (writers.record(b"\xff" * 20), "a number does not end"),
        (writers.record(b"\x0b\x0b"), "is no tf.train.Example"),
        (writers.record(writers.example(WHOLE | {"image/class/text": b"a" * 5000})), "name is too long"),
        (writers.record(writers.example(WHOLE | {"image/class/label": -(2**63)})), "is no number"),
    ],
)
def test_refuses_records_that_make_no_sense(tmp_path, content, words):
    assert words in record_refusal(tmp_path, content)


def test_refuses_a_record_longer_than_its_file(tmp_path):
    length = (2**63).to_bytes(8, "little")
    assert f"a record has {2**63} bytes" in record_refusal(tmp_path, length + writers.masked(length) + bytes(100))


def test_negative_labels_are_refused(tmp_path):
    root = writers.write_tfrecord(tmp_path)
    for name in ("train-00009-of-00010", "validation-00009-of-00010"):
        content = writers.example({"image/encoded": writers.picture(0), "image/class/label": -1})
        (root / name).write_bytes(writers.record(content))
    assert "have label -1; labels count from 0" in refusal("tfrecord", root)


# --- parquet -------------------------------------------------------------------------------------------------------


@needs_pyarrow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "snappy"}, "compresses its column of pictures (SNAPPY)"),
        ({"use_dictionary": True}, "keeps pictures in a dictionary"),
        ({"use_dictionary": False, "column_encoding": {"image.bytes": "DELTA_BYTE_ARRAY"}}, "encodes its column"),
    ],
)
def test_says_how_to_rewrite_parquet_that_cannot_be_read_in_place(tmp_path, options, words):
    root = writers.write_parquet(tmp_path / "data", **options)
    sentence = refusal("parquet", root)
    assert words in sentence
    _, command = sentence.split("rewrite it: ")
    names = {"pyarrow": writers.pyarrow}
    for file in root.glob("*.parquet"):
        exec(command, names | {"FILE": str(file), "NEW": f"{file}.new"})
        Path(f"{file}.new").replace(file)
    assert opened("parquet", root).classes == writers.CLASSES


@needs_pyarrow
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_refuses_rows_without_a_picture(tmp_path, version):
    table = writers.parquet_table([(0, "a", b"1"), (1, "b", None), (1, "c", b"3")])
    path = str(tmp_path / "train.parquet")
    writers.parquet.write_table(table, path, compression="none", use_dictionary=False, data_page_version=version)
    with pytest.raises(UserError, match="has rows without a picture; remove them"):
        parquet.scan(path)


@needs_pyarrow
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"image": [b"1"]}, "has no column label; its columns are image"),
        ({"picture": [b"1"], "label": [0]}, "has no column image with the bytes of pictures; its columns are label"),
        ({"image": [[b"1"]], "label": [0]}, "has no column image with the bytes"),
        ({"image": [7], "label": [0]}, "has no single picture a row"),
        ({"image": [b"1"], "label": ["cat"]}, "has labels of type string"),
        ({"image": [b"1"], "label": [None]}, "has labels of type"),
    ],
)
def test_refuses_parquet_without_pictures_or_labels(tmp_path, columns, words):
    path = str(tmp_path / "train.parquet")
    writers.parquet.write_table(writers.pyarrow.table(columns), path, compression="none", use_dictionary=False)
    with pytest.raises(UserError) as error:
        parquet.scan(path)
    assert words in str(error.value)


@needs_pyarrow
def test_refuses_what_is_no_parquet(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(UserError, match=f"cannot read {path}: "):
        parquet.scan(str(path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).write_bytes(b"")
    assert refusal("parquet", tmp_path) == "parquet files need pyarrow; install it: pip install 'podscale[parquet]'"


def test_packed_and_repeated_levels_are_told_apart(tmp_path):
    def there(levels, n, level):
        path = tmp_path / "levels"
        path.write_bytes(levels)
        with Reader(str(path)) as reader:
            return parquet._all_there(reader, 0, len(levels), n, level)

    assert there(b"\x14\x01", 10, 1)
    assert not there(b"\x14\x00", 10, 1)
    assert there(b"\x05\xff\x03", 10, 1)  # two packed groups of eight, ten of them used
    assert not there(b"\x05\xff\x01", 10, 1)
    assert not there(b"\x05\xfe\x03", 10, 1)
    assert there(b"\x03\xaa\xaa\x04\x02", 10, 2)  # two bits a level: eight packed, two repeated
    assert not there(b"\x03\xaa\xa9\x04\x02", 10, 2)
    with pytest.raises(UserError, match="past the end"):
        there(b"\x05\xff", 10, 1)


# --- damage --------------------------------------------------------------------------------------------------------


@functools.cache
def _whole(source):
    """One whole shard of a kind."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if source == "tar":
            name = f"cat/{'long' * 40}.jpg"
            files = [("a.jpg", b"a" * 700), ("a.cls", b"1"), ("b.jpg", b"b"), ("b.json", b'{"label": 2}'), (name, b"c")]
            return Path(one_tar(root / "a.tar", *files, form=tarfile.PAX_FORMAT)).read_bytes()[:7000]
        if source == "tfrecord":
            part = [(i % 3, f"{i}.jpg", bytes(100 + i)) for i in range(4)]
            return b"".join(writers.record(writers.imagenet_example(*sample)) for sample in part)
        write = functools.partial(writers.write_parquet, data_page_version="2.0", compression="none")
        return (write(root / "data", use_dictionary=False) / "train-00000.parquet").read_bytes()


edits = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6)


def mutated(source, changes, cut, inserted):
    data = bytearray(_whole(source))
    for at, value in changes:
        data[at % len(data)] = value
    if cut is not None:
        at = cut % len(data)
        data[at : at + len(inserted) // 2] = inserted
    return bytes(data)


def checked(scan, data, name):
    """Scans; a sample that is found must be inside of the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            part = scan(str(path))
        except UserError:
            return
        assert len(part.offsets) == len(part.lengths) == len(part.labels) > 0
        assert part.offsets.min() >= 0
        assert part.lengths.min() >= 0
        assert (part.offsets + part.lengths).max() <= len(data)
        if part.words:
            assert 0 <= part.labels.min() <= part.labels.max() < len(part.words)


def resealed(data):
    """A tar whose header sums are made right again, so that what is damaged in them is read."""
    data = bytearray(data)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(edits, st.none() | st.integers(0, 7000), st.binary(max_size=30), st.booleans())
def test_damaged_tars_are_refused_or_harmless(changes, cut, inserted, reseal):
    data = mutated("tar", changes, cut, inserted)
    checked(tar.scan, resealed(data) if reseal else data, "train.tar")


@settings(max_examples=300, deadline=None)
@given(edits, st.none() | st.integers(0, 7000), st.binary(max_size=30))
def test_damaged_records_are_refused_or_harmless(changes, cut, inserted):
    checked(tfrecord.scan, mutated("tfrecord", changes, cut, inserted), "train-00000-of-00001")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), edits)
def test_damaged_messages_are_refused_or_harmless(tail, changes):
    message = bytearray(writers.imagenet_example(1, "a", b"x" * 40) + tail)
    for at, value in changes:
        message[at % len(message)] = value
    checked(tfrecord.scan, writers.record(bytes(message)), "train-00000-of-00001")


@needs_pyarrow
@settings(max_examples=150, deadline=None)
@given(edits, st.none() | st.integers(0, 7000), st.binary(max_size=30))
def test_damaged_parquet_is_refused_or_harmless(changes, cut, inserted):
    checked(parquet.scan, mutated("parquet", changes, cut, inserted), "train.parquet")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 100), st.integers(0, 3))
def test_any_bytes_are_pages_within_bounds_or_refused(data, end, count, level):
    header = bytes.fromhex("15001580011580012c15041500150615061c00000000")  # a data page's, of two values
    data = header * (len(data) % 2) + data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pages"
        path.write_bytes(data)
        with Reader(str(path)) as reader:
            try:
                found = list(parquet.values(reader, 0, end, count, level))
            except UserError:
                return
    assert len(found) == count
    assert all(0 <= offset <= offset + length <= min(end, len(data)) for offset, length in found)
