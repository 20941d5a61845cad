"""Writers of the containers that podscale reads. None of them shares code with podscale."""

import io
import itertools
import json
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    pyarrow = None

CLASSES = ("ant", "bee", "cat")
SPLITS = ("train", "val")


def make_image(seed, extension="jpg", **options):
    """Return an encoded image of random pixels and random size."""
    rng = np.random.default_rng(seed)
    width, height = (int(side) for side in rng.integers(5, 40, 2))
    file = io.BytesIO()
    kind = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[extension]
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file, kind, **options)
    return file.getvalue()


def make_rotated_image(seed):
    """Return a JPEG whose EXIF orientation turns it by 90 degrees."""
    exif = Image.Exif()
    exif[274] = 6
    return make_image(seed, exif=exif)


def make_samples(split, per_class=4):
    """Return (label, name, bytes) of a split's samples, in the order of an image folder."""
    samples = []
    for label in range(len(CLASSES)):
        for i in range(per_class if split == "train" else 2):
            seed = 1000 * (split == "val") + 100 * label + i
            extension = ("jpg", "png", "webp")[i % 3]
            samples.append(
                (label, f"{i:02}.{extension}", make_rotated_image(seed) if i == 3 else make_image(seed, extension))
            )
    return samples


def backdate(path):
    """Backdate everything below a folder: the index of data that has just changed is not stored."""
    for entry in [path, *Path(path).rglob("*")]:
        os.utime(entry, (1_600_000_000, 1_600_000_000))


def split_evenly(items, shards=2):
    """Split items into consecutive parts of about equal length."""
    edges = np.linspace(0, len(items), shards + 1).astype(int)
    return [items[start:stop] for start, stop in itertools.pairwise(edges)]


# --- image folder --------------------------------------------------------------------------------------------------


def write_folder(root):
    for split in SPLITS:
        for label, name, data in make_samples(split):
            path = root / split / CLASSES[label] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return root


# --- tar -----------------------------------------------------------------------------------------------------------


def add_member(tar, name, data, **attributes):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in attributes.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(data))


def write_tar(root, style="folders", form=tarfile.GNU_FORMAT, name="{split}-{shard:03}.tar"):
    """Write shards whose labels are folders, .cls or .json members."""
    root.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        for shard, part in enumerate(split_evenly(make_samples(split))):
            path = root / name.format(split=split, shard=shard)
            path.parent.mkdir(exist_ok=True)
            with tarfile.open(path, "w", format=form) as tar:
                for label, file, data in part:
                    key, extension = f"{CLASSES[label]}/{file}".split(".")
                    if style == "folders":
                        add_member(tar, f"{key}.{extension}", data)
                        continue
                    key = key.replace("/", "-")
                    add_member(tar, f"{key}.{extension}", data)
                    add_member(tar, f"{key}.seg.png", b"not an image")
                    if style == "cls":
                        add_member(tar, f"{key}.cls", str(label).encode())
                    else:
                        add_member(tar, f"{key}.json", json.dumps({"label": label, "from": "a test"}).encode())
    if style != "folders":
        (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


# --- tfrecord ------------------------------------------------------------------------------------------------------


def compute_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 * (crc & 1))
    return crc ^ 0xFFFFFFFF


def encode_masked_crc(data):
    crc = compute_crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def encode_varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number % 128 + 128]), number // 128
    return out + bytes([number])


def encode_field(number, content):
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


def encode_feature(value, packed=True):
    if isinstance(value, bytes):
        return encode_field(1, encode_field(1, value))
    number = encode_varint(value % 2**64)
    return encode_field(3, encode_field(1, number) if packed else encode_varint(1 << 3) + number)


def encode_example(features, packed=True):
    entries = (
        encode_field(1, key.encode()) + encode_field(2, encode_feature(value, packed))
        for key, value in features.items()
    )
    return encode_field(1, b"".join(encode_field(1, entry) for entry in entries))


def encode_record(message):
    length = struct.pack("<Q", len(message))
    return length + encode_masked_crc(length) + message + struct.pack("<I", 0)


def encode_imagenet_example(label, name, data, **options):
    return encode_example(
        {
            "image/height": 7,
            "image/colorspace": b"RGB",
            "image/class/label": label + 1,
            "image/class/synset": CLASSES[label].encode(),
            "image/encoded": data,
            "image/class/text": b"something, or other",
            "image/filename": name.encode(),
        },
        **options,
    )


def write_tfrecord(root, folders=False, packed=True):
    for split, prefix in zip(SPLITS, ("train", "validation"), strict=True):
        for shard, part in enumerate(split_evenly(make_samples(split))):
            path = root / (prefix if folders else ".") / f"{prefix}-{shard:05}-of-00002"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                b"".join(encode_record(encode_imagenet_example(*sample, packed=packed)) for sample in part)
            )
    return root


# --- parquet -------------------------------------------------------------------------------------------------------


def make_parquet_table(part, plain=False, named=True):
    images = [data if plain else {"bytes": data, "path": name} for _, name, data in part]
    kind = pyarrow.binary() if plain else pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    table = pyarrow.table(
        {
            "image": pyarrow.array(images, kind),
            "label": pyarrow.array([label for label, _, _ in part], pyarrow.int64()),
        }
    )
    features = {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    metadata = json.dumps({"info": {"features": features}})
    return table.replace_schema_metadata({"huggingface": metadata} if named else None)


def write_parquet(root, plain=False, named=True, **options):
    root.mkdir(parents=True, exist_ok=True)
    options = {"compression": {"label": "snappy"}, "use_dictionary": ["label"], "row_group_size": 3} | options
    for split, prefix in zip(SPLITS, ("train", "validation"), strict=True):
        for shard, part in enumerate(split_evenly(make_samples(split))):
            parquet.write_table(
                make_parquet_table(part, plain, named), root / f"{prefix}-{shard:05}.parquet", **options
            )
    return root
