"""Measure a bucket through the loader's own path: how long a request takes, and how many bytes per second come.

Bounded: at most `PROBE_S` seconds and `PROBE_BYTES` bytes, and a few listings. Nothing is written, nor cached.
"""

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from podscale.config.json_types import JsonObject
from podscale.data.bucket.disk_cache import DiskCache
from podscale.data.bucket.fetch import FetchAhead
from podscale.data.bucket.files import BucketFiles, BucketSplit
from podscale.data.index.table import Strings, Table
from podscale.errors import StorageError, UserError
from podscale.forecast.bucket import IMAGE_BYTES
from podscale.storage.bucket_path import BucketPath, explain_store_errors
from podscale.storage.locations import Location
from podscale.storage.open import open_store
from podscale.storage.prices import LISTING_USD, PRICES, READ_USD
from podscale.storage.store import ObjectInfo

PROBE_S, PROBE_BYTES = 5.0, 256 << 20
SINGLE_REQUESTS = 8  # one after the other, to measure how long one takes
BATCH = 64  # images that are waited for at once
MIN_BYTES = 4096  # of an object that may hold images
MAX_OBJECTS, MAX_LISTINGS = 2000, 16


class _UncachedFiles(BucketFiles):
    """Samples that are fetched from the bucket each time."""

    def open_cache(self) -> DiskCache | None:
        return None


def measure_bucket(location: Location) -> JsonObject:
    """Measure how long a request takes and what rate the loader gets from some of the objects below a folder.

    An object is read whole if it is about as large as an image, else in ranges that are.

    Raises:
        UserError: it cannot be read, or has no objects that are large enough.
    """
    root = BucketPath(open_store(location, "--path"), location)
    try:
        with explain_store_errors():
            objects, listings = find_objects(root)
            if not objects:
                raise UserError(
                    f"{location} has no objects of {MIN_BYTES} bytes or more to measure; name data with --path"
                )
            waits = _time_single_requests(root, objects)
            files = _divide_objects(root, objects)
            rate = _measure_rate(files)
    except StorageError as error:
        raise UserError(str(error)) from None
    requests = rate["requests"] + SINGLE_REQUESTS
    return rate | {
        "url": str(location),
        "objects": len(objects),
        "object_bytes": float(np.mean([info.size for info in objects])),
        "image_bytes": float(files.table.lengths.mean()),
        "first_byte_s": float(np.median(waits)),
        "slowest_first_byte_s": max(waits),
        "listings": listings,
        "usd": (requests * READ_USD + listings * LISTING_USD) / 1e6,
    }


def find_objects(root: BucketPath) -> tuple[list[ObjectInfo], int]:
    """Return some objects below a folder, from its first folders that have any, and how many listings that took."""
    pending, objects, listings = [root], list[ObjectInfo](), 0
    while pending and len(objects) < MAX_OBJECTS and listings < MAX_LISTINGS:
        folder = pending.pop(0)
        listing, listings = folder.list(), listings + 1
        objects += [info for info in listing.objects if info.size >= MIN_BYTES]
        pending = [*(folder / name for name in listing.folders), *pending]  # depth first: class folders may be many
    return objects[:MAX_OBJECTS], listings


def _time_single_requests(root: BucketPath, objects: list[ObjectInfo]) -> list[float]:
    """Return the seconds of each of a few small requests, the connection of which exists already."""
    waits = []
    for number in range(SINGLE_REQUESTS + 1):
        info = objects[number * len(objects) // (SINGLE_REQUESTS + 1)]
        start = time.perf_counter()
        root.store.read_range(info.key, 0, 1, info.etag)
        waits.append(time.perf_counter() - start)
    return waits[1:]


def _divide_objects(root: BucketPath, objects: list[ObjectInfo]) -> _UncachedFiles:
    """Return objects as if they were shards of images, in a random order, of `PROBE_BYTES` in all at most."""
    starts, lengths, numbers = list[int](), list[int](), list[int]()
    for number, info in enumerate(objects):
        size = info.size if info.size < 4 * IMAGE_BYTES else IMAGE_BYTES
        count = info.size // size
        starts += [size * i for i in range(count)]
        lengths += [size] * count
        numbers += [number] * count
    order = np.random.default_rng(0).permutation(len(starts))
    order = order[: max(1, int(np.searchsorted(np.cumsum(np.array(lengths)[order]), PROBE_BYTES)))]
    table = Table(
        labels=np.zeros(len(order), np.int32),
        sizes=np.ones((len(order), 2), np.int32),
        files=np.array(numbers, np.int32)[order],
        offsets=np.array(starts, np.int64)[order],
        lengths=np.array(lengths, np.int64)[order],
        names=Strings.from_names([]),
        paths=tuple(info.key for info in objects),
    )
    etags = Strings.from_names(info.etag for info in objects)
    return _UncachedFiles(table, True, BucketSplit(root, "", "train", etags, np.arange(len(order))))


def _measure_rate(files: _UncachedFiles) -> JsonObject:
    """Read the samples as a loader does, ahead of time, until they or the seconds are used up."""
    total = len(files.table)

    def list_batches() -> Iterator[NDArray[np.int64]]:
        yield from (np.arange(first, min(first + BATCH, total)) for first in range(0, total, BATCH))

    start, images, size = time.perf_counter(), 0, 0
    ahead = FetchAhead(files, list_batches)
    try:
        for samples in list_batches():
            files.locate_bytes(samples)
            ahead.finish_batch()
            images, size = images + len(samples), size + int(files.table.lengths[samples].sum())
            if time.perf_counter() - start > PROBE_S:
                break
        seconds, counts = time.perf_counter() - start, ahead.counts
    finally:
        ahead.close()
    rates = {"images_per_s": images / seconds, "bytes_per_s": size / seconds}
    return rates | {"requests_per_s": counts.requests / seconds, "requests": counts.requests, "hedged": counts.hedged}


def format_rows(result: JsonObject) -> list[tuple[str, str]]:
    """Return the measurement as rows of a table."""
    advice, slowest_ms = "", result["slowest_first_byte_s"] * 1e3
    if result["object_bytes"] < 4 * IMAGE_BYTES:
        advice = "one object per image: `podscale data prepare` writes tars, with an index that takes one request"
    return [
        (
            "bucket",
            f"{result['bytes_per_s'] / 1e6:,.0f} MB/s, {result['images_per_s']:,.0f} images/s of "
            f"{result['image_bytes'] / 1e3:,.0f} kB, {result['requests_per_s']:,.0f} requests/s",
        ),
        (
            "",
            f"{result['first_byte_s'] * 1e3:,.1f} ms to the first byte, {slowest_ms:,.1f} ms at "
            f"worst of {SINGLE_REQUESTS}; measuring cost {result['usd']:.4f} USD ({PRICES})",
        ),
        ("", "`podscale plan RECIPE --data.path URL` says what a recipe needs of it"),
        *([("", advice)] if advice else []),
    ]
