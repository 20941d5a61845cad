"""Random numbers as a pure function of where they are used: a counter-based generator.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.3) maps a
64-bit key and a 128-bit counter to 128 random bits. The key is the recipe's seed; the counter identifies the use: a
stream (what is drawn) and up to three numbers (for which lane, pass or sample). There is no state, so any host can draw
for any sample at any time.

The generator is implemented here because the order of a training run must not depend on NumPy's release. Everything
built on it uses only exactly rounded operations (add, multiply, divide, square root), which agree on every machine.
"""

import enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podscale.errors import UserError

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_BLOCK = 1 << 14  # counters that are computed at once: their arrays stay in the processor's cache
_BUCKET = 1 << 17  # numbers that are sorted at once
_PARTS = 64  # into which numbers are divided to be distributed over buckets


class Stream(enum.IntEnum):
    """What a number is drawn for: the first 32 bits of the counter. Values are part of the order: never reuse one."""

    ORDER = 0  # (lane, pass, pair of positions)
    CROP = 1  # (pass, sample, attempt)
    SHIFT = 2  # (pass, sample)
    FLIP = 3  # (pass, sample)
    RANDAUGMENT = 4  # (pass, sample, operation)
    HOLD_OUT = 5  # (sample), with seed 0
    ROUND = 6  # (lane, round, pair of places)
    CLASS = 7  # (lane and class, pass, pair of images)


def compute_philox(key: tuple[int, int], counters: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return Philox4x32-10's 128 random bits for each counter, uint32 [n, 4] -> uint32 [n, 4].

    >>> [f"{value:08x}" for value in compute_philox((0, 0), np.zeros((1, 4), np.uint32))[0]]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    out = np.empty((len(counters), 4), np.uint32)
    for start in range(0, len(counters), _BLOCK):
        out[start : start + _BLOCK] = _compute_block(key, counters[start : start + _BLOCK])
    return out


def _compute_block(key: tuple[int, int], counters: NDArray[np.uint32]) -> NDArray[np.uint64]:
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def draw_uint32(seed: int, stream: Stream, *counters: ArrayLike) -> NDArray[np.uint32]:
    """Return four random numbers, uint32 [..., 4], for each element of up to three counters that broadcast together.

    Raises:
        UserError: the seed is not a 64-bit number.
    """
    if len(counters) > 3:
        raise ValueError("a counter holds the stream and three numbers")
    if not 0 <= seed < 2**64:
        raise UserError(f"train.seed must be at least 0 and below 2**64, not {seed}")
    columns = np.broadcast_arrays(*(np.asarray(counter, np.uint32) for counter in counters))
    shape = columns[0].shape if columns else ()
    table = np.zeros((int(np.prod(shape)), 4), np.uint32)
    table[:, 0] = int(stream)
    for number, column in enumerate(columns, start=1):
        table[:, number] = column.ravel()
    return compute_philox((seed & 0xFFFFFFFF, seed >> 32), table).reshape(*shape, 4)


def draw_uniform(seed: int, stream: Stream, *counters: ArrayLike) -> NDArray[np.float64]:
    """Return four numbers in [0, 1), float64 [..., 4], multiples of 2**-32, for each element of the counters.

    >>> draw_uniform(0, Stream.CROP, 3, [7, 8, 9], 0).shape
    (3, 4)
    """
    return draw_uint32(seed, stream, *counters) * np.float64(2.0**-32)


def draw_permutation(seed: int, stream: Stream, n: int, *counters: int) -> NDArray[np.int32]:
    """Return a permutation of 0..n-1: the order of n random 64-bit numbers, ties (one in 2**64 per pair) by position.

    Takes up to two counters, since the third counts the numbers themselves.

    >>> draw_permutation(0, Stream.ORDER, 5, 0, 0).tolist()
    [2, 0, 1, 4, 3]
    """
    scalars = [np.uint32(counter) for counter in counters] + [np.uint32(0)] * (2 - len(counters))
    numbers = np.empty(n + n % 2, np.uint64)
    for start in range(0, n, 2 * _BLOCK):
        stop = min(start + 2 * _BLOCK, len(numbers))
        pairs = draw_uint32(seed, stream, *scalars, np.arange(start // 2, stop // 2, dtype=np.uint32))
        high, low = pairs[:, ::2].astype(np.uint64), pairs[:, 1::2]
        numbers[start:stop] = (high << _HALF | low).ravel()
    return argsort_random(numbers[:n])


def argsort_random(numbers: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Return the stable order of evenly distributed 64-bit numbers, in time and memory that grow linearly.

    A sort's time per number grows with their number. So numbers are distributed first over buckets by their highest
    bits, and each bucket, of a size that does not grow, is sorted.

    >>> argsort_random(np.array([2**63, 5, 5], np.uint64)).tolist()
    [1, 2, 0]
    """
    bits = min((len(numbers) // _BUCKET).bit_length(), 16)
    if not bits:
        return np.argsort(numbers, kind="stable").astype(np.int32)
    order, ends = _distribute(numbers, bits)
    for first, last in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        bucket = order[first:last]
        order[first:last] = bucket[np.argsort(numbers[bucket], kind="stable")]
    return order


def _distribute(numbers: NDArray[np.uint64], bits: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the places of numbers by their highest bits, else ascending, and where each group of equal bits ends."""
    shift, part = np.uint64(64 - bits), max(_BUCKET, -(-len(numbers) // _PARTS))
    starts = range(0, len(numbers), part)
    counts = np.array([np.bincount(_take_high(numbers[at : at + part], shift), minlength=1 << bits) for at in starts])
    ends = np.cumsum(counts.sum(axis=0))
    firsts = ends - counts[::-1].cumsum(axis=0)[::-1]  # of each part in each group
    order = np.empty(len(numbers), np.int32)
    for at, first, count in zip(starts, firsts.tolist(), counts.tolist(), strict=True):
        places = np.argsort(_take_high(numbers[at : at + part], shift), kind="stable") + at  # a radix sort of 16 bits
        taken = 0
        for start, length in zip(first, count, strict=True):
            order[start : start + length] = places[taken : taken + length]
            taken += length
    return order, ends


def _take_high(numbers: NDArray[np.uint64], shift: np.uint64) -> NDArray[np.uint16]:
    return (numbers >> shift).astype(np.uint16)
