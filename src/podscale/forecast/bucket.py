"""What a training asks of the bucket that its data is in: requests and bytes, per epoch and per second, and their cost.

Arithmetic alone, from counts and from how the loader fetches (`podscale.data.bucket.requests`): no request is made.
Fetched image by image, there are mostly fewer requests, since neighbours that are needed at once are fetched by one; a
request that takes unusually long is made again. What the index of shards takes is as measured (docs/results.md).
"""

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from podscale.config.json_types import JsonObject
from podscale.data.bucket.requests import BLOCK_BYTES, HORIZON_BYTES, MIN_DENSITY
from podscale.data.bucket.workers import MAX_REQUESTS
from podscale.data.index import catalog
from podscale.data.index.containers.sources import BucketSource
from podscale.data.index.dataset import Splits
from podscale.plan import Plan, count_lanes_per_host
from podscale.storage.prices import LISTING_USD, PRICES, READ_USD

IMAGE_BYTES = 110_000  # mean of ImageNet's photos, assumed where no image was indexed
KEYS_PER_LISTING = 1000
PREFIX_READS_PER_S = 5500  # that S3 serves from one prefix before it has adapted (AWS, "Optimizing S3 performance")
VALUES = (
    *("hosts", "in_blocks", "train_requests", "train_bytes", "eval_requests", "index_reads", "listings"),
    *("first_requests", "cache_bytes", "images_per_s", "requests_per_s", "bytes_per_s", "longest_request_s"),
)
SHARD_READS_PER_IMAGE = 1.1  # by which the index of shards is made: some headers are longer than a page, or on two
SMALL_IMAGES_BYTES = 2**18  # of one such read where many images are on a page
PREPARED = "tar"  # the container that `podscale data prepare` writes, with its index beside it


@dataclass(frozen=True)
class Contents:
    """What a data set in a bucket consists of.

    Attributes:
        source: its container, as in `data.source`.
        train: number of training images.
        val: number of validation images.
        image_bytes: mean bytes of an image.
        is_assumed: whether `image_bytes` is `IMAGE_BYTES` because no image was indexed.
        has_index: whether its index is stored beside it.
    """

    source: str
    train: int
    val: int
    image_bytes: float = IMAGE_BYTES
    is_assumed: bool = True
    has_index: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether an object holds many images."""
        return catalog.FORMATS[self.source].packed


@dataclass(frozen=True)
class BucketLoad:
    """What one training asks of the bucket that holds its data.

    Attributes:
        plan: a recipe on a pod; neither the pod nor the data need exist on this machine.
        contents: of the data set.
        images_per_s: that the devices of the pod need, from a forecast; 0: not known.
    """

    plan: Plan
    contents: Contents
    images_per_s: float = 0.0

    @property
    def hosts(self) -> int:
        return self.plan.pod.hosts

    # --- once ---

    @property
    def index_reads(self) -> int:
        """Reads that make the index, unless it is stored: of each image's header, or of many small images at once."""
        contents, images = self.contents, self.contents.train + self.contents.val
        if contents.has_index:
            return 1
        if not contents.is_packed:
            return images
        if contents.image_bytes < BucketSource.NEAR:
            return math.ceil(images * contents.image_bytes / SMALL_IMAGES_BYTES)
        return math.ceil(SHARD_READS_PER_IMAGE * images)

    @property
    def listings(self) -> int:
        """Listings that make the index; of class folders one or more each."""
        images = self.contents.train + self.contents.val
        return 1 if self.contents.is_packed else 1 + self.plan.counts.classes + images // KEYS_PER_LISTING

    # --- the first epoch ---

    @property
    def in_blocks(self) -> bool:
        """Whether shards are fetched in blocks of some megabytes, not image by image; this takes a disk cache.

        A host needs every `hosts`-th image of a shard, and looks `HORIZON_BYTES` ahead.
        """
        host_bytes = max(self.train_bytes / self.hosts, 1.0)
        density = min(1.0, HORIZON_BYTES / host_bytes) / self.hosts
        return self.contents.is_packed and density >= MIN_DENSITY

    @property
    def train_bytes(self) -> float:
        """Bytes of an epoch, of all hosts."""
        return self.contents.train * self.contents.image_bytes

    @property
    def train_requests(self) -> int:
        """Requests of an epoch, of all hosts, while nothing is cached."""
        return self._count_blocks(self.contents.train) if self.in_blocks else self.contents.train

    @property
    def eval_requests(self) -> int:
        """Requests of an evaluation, of all hosts: neighbours that a host reads in a batch are one request."""
        if not self.contents.is_packed or self.hosts > 1:
            return self.uncached_eval_requests
        return min(self.contents.val, self._count_blocks(self.contents.val))

    @property
    def uncached_eval_requests(self) -> int:
        """Requests of an evaluation without disk cache, and so without blocks."""
        val, plan = self.contents.val, self.plan
        if not self.contents.is_packed:
            return val
        runs = math.ceil(val * self.hosts / (plan.eval_images * plan.pod.size))
        return min(val, max(runs, self._count_blocks(val)))

    def _count_blocks(self, images: int) -> int:
        return min(images, math.ceil(images * self.contents.image_bytes / BLOCK_BYTES))

    @property
    def first_requests(self) -> int:
        """Requests of the index, the first epoch and the first evaluation."""
        return self.index_reads + self.listings + self.train_requests + self.eval_requests

    @property
    def cache_bytes(self) -> float:
        """Bytes that each host's disk cache takes to hold all that the host reads."""
        share = count_lanes_per_host(self.plan) / self.plan.recipe.data.lanes
        return self.contents.image_bytes * (self.contents.train * share + self.contents.val / self.hosts)

    # --- per second and host, while nothing is cached ---

    @property
    def requests_per_s(self) -> float:
        return self.images_per_s * self.train_requests / self.contents.train / self.hosts

    @property
    def bytes_per_s(self) -> float:
        return self.images_per_s * self.contents.image_bytes / self.hosts

    @property
    def longest_request_s(self) -> float:
        """Mean seconds of a request up to which the loader keeps up; 0 if no rate is known."""
        return MAX_REQUESTS / self.requests_per_s if self.requests_per_s else 0.0

    # --- money ---

    def compute_usd(self, read_usd: float = READ_USD) -> dict[str, float]:
        """Return the price of the index, of the first epoch with an evaluation, and of a whole run without caches."""
        epochs, evaluations = self.plan.recipe.train.epochs, len(self.plan.eval_steps())
        reads = {
            "index": self.index_reads,
            "epoch": self.train_requests + self.eval_requests,
            "uncached_run": epochs * self.contents.train + evaluations * self.uncached_eval_requests,
        }
        usd = {name: count * read_usd / 1e6 for name, count in reads.items()}
        return usd | {"index": usd["index"] + self.listings * LISTING_USD / 1e6}


