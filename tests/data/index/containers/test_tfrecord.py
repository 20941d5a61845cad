"""TFRecords: read as TensorFlow's scripts write them; damaged files are refused in one sentence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import writers
from support.damage import DAMAGE, apply_damage, assert_refused_or_within

from podscale.data.index.containers import tfrecord
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.recipe import Data


def get_refusal(tmp_path, content):
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        tfrecord.scan(str(path))
    assert str(path) in str(error.value)
    return str(error.value)


def make_example_class():
    """Return the message class of tf.train.Example, built from a description of it, without TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def add_message(name, *fields, within=file.message_type):
        message = within.add(name=name)
        for number, (field, kind, label, *type_name) in enumerate(fields, 1):
            options = {"type_name": type_name[0]} if type_name else {}
            message.field.add(name=field, number=number, type=kind, label=label, **options)
        return message

    single, repeated, nested = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
    add_message("BytesList", ("value", kinds.TYPE_BYTES, repeated))
    add_message("FloatList", ("value", kinds.TYPE_FLOAT, repeated))
    add_message("Int64List", ("value", kinds.TYPE_INT64, repeated))
    lists = (("bytes", "Bytes"), ("float", "Float"), ("int64", "Int64"))
    add_message("Feature", *((f"{low}_list", nested, single, f".tensorflow.{high}List") for low, high in lists))
    features = add_message("Features", ("feature", nested, repeated, ".tensorflow.Features.FeatureEntry"))
    entry = (("key", kinds.TYPE_STRING, single), ("value", nested, single, ".tensorflow.Feature"))
    add_message("FeatureEntry", *entry, within=features.nested_type).options.map_entry = True
    add_message("Example", ("features", nested, single, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def test_reads_records_written_by_protobuf_and_tensorboard(tmp_path):
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = tmp_path / "train-00000-of-00001"
    images = [writers.make_image(i) for i in range(5)]
    with path.open("wb") as file:
        for i, data in enumerate(images):
            example = make_example_class()()
            feature = example.features.feature
            feature["image/encoded"].bytes_list.value.append(data)
            feature["image/class/label"].int64_list.value.append(300 + i)
            feature["image/class/text"].bytes_list.value.append(f"größe {i}".encode())
            feature["image/object/bbox/xmin"].float_list.value.extend([0.25, 0.5])
            feature["image/height"].int64_list.value.append(-1)
            RecordWriter(file).write(example.SerializeToString())
    samples = tfrecord.scan(str(path))
    content = path.read_bytes()
    ranges = zip(samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    assert [content[offset : offset + length] for offset, length in ranges] == images
    assert samples.labels.tolist() == [300, 301, 302, 303, 304]
    assert samples.label_names == {300 + i: f"größe {i}" for i in range(5)}


FEATURES = {"image/encoded": b"x" * 50, "image/class/label": 4}


def test_class_names_are_the_synset_else_the_text_else_the_number(tmp_path):
    path = tmp_path / "train-00000-of-00001"
    named = FEATURES | {"image/class/text": b"ant", "image/class/synset": b"n0001"}
    textual = FEATURES | {"image/class/text": b"bee", "image/class/label": 5}
    path.write_bytes(
        b"".join(writers.encode_record(writers.encode_example(each)) for each in (named, textual, FEATURES))
    )
    samples = tfrecord.scan(str(path))
    assert samples.label_names == {4: "n0001", 5: "bee"}
    assert samples.labels.tolist() == [4, 5, 4]
    assert samples.lengths.tolist() == [50] * 3


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "holds no records"),
        (b"x" * 11, "past the end"),
        (b"\x1f\x8b" + b"x" * 50, "the checksum of a record's length is wrong"),
        (writers.encode_record(b""), "a record has no image/encoded"),
        (writers.encode_record(writers.encode_example(FEATURES))[:-5], "which is past the end"),
        (writers.encode_record(writers.encode_example(FEATURES)[:-5]), "longer than the record"),
        (
            writers.encode_record(writers.encode_example(FEATURES | {"image/class/label": b"4"})),
            "image/class/label is not a number",
        ),
        (
            writers.encode_record(writers.encode_example(FEATURES | {"image/encoded": 3})),
            "has 0 values of image/encoded",
        ),
        (writers.encode_record(writers.encode_example({"image/encoded": b""})), "a record has no image/class/label"),
        (writers.encode_record(b"\xff" * 20), "a number does not end"),
        (writers.encode_record(b"\x0b\x0b"), "is no tf.train.Example"),
        (
            writers.encode_record(writers.encode_example(FEATURES | {"image/class/text": b"a" * 5000})),
            "name is too long",
        ),
        (writers.encode_record(writers.encode_example(FEATURES | {"image/class/label": -(2**63)})), "is not a number"),
    ],
)
def test_refuses_invalid_records(tmp_path, content, error):
    assert error in get_refusal(tmp_path, content)


def test_refuses_a_record_longer_than_its_file(tmp_path):
    length = (2**63).to_bytes(8, "little")
    assert f"a record has {2**63} bytes" in get_refusal(
        tmp_path, length + writers.encode_masked_crc(length) + bytes(100)
    )


def test_negative_labels_are_refused(tmp_path):
    root = writers.write_tfrecord(tmp_path)
    for name in ("train-00009-of-00010", "validation-00009-of-00010"):
        content = writers.encode_example({"image/encoded": writers.make_image(0), "image/class/label": -1})
        (root / name).write_bytes(writers.encode_record(content))
    with pytest.raises(UserError, match="have label -1; labels count from 0"):
        open_index(Data(source="tfrecord", path=str(root)))


# --- damage --------------------------------------------------------------------------------------------------------

SAMPLES = [(i % 3, f"{i}.jpg", bytes(100 + i)) for i in range(4)]
RECORDS = b"".join(writers.encode_record(writers.encode_imagenet_example(*sample)) for sample in SAMPLES)


@settings(max_examples=300, deadline=None)
@given(DAMAGE)
def test_damaged_records_are_refused_or_harmless(damage):
    assert_refused_or_within(tfrecord.scan, apply_damage(RECORDS, damage), "train-00000-of-00001")


@settings(max_examples=300, deadline=None)
@given(DAMAGE, st.binary(max_size=200))
def test_damaged_messages_are_refused_or_harmless(damage, tail):
    message = apply_damage(writers.encode_imagenet_example(1, "a", b"x" * 40) + tail, damage)
    assert_refused_or_within(tfrecord.scan, writers.encode_record(message), "train-00000-of-00001")
