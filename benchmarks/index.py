"""Claim: a million samples open in milliseconds and take less than 100 MB; a scan costs about a tenth of a millisecond.

Opens a made-up index of a million samples, and scans the JPEGs below a folder, repeated under many names, as an image
folder, as tars, as TFRecords, and as parquet files where pyarrow is installed. The peer for listing tars is Python's
own `tarfile`. Files are written just before and so are in the page cache: what is measured is the work, not the disk.

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
from podscale.data.index.table import Strings, Table, Tables, load, save

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
    pictures = [path.read_bytes() for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        open_a_million(Path(folder) / "index")
        writers = {"folder": write_folder, "tar": write_tar, "tfrecord": write_tfrecord, "parquet": write_parquet}
        for kind, write in writers.items():
            root = Path(folder) / kind
            try:
                for split, images in (("train", arguments.images), ("val", CLASSES)):
                    write(root, split, [pictures[i % len(pictures)] for i in range(images)])
            except ImportError as error:
                print(f"{kind} is left out: {error}")
                continue
            scan(kind, root, arguments.images + CLASSES)
        shards = sorted((Path(folder) / "tar").glob("train*"))
        for name, members in (("tarfile", by_tarfile), ("podscale", by_podscale)):
            seconds = timed(lambda members=members: [members(shard) for shard in shards])
            print(f"listing tars, {name}: {1e6 * seconds / arguments.images:.1f} us a member")


def timed(work: Callable[[], object]) -> float:
    """Median seconds, after one round to warm up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def open_a_million(path: Path) -> None:
    def table(n: int) -> Table:
        rng = np.random.default_rng(0)
        names = Strings.of(f"n{i % 1000:08d}_{i}.JPEG" for i in range(n))
        places = tuple(f"train/n{i:08d}" for i in range(1000))
        numbers = rng.integers(1, 1000, (3, n), np.int32)
        sizes = np.ascontiguousarray(numbers[:2].T)
        return Table(numbers[2], sizes, numbers[2], np.zeros(n, np.int64), numbers[0].astype(np.int64), names, places)

    save(path, Tables("folder", "", tuple(map(str, range(1000))), table(MILLION), table(50_000)))
    before = memory()
    found = load(path)
    after = memory()
    assert found is not None
    print(f"a million samples (and 50,000): {path.stat().st_size / 1e6:.1f} MB on disk")
    print(f"  opened and checked in {1e3 * timed(lambda: load(path)):.1f} ms")
    for kind in before:
        print(f"  {kind}: {after[kind] - before[kind]:+.1f} MB")


def memory() -> dict[str, float]:
    """Memory of this process alone, and mapped from files, in MB; as Linux tells."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    words = {"RssAnon:": "private memory", "RssFile:": "mapped, shared by all processes"}
    return {words[line[0]]: int(line[1]) * 1024 / 1e6 for line in lines if line[0] in words}


def scan(kind: str, root: Path, images: int) -> None:
    form = catalog.FORMATS[kind]
    finding = timed(lambda: form.find(root))
    seconds = timed(lambda: catalog.scan(kind, form.find(root)))
    print(f"{kind}: {images} pictures, {1e6 * seconds / images:.0f} us a picture; up to date? {1e3 * finding:.1f} ms")


def write_folder(root: Path, split: str, pictures: list[bytes]) -> None:
    for i, data in enumerate(pictures):
        path = root / split / f"{i % CLASSES:03}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_tar(root: Path, split: str, pictures: list[bytes]) -> None:
    root.mkdir(exist_ok=True)
    for shard in range(SHARDS):
        with tarfile.open(root / f"{split}-{shard:03}.tar", "w") as file:
            for i in range(shard, len(pictures), SHARDS):
                member = tarfile.TarInfo(f"{i % CLASSES:03}/{i}.jpg")
                member.size = len(pictures[i])
                file.addfile(member, io.BytesIO(pictures[i]))


def write_tfrecord(root: Path, split: str, pictures: list[bytes]) -> None:
    """With as many features as TensorFlow's ImageNet scripts write."""
    root.mkdir(exist_ok=True)
    texts = ("colorspace", "format", "filename", "class/synset", "class/text", "object/bbox/label")
    for shard in range(SHARDS):
        with (root / f"{split}-{shard:05}-of-{SHARDS:05}").open("wb") as file:
            for i in range(shard, len(pictures), SHARDS):
                label = field(3, field(1, bytes([i % CLASSES + 1])))
                entries = [(name, field(1, field(1, b"some text"))) for name in texts]
                entries += [("class/label", label), ("height", label), ("width", label), ("channels", label)]
                entries += [("encoded", field(1, field(1, pictures[i])))]
                message = field(1, b"".join(entry(f"image/{name}", value) for name, value in entries))
                length = struct.pack("<Q", len(message))
                file.write(length + struct.pack("<I", tfrecord.masked_crc(length)) + message + bytes(4))


def entry(name: str, value: bytes) -> bytes:
    return field(1, field(1, name.encode()) + field(2, value))


def field(number: int, content: bytes) -> bytes:
    """A protobuf field with a length."""
    length, digits = len(content), bytearray([number << 3 | 2])
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    return bytes(digits) + bytes([length]) + content


def write_parquet(root: Path, split: str, pictures: list[bytes]) -> None:
    import pyarrow
    from pyarrow import parquet

    root.mkdir(exist_ok=True)
    for shard in range(SHARDS):
        chosen = range(shard, len(pictures), SHARDS)
        columns = {"image": [{"bytes": pictures[i]} for i in chosen], "label": [i % CLASSES for i in chosen]}
        path = root / f"{split}-{shard:03}.parquet"
        parquet.write_table(pyarrow.table(columns), path, compression="none", use_dictionary=False)


def by_tarfile(path: Path) -> int:
    with tarfile.open(path) as file:
        return sum(member.offset_data for member in file)


def by_podscale(path: Path) -> int:
    return int(tar.scan(str(path)).offsets.sum())


if __name__ == "__main__":
    main()
