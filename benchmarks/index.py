"""Claim: a million samples open in milliseconds and take less than 100 MB; a scan costs about a tenth of a millisecond.

Opens a synthetic index of a million samples, and scans the JPEGs below a folder, repeated under many names, as an image
folder, as tars, as TFRecords, and, if pyarrow is installed, as parquet files. The peer for listing tars is Python's own
`tarfile`. Files are written just before and so are in the page cache: the work is measured, not the disk.

    python benchmarks/index.py FOLDER [--images 5000]
"""

import argparse
import io
import statistics
import struct
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from podscale.data.index import catalog
from podscale.data.index.containers import tar, tfrecord
from podscale.data.index.table import Strings, Table, Tables, load_tables, save_tables

MILLION = 10**6
CLASSES = 100
SHARDS = 20
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=5000)
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:300]
    if not paths:
        raise SystemExit(f"no .jpg or .jpeg files below {arguments.folder}")
    encoded = [path.read_bytes() for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        measure_opening(Path(folder) / "index")
        writers = {"folder": write_folder, "tar": write_tar, "tfrecord": write_tfrecord, "parquet": write_parquet}
        for kind, write in writers.items():
            root = Path(folder) / kind
            try:
                for split, count in (("train", arguments.images), ("val", CLASSES)):
                    write(root, split, [encoded[i % len(encoded)] for i in range(count)])
            except ImportError as error:
                print(f"{kind} is skipped: {error}")
                continue
            measure_scan(kind, root, arguments.images + CLASSES)
        shards = sorted((Path(folder) / "tar").glob("train*"))
        for name, list_members in (("tarfile", list_with_tarfile), ("podscale", list_with_podscale)):
            seconds = measure_seconds(lambda list_members=list_members: [list_members(shard) for shard in shards])
            print(f"listing tars, {name}: {1e6 * seconds / arguments.images:.1f} us a member")


def measure_seconds(work: Callable[[], object]) -> float:
    """Return the median seconds of several rounds, after one to warm up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure_opening(path: Path) -> None:
    """Print the size of the index of a million samples, and the time and memory to open it."""

    def make_table(n: int) -> Table:
        rng = np.random.default_rng(0)
        names = Strings.from_names(f"n{i % 1000:08d}_{i}.JPEG" for i in range(n))
        paths = tuple(f"train/n{i:08d}" for i in range(1000))
        numbers = rng.integers(1, 1000, (3, n), np.int32)
        sizes = np.ascontiguousarray(numbers[:2].T)
        return Table(numbers[2], sizes, numbers[2], np.zeros(n, np.int64), numbers[0].astype(np.int64), names, paths)

    save_tables(path, Tables("folder", "", tuple(map(str, range(1000))), make_table(MILLION), make_table(50_000)))
    before = read_memory_use()
    tables = load_tables(path)
    after = read_memory_use()
    assert tables is not None
    print(f"a million samples (and 50,000): {path.stat().st_size / 1e6:.1f} MB on disk")
    print(f"  opened and checked in {1e3 * measure_seconds(lambda: load_tables(path)):.1f} ms")
    for kind in before:
        print(f"  {kind}: {after[kind] - before[kind]:+.1f} MB")


def read_memory_use() -> dict[str, float]:
    """Return this process's private memory, and the memory mapped from files, in MB, as reported by Linux."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    labels = {"RssAnon:": "private memory", "RssFile:": "mapped, shared by all processes"}
    return {labels[line[0]]: int(line[1]) * 1024 / 1e6 for line in lines if line[0] in labels}


def measure_scan(kind: str, root: Path, images: int) -> None:
    """Print the time per image of a scan, and the time to see that an index is up to date."""
    form = catalog.FORMATS[kind]
    finding = measure_seconds(lambda: form.find(root))
    seconds = measure_seconds(lambda: catalog.scan_data_set(kind, form.find(root)))
    print(f"{kind}: {images} images, {1e6 * seconds / images:.0f} us an image; up to date? {1e3 * finding:.1f} ms")


def write_folder(root: Path, split: str, images: list[bytes]) -> None:
    for i, data in enumerate(images):
        path = root / split / f"{i % CLASSES:03}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_tar(root: Path, split: str, images: list[bytes]) -> None:
    root.mkdir(exist_ok=True)
    for shard in range(SHARDS):
        with tarfile.open(root / f"{split}-{shard:03}.tar", "w") as file:
            for i in range(shard, len(images), SHARDS):
                member = tarfile.TarInfo(f"{i % CLASSES:03}/{i}.jpg")
                member.size = len(images[i])
                file.addfile(member, io.BytesIO(images[i]))


def write_tfrecord(root: Path, split: str, images: list[bytes]) -> None:
    """Write records with as many features as TensorFlow's ImageNet scripts write."""
    root.mkdir(exist_ok=True)
    texts = ("colorspace", "format", "filename", "class/synset", "class/text", "object/bbox/label")
    for shard in range(SHARDS):
        with (root / f"{split}-{shard:05}-of-{SHARDS:05}").open("wb") as file:
            for i in range(shard, len(images), SHARDS):
                label = encode_field(3, encode_field(1, bytes([i % CLASSES + 1])))
                entries = [(name, encode_field(1, encode_field(1, b"some text"))) for name in texts]
                entries += [("class/label", label), ("height", label), ("width", label), ("channels", label)]
                entries += [("encoded", encode_field(1, encode_field(1, images[i])))]
                message = encode_field(1, b"".join(encode_entry(f"image/{name}", value) for name, value in entries))
                length = struct.pack("<Q", len(message))
                file.write(length + struct.pack("<I", tfrecord.compute_masked_crc(length)) + message + bytes(4))


def encode_entry(name: str, value: bytes) -> bytes:
    return encode_field(1, encode_field(1, name.encode()) + encode_field(2, value))


def encode_field(number: int, content: bytes) -> bytes:
    """Return a length-delimited protobuf field."""
    length, digits = len(content), bytearray([number << 3 | 2])
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    return bytes(digits) + bytes([length]) + content


def write_parquet(root: Path, split: str, images: list[bytes]) -> None:
    import pyarrow
    from pyarrow import parquet

    root.mkdir(exist_ok=True)
    for shard in range(SHARDS):
        numbers = range(shard, len(images), SHARDS)
        columns = {"image": [{"bytes": images[i]} for i in numbers], "label": [i % CLASSES for i in numbers]}
        path = root / f"{split}-{shard:03}.parquet"
        parquet.write_table(pyarrow.table(columns), path, compression="none", use_dictionary=False)


def list_with_tarfile(path: Path) -> int:
    with tarfile.open(path) as file:
        return sum(member.offset_data for member in file)


def list_with_podscale(path: Path) -> int:
    return int(tar.scan(str(path)).offsets.sum())


if __name__ == "__main__":
    main()
