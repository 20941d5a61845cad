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
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


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
    pairs = draw_uint32(seed, stream, *scalars, np.arange((n + 1) // 2, dtype=np.uint32)).astype(np.uint64)
    numbers = np.stack([pairs[:, 0] << _HALF | pairs[:, 1], pairs[:, 2] << _HALF | pairs[:, 3]], axis=1).ravel()[:n]
    return np.argsort(numbers, kind="stable").astype(np.int32)
