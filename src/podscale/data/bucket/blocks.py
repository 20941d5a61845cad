"""Fetch blocks of shards (`podscale.data.bucket.requests`) into the disk cache, where batches read their samples.

Each block is asked for once, by the thread ahead or by the first batch that needs it; all others wait for it.
"""

import functools
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from podscale.data.bucket.disk_cache import DiskCache
from podscale.data.bucket.files import BucketFiles
from podscale.data.bucket.requests import HORIZON_BYTES, ShardBlocks, Span, find_blocks
from podscale.data.bucket.workers import RequestPool

IDLE, IN_FLIGHT, DONE = 0, 1, 2  # of a block


class BlockFetcher:
    """The blocks of a split that were asked for; used by several threads.

    Args:
        files: of the split.
        cache: where blocks go.
        pool: makes the requests.
    """

    def __init__(self, files: BucketFiles, cache: DiskCache, pool: RequestPool) -> None:
        self._files, self._cache, self._pool = files, cache, pool
        self._blocks: ShardBlocks | None = None
        self._states = np.zeros(0, np.int8)  # by block
        self._errors: dict[int, BaseException] = {}

    def look_ahead(self, batches: Iterable[NDArray[np.int64]]) -> None:
        """Decide which blocks to fetch whole, by the samples of the next batches, unless that is decided already."""
        if self._blocks is not None:
            return
        self._cache.load_new()
        is_needed, size, count = np.zeros(len(self._files.table), bool), 0, 0
        for samples in batches:
            new = np.unique(samples)
            new = new[~is_needed[new]]
            new = new[~self._cache.has(new)]
            is_needed[new] = True
            size += int(self._files.table.lengths[new].sum())
            count += len(samples)
            if size > HORIZON_BYTES or count >= len(is_needed):  # about a pass: the next one needs the same samples
                break
        if self._cache.has_space(size):
            blocks = find_blocks(self._files, np.flatnonzero(is_needed))
            self._states = np.zeros(len(blocks.members), np.int8)
            self._blocks = blocks

    def add(self, samples: NDArray[np.int64], is_over: Callable[[], bool]) -> NDArray[np.int64]:
        """Ask for blocks; return samples that are in none, or in one that the cache had no space for."""
        numbers = self._find_numbers(samples)
        is_single = (numbers < 0) | (self._states[numbers] == DONE) if len(self._states) else numbers < 0
        for block in np.unique(numbers[~is_single]).tolist():
            if self._states[block] == IDLE and self._pool.wait_for_turn(is_over):
                self._ask_for(block)
        return samples[is_single]

    def wait_for(self, samples: NDArray[np.int64]) -> bool:
        """Wait for the blocks that hold some samples, unless that takes unusually long; return whether there are any.

        Raises:
            UserError: what the request for a block has raised.
        """
        numbers = self._find_numbers(samples)
        blocks = np.unique(numbers[numbers >= 0]).tolist()
        for block in blocks:
            self._ask_for(block)
        for block in blocks:
            if not self._is_done(block):
                self._pool.grow()
                with self._pool.changed:
                    is_done = functools.partial(self._is_done, block)
                    if not self._pool.changed.wait_for(is_done, self._pool.patience):
                        self._pool.counts.hedged += 1
                        continue
            if block in self._errors:
                raise self._errors[block]
        return bool(blocks)

    def _is_done(self, block: int) -> bool:
        return bool(self._states[block] == DONE)

    def _find_numbers(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full(len(samples), -1) if self._blocks is None else self._blocks.numbers[samples]

    def _ask_for(self, block: int) -> None:
        """Make the request for a block, unless it was made before."""
        assert self._blocks is not None
        with self._pool.changed:
            if self._states[block] != IDLE:
                return
            self._states[block] = IN_FLIGHT
        span = self._blocks.make_span(self._files, block)
        self._pool.submit(span.where.stop - span.where.start, lambda: self._fetch(block, span))

    def _fetch(self, block: int, span: Span) -> None:
        """Fetch a block into the disk cache; if that is full, its samples are fetched when they are needed."""
        try:
            self._cache.write_block(span.samples, self._files.fetch_range(span.where), span.bounds)
        except BaseException as error:  # of any kind: who waits for the block raises it
            self._errors[block] = error
        self._states[block] = DONE  # those who wait are notified when the request ends
