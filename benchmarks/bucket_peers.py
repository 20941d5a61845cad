"""The peers of `bucket.py`, each as its manual recommends, in one process and one thread.

    PYTHON benchmarks/bucket_peers.py write KIND TARS FOLDER     the same images in the peer's own format
    PYTHON benchmarks/bucket_peers.py read KIND ADDRESS CACHE    two passes over a server; prints JSON

PYTHON is an interpreter with `webdataset litdata obstore mosaicml-streaming torchvision` from PyPI. It needs no
Podscale and no JAX. A peer keeps what it has fetched in CACHE, so that its second pass reads local files, too.

Images are decoded by torchvision (libjpeg-turbo) to uint8, and cropped by `v2.RandomResizedCrop` with antialiasing.
With --decoder FILE, Podscale's native decoder (`podscale/data/_native.abi3.so`) does both, as it does in Podscale's
own loader: what is left to compare is how samples get from the server to the decoder.
"""

import argparse
import importlib.util
import json
import math
import os
import random
import resource
import struct
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

SIZE, BATCH, PASSES = 224, 128, 2
MAX_IMAGE_BYTES = 2**30
CHUNK_BYTES = 2**26  # of a file in a peer's own format: what MosaicML Streaming and LitData recommend
# The server checks no signature, but clients of S3 want to make one.
S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
Crop = Callable[[list[bytes]], Any]  # encoded images to uint8 pixels of SIZE x SIZE


class Clock:
    """Wall time, and CPU time of this process and of those that it has started and that have ended."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self._read_cpu()

    def read(self, images: int) -> dict[str, float]:
        wall, cpu = time.perf_counter() - self._wall, self._read_cpu() - self._cpu
        return {"images_per_s": images / wall, "cpu_ms": 1000 * cpu / images}

    @staticmethod
    def _read_cpu() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# --- decoding ---------------------------------------------------------------------------------------------------------


def make_torchvision_crop() -> Crop:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    transform = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])

    def crop(encoded: list[bytes]) -> Any:
        tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in encoded]
        return torch.stack([transform(decode_jpeg(tensor, ImageReadMode.RGB)) for tensor in tensors])

    return crop


def make_native_crop(library: str) -> Crop:
    import numpy as np

    spec = importlib.util.spec_from_file_location("_native", library)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)

    def crop(encoded: list[bytes]) -> Any:
        out = np.empty((len(encoded), SIZE, SIZE, 3), np.uint8)
        boxes = np.array([draw_box(*read_size(data)) for data in encoded], np.float64)
        flips = np.array([random.random() < 0.5 for _ in encoded])
        offsets, lengths = np.zeros(len(encoded), np.int64), np.array([len(data) for data in encoded], np.int64)
        rejected = native.crop(
            [memoryview(data) for data in encoded], offsets, lengths, boxes, flips, SIZE, out, 1, MAX_IMAGE_BYTES
        )
        assert not rejected
        return out

    return crop


def read_size(jpeg: bytes) -> tuple[int, int]:
    """Return width and height, by the first frame header."""
    at = 2
    while True:
        marker, length = struct.unpack(">HH", jpeg[at : at + 4])
        if 0xFFC0 <= marker <= 0xFFCF and marker not in (0xFFC4, 0xFFC8, 0xFFCC):
            height, width = struct.unpack(">HH", jpeg[at + 5 : at + 9])
            return width, height
        at += 2 + length


def draw_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Draw left, top, right, bottom as torchvision does: 8 to 100 % of the area, sides 3:4 to 4:3."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, (width + side) // 2, (height + side) // 2


# --- the peers' own formats ------------------------------------------------------------------------------------------


def iterate_images(tars: Path) -> Iterator[bytes]:
    for path in sorted(tars.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                yield file.read()


def write_mds(tars: Path, folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=CHUNK_BYTES) as writer:
        for i, data in enumerate(iterate_images(tars)):
            writer.write({"image": data, "label": i % 2})


def read_tar_for_litdata(path: str) -> Iterator[dict[str, Any]]:
    with tarfile.open(path) as tar:
        for i, member in enumerate(tar):
            file = tar.extractfile(member)
            assert file is not None
            yield {"image": file.read(), "label": i % 2}


def write_litdata(tars: Path, folder: Path) -> None:
    import litdata

    paths = sorted(map(str, tars.glob("train-*.tar")))
    litdata.optimize(read_tar_for_litdata, paths, output_dir=str(folder), chunk_bytes=CHUNK_BYTES, num_workers=1)


# --- reading ---------------------------------------------------------------------------------------------------------


def open_webdataset(address: str, cache: Path) -> Iterable[bytes]:
    """WebDataset reads shards in a random order, and shuffles within a buffer of 1,000 samples."""
    import webdataset

    names = json.loads(urllib.request.urlopen(f"{address}/tars/shards.json").read())["shards"]
    cache.mkdir(parents=True, exist_ok=True)
    urls = [f"{address}/tars/{name}" for name in names]
    data = webdataset.WebDataset(urls, shardshuffle=100, cache_dir=str(cache)).shuffle(1000)
    return ReadColumn(data, "jpg")


def open_litdata(address: str, cache: Path) -> Iterable[bytes]:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for a server without TLS
    return ReadColumn(
        litdata.StreamingDataset(
            "s3://peers/litdata",
            cache_dir=str(cache),
            shuffle=True,
            max_cache_size="50GB",
            storage_options={"endpoint_url": address, "region_name": "us-east-1"},
        ),
        "image",
    )


def open_mds(address: str, cache: Path) -> Iterable[bytes]:
    from streaming import StreamingDataset

    os.environ["S3_ENDPOINT_URL"] = address
    return ReadColumn(
        StreamingDataset(remote="s3://peers/mds", local=str(cache), shuffle=True, batch_size=BATCH), "image"
    )


class ReadColumn:
    """The encoded images of a data set of dictionaries; can be iterated several times."""

    def __init__(self, data: Iterable[dict[str, Any]], column: str) -> None:
        self._data, self._column = data, column

    def __iter__(self) -> Iterator[bytes]:
        for sample in self._data:
            yield sample[self._column]


PEERS = {"webdataset": (None, open_webdataset), "litdata": (write_litdata, open_litdata), "mds": (write_mds, open_mds)}


def measure(data: Iterable[bytes], crop: Crop) -> list[dict[str, float]]:
    """Make batches of crops of all images, PASSES times."""
    results = []
    for _ in range(PASSES):
        clock, images, batch = Clock(), 0, list[bytes]()
        for encoded in data:
            batch.append(encoded)
            if len(batch) == BATCH:
                images += len(crop(batch))
                batch = []
        if batch:
            images += len(crop(batch))
        results.append(clock.read(images) | {"images": images})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["write", "read"])
    parser.add_argument("kind", choices=PEERS)
    parser.add_argument("source", help="folder of tars, or the server's address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--decoder", default="", help="file of Podscale's native decoder")
    arguments = parser.parse_args()
    write, open_data = PEERS[arguments.kind]
    if arguments.verb == "write":
        if write is not None:
            write(Path(arguments.source), arguments.folder)
        return
    os.environ |= S3_ENVIRONMENT
    crop = make_native_crop(arguments.decoder) if arguments.decoder else make_torchvision_crop()
    print(json.dumps(measure(open_data(arguments.source, arguments.folder), crop)))


if __name__ == "__main__":
    main()
