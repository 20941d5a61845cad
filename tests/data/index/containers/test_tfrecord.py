"""TFRecords: read as TensorFlow's scripts write them; damage is refused in one sentence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import writers
from support.damage import DAMAGE, damaged, refused_or_within

from podscale.data.index.containers import tfrecord
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.recipe import Data


def refusal(tmp_path, content):
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
    assert words in refusal(tmp_path, content)


def test_refuses_a_record_longer_than_its_file(tmp_path):
    length = (2**63).to_bytes(8, "little")
    assert f"a record has {2**63} bytes" in refusal(tmp_path, length + writers.masked(length) + bytes(100))


def test_negative_labels_are_refused(tmp_path):
    root = writers.write_tfrecord(tmp_path)
    for name in ("train-00009-of-00010", "validation-00009-of-00010"):
        content = writers.example({"image/encoded": writers.picture(0), "image/class/label": -1})
        (root / name).write_bytes(writers.record(content))
    with pytest.raises(UserError, match="have label -1; labels count from 0"):
        open_index(Data(source="tfrecord", path=str(root)))


# --- damage --------------------------------------------------------------------------------------------------------

PART = [(i % 3, f"{i}.jpg", bytes(100 + i)) for i in range(4)]
RECORDS = b"".join(writers.record(writers.imagenet_example(*sample)) for sample in PART)


@settings(max_examples=300, deadline=None)
@given(DAMAGE)
def test_damaged_records_are_refused_or_harmless(damage):
    refused_or_within(tfrecord.scan, damaged(RECORDS, damage), "train-00000-of-00001")


@settings(max_examples=300, deadline=None)
@given(DAMAGE, st.binary(max_size=200))
def test_damaged_messages_are_refused_or_harmless(damage, tail):
    message = damaged(writers.imagenet_example(1, "a", b"x" * 40) + tail, damage)
    refused_or_within(tfrecord.scan, writers.record(message), "train-00000-of-00001")
