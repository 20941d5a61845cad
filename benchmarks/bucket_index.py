"""The index of a million images in tars behind 30 ms of latency, by ranged reads: seconds, memory, requests, bytes.

    python benchmarks/bucket_index.py PHOTOS [--tars 1000] [--latency-ms 30] [--sides 0 64]

PHOTOS is a folder with JPEGs anywhere below it. One tar of 1,000 of them is served by nginx under as many names as
there are tars to be; 0 is a tar of the files as they are, another number a tar of thumbnails whose longer side has so
many pixels. The process that makes the index is pinned to core 0, nginx to core 1. A web server lists nothing, so the
listing that a bucket would give is made beforehand, and not counted. The claim: under 5 minutes and 1 GB for 1,000
tars.
"""

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bucket import LOADER_CORE, PER_SHARD, add_image, list_photos, serve
from bucket_peers import Clock
from PIL import Image


def write_tars(photos: Path, root: Path, tars: int, side: int) -> None:
    """Write one tar to train on, under many names, and a small one to validate on."""
    paths = list_photos(photos)
    for name, count in (("train-00000.tar", PER_SHARD), ("val-00000.tar", 10)):
        with tarfile.open(root / name, "w") as tar:
            for i in range(count):
                add_image(tar, f"{i % 2}/{i:05}.jpg", make_image(paths[i % len(paths)], side))
    for number in range(1, tars):
        os.link(root / "train-00000.tar", root / f"train-{number:05}.tar")


def make_image(path: Path, side: int) -> bytes:
    """Return a file's bytes, or those of a thumbnail of it."""
    if not side:
        return path.read_bytes()
    with Image.open(path) as image:
        image.draft("RGB", (side, side))
        thumbnail = image.convert("RGB")
    thumbnail.thumbnail((side, side))
    file = io.BytesIO()
    thumbnail.save(file, "JPEG")
    return file.getvalue()


def measure_index(address: str, tars: int) -> dict[str, float]:
    """Make the index in this process."""
    from podscale.data.index.catalog import FORMATS, scan_data_set
    from podscale.storage.bucket_path import BucketPath
    from podscale.storage.locations import parse_location
    from podscale.storage.open import open_store
    from podscale.storage.store import FolderListing

    location = parse_location(address)
    root = BucketPath(open_store(location), location)
    names = [*(f"train-{number:05}.tar" for number in range(tars)), "val-00000.tar"]
    with ThreadPoolExecutor(32) as pool:
        root.listings[""] = FolderListing((), tuple(pool.map(root.store.stat, names)))
    root.store.requests.clear()
    before, clock = read_received_bytes(), Clock()
    tables = scan_data_set("tar", FORMATS["tar"].find(root))
    images = len(tables.train) + len(tables.val)
    result = clock.read(images)
    return result | {
        "images": images,
        "seconds": images / result["images_per_s"],
        "requests": sum(root.store.requests.values()),
        "received_gb": (read_received_bytes() - before) / 1e9,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def read_received_bytes() -> int:
    """Return the bytes that the loopback interface has received; 0 where the system does not say."""
    path = Path("/sys/class/net/lo/statistics/rx_bytes")
    return int(path.read_text()) if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", help="folder of JPEGs")
    parser.add_argument("--tars", type=int, default=1000)
    parser.add_argument("--latency-ms", type=int, default=30)
    parser.add_argument("--sides", type=int, nargs="*", default=[0, 64])
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure_index(arguments.photos, arguments.tars)))
        return
    for side in arguments.sides:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            os.chmod(folder, 0o755)
            write_tars(Path(arguments.photos), Path(folder), arguments.tars, side)
            entry = (Path(folder) / "train-00000.tar").stat().st_size / PER_SHARD
            with serve(Path(folder), arguments.latency_ms) as address:
                command = ["taskset", "-c", str(LOADER_CORE), sys.executable, __file__, address]
                command += ["--tars", str(arguments.tars), "--measure"]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result = json.loads(output.splitlines()[-1])
        print(
            f"{result['images']:,} images of {entry / 1000:.1f} kB in {arguments.tars + 1:,} tars, "
            f"{arguments.latency_ms} ms: {result['seconds']:.1f} s ({result['cpu_ms']:.3f} ms CPU an image), "
            f"{result['requests']:,} requests, {result['received_gb']:.2f} GB, peak {result['peak_gib']:.2f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