def describe_contents(source: str, splits: Splits, *, has_index: bool = False) -> Contents:
    """Return what an indexed data set consists of."""
    lengths = np.concatenate([splits.train.count_encoded_bytes(), splits.val.count_encoded_bytes()])
    return Contents(source, len(splits.train), len(splits.val), float(lengths.mean()), False, has_index)


def find_cheaper(load: BucketLoad) -> BucketLoad | None:
    """Return the load of the same images as `podscale data prepare` writes them; None if it is no smaller."""
    prepared = replace(load, contents=replace(load.contents, source=PREPARED, has_index=True))
    return prepared if prepared.first_requests < load.first_requests else None


# --- text ------------------------------------------------------------------------------------------------------------


def format_rows(load: BucketLoad, read_usd: float = READ_USD) -> list[tuple[str, str]]:
    """Return what the bucket must deliver, what that costs and what would cost less, as rows of a table."""
    contents = load.contents
    assumed = " (assumed)" if contents.is_assumed else ""
    unit = f"in blocks of {BLOCK_BYTES / 2**20:.0f} MiB" if load.in_blocks else "one per image"
    first = f"{load.train_requests:,} requests ({unit}) and {load.train_bytes / 1e9:,.1f} GB in the first epoch"
    rows = [("bucket", f"{first}, images of {contents.image_bytes / 1e3:,.0f} kB{assumed}")]
    if load.images_per_s:
        rows.append(("bucket rate", _format_rates(load)))
    return [
        *rows,
        ("bucket cost", _format_cost(load, read_usd)),
        ("cheaper", suggest_cheaper(load, read_usd)),
    ]


def _format_rates(load: BucketLoad) -> str:
    rates = f"{load.requests_per_s:,.0f} requests/s and {load.bytes_per_s / 1e6:,.0f} MB/s per host"
    total = load.requests_per_s * load.hosts
    every = f" ({total:,.0f} requests/s and {load.bytes_per_s * load.hosts / 1e9:,.1f} GB/s in all)"
    limit = f"; the loader keeps up if a request takes at most {load.longest_request_s * 1e3:,.0f} ms"
    slow = f"; S3 starts with {PREFIX_READS_PER_S:,} reads/s per prefix" if total > PREFIX_READS_PER_S else ""
    return f"until it is cached, {rates}{every if load.hosts > 1 else ''}{limit}{slow}"


def _format_cost(load: BucketLoad, read_usd: float) -> str:
    usd, epochs = load.compute_usd(read_usd), load.plan.recipe.train.epochs
    where = f" in {PRICES}" if read_usd == READ_USD else ""
    return (
        f"{usd['epoch']:,.2f} USD for the first epoch and {usd['index']:,.2f} for the index; later epochs are free "
        f"with {load.cache_bytes / 1e9:,.1f} GB of disk cache per host, {usd['uncached_run']:,.2f} USD for all "
        f"{epochs:g} without ({read_usd:g} USD per million reads{where}; traffic within a region only)"
    )


def suggest_cheaper(load: BucketLoad, read_usd: float = READ_USD) -> str:
    """Return which form of the data set would take fewer requests, and what that saves; or how to save bytes."""
    cheaper = find_cheaper(load)
    if cheaper is None:
        return "no container takes fewer requests; `podscale data prepare --longest N` makes fewer bytes"
    before, after = (usd["index"] + usd["epoch"] for usd in (load.compute_usd(read_usd), cheaper.compute_usd(read_usd)))
    return (
        f"`podscale data prepare` writes tars with their index: {cheaper.first_requests:,} requests instead of "
        f"{load.first_requests:,} for the index and the first epoch ({after:,.2f} USD instead of {before:,.2f})"
    )


def to_dict(load: BucketLoad, read_usd: float = READ_USD) -> JsonObject:
    """Return the load as plain values, for JSON."""
    cheaper = find_cheaper(load)
    return {name: getattr(load, name) for name in VALUES} | {
        "contents": asdict(load.contents),
        "usd": load.compute_usd(read_usd),
        "usd_per_million_reads": read_usd,
        "prepared_requests": cheaper.first_requests if cheaper else None,
    }
