"""Which ranges of objects to ask a bucket for: single samples with their neighbours, or whole blocks of a shard.

Each request costs CPU time that decoding needs. So where most of a shard is needed soon, and the disk cache has space,
the shard is fetched in blocks of about two megabytes, each by one request and one write.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from podscale.data.bucket.files import BucketFiles, ByteRange
from podscale.storage.cloud import merge_ranges

HORIZON_BYTES = 2**31  # of upcoming samples, from which blocks are chosen
BLOCK_BYTES = 2**21  # larger ones, several at once, do not fit the processor's cache between socket and file
MIN_DENSITY = 0.75  # share of a block's bytes that are needed


@dataclass(frozen=True)
class Span:
    """One request: a range of an object, the samples in it, and the bounds of each within the range."""

    where: ByteRange
    samples: list[int]
    bounds: list[tuple[int, int]]


def plan_requests(files: BucketFiles, samples: Iterable[int]) -> list[Span]:
    """Return the requests that fetch some samples, in the order in which the samples are needed."""
    by_object: dict[tuple[str, str], list[tuple[int, ByteRange]]] = {}
    for sample in samples:
        where = files.locate_range(sample)
        by_object.setdefault((where.key, where.etag), []).append((sample, where))
    spans = []
    for (key, etag), wanted in by_object.items():
        ranges = [(where.start, where.stop) for _, where in wanted]
        for start, stop, members in merge_ranges(ranges):
            bounds = [(ranges[i][0] - start, ranges[i][1] - start) for i in members]
            spans.append(Span(ByteRange(key, etag, start, stop), [wanted[i][0] for i in members], bounds))
    return spans


@dataclass(frozen=True, eq=False)
class ShardBlocks:
    """Blocks of shards that are fetched whole.

    Attributes:
        numbers: the block of each sample of the split; -1 where it is fetched by itself.
        members: the samples of each block, by ascending offset.
    """

    numbers: NDArray[np.int64]
    members: Sequence[NDArray[np.int64]]

    def make_span(self, files: BucketFiles, block: int) -> Span:
        """Return the request for a block."""
        samples = self.members[block]
        starts = files.table.offsets[samples]
        stops = starts + files.table.lengths[samples]
        first = files.locate_range(int(samples[0]))
        where = ByteRange(first.key, first.etag, int(starts[0]), int(stops.max()))
        bounds = np.stack([starts, stops], axis=1) - where.start
        return Span(where, samples.tolist(), [(start, stop) for start, stop in bounds.tolist()])


def find_blocks(files: BucketFiles, samples: NDArray[np.int64]) -> ShardBlocks:
    """Return the blocks of which these samples are most.

    Args:
        files: of the split.
        samples: those that are needed soon and are not cached, each once.
    """
    numbers = np.full(len(files.table), -1, np.int64)
    if not files.packed or not len(samples):
        return ShardBlocks(numbers, [])
    starts, lengths = files.table.offsets[samples], files.table.lengths[samples]
    order = np.lexsort((starts, files.table.files[samples]))
    samples, starts, stops = samples[order], starts[order], (starts + lengths)[order]
    containers, slots = files.table.files[samples], starts // BLOCK_BYTES
    is_first = np.ones(len(samples), bool)
    is_first[1:] = (containers[1:] != containers[:-1]) | (slots[1:] != slots[:-1])
    firsts = np.flatnonzero(is_first)
    needed = np.add.reduceat(stops - starts, firsts)
    spans = np.maximum.reduceat(stops, firsts) - starts[firsts]
    counts = np.diff(np.append(firsts, len(samples)))
    is_dense = (counts > 1) & (needed >= MIN_DENSITY * spans) & (spans <= 2 * BLOCK_BYTES)
    members = [
        samples[first : first + count]
        for first, count in zip(firsts[is_dense].tolist(), counts[is_dense].tolist(), strict=True)
    ]
    for block, block_samples in enumerate(members):
        numbers[block_samples] = block
    return ShardBlocks(numbers, members)
