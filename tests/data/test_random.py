"""The counter-based generator against the published vectors and against a scalar Philox written from the paper."""

import numpy as np
import pytest

from podscale.data.random import (
    _BUCKET,
    Stream,
    argsort_random,
    compute_philox,
    draw_permutation,
    draw_uint32,
    draw_uniform,
)
from podscale.errors import UserError

VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def parse_numbers(text):
    return [int(value, 16) for value in text.split()]


def compute_scalar_philox(key, counter):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b % 2**32, a >> 32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_equals_the_published_vectors(counter, key, expected):
    counters = np.array([parse_numbers(counter)] * 3, np.uint32)
    assert compute_philox(tuple(parse_numbers(key)), counters).tolist() == [parse_numbers(expected)] * 3


def test_the_counter_is_stream_and_numbers_and_the_key_is_the_seed():
    seed = 0x123456789ABCDEF0
    values = draw_uint32(seed, Stream.FLIP, np.array([[5], [6]]), [7, 8, 9])
    assert values.shape == (2, 3, 4)
    assert values[1, 2].tolist() == compute_scalar_philox((0x9ABCDEF0, 0x12345678), (Stream.FLIP, 6, 9, 0))


def test_uniform_numbers_fill_the_unit_interval():
    values = draw_uniform(1, Stream.CROP, 0, np.arange(50_000), 0)
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 10_000).max() < 500
    assert np.abs(np.corrcoef(values.T) - np.eye(4)).max() < 0.02


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_a_permutation_contains_each_number_once(n):
    assert sorted(draw_permutation(3, Stream.ORDER, n, 1, 2)) == list(range(n))


def test_permutations_differ_by_seed_lane_and_pass():
    values = {tuple(draw_permutation(s, Stream.ORDER, 50, lane, p)) for s in (0, 1) for lane in (0, 1) for p in (0, 1)}
    assert len(values) == 8


def test_permutations_are_uniform():
    values = np.stack([draw_permutation(0, Stream.ORDER, 4, 0, i) for i in range(4000)])
    counts = np.stack([np.bincount(column, minlength=4) for column in values.T])
    assert np.abs(counts - 1000).max() < 130


def test_seeds_beyond_64_bits_are_refused():
    with pytest.raises(UserError, match=r"train\.seed must be at least 0 and below 2\*\*64"):
        draw_uint32(2**64, Stream.ORDER, 0)


@pytest.mark.parametrize("n", [_BUCKET - 1, _BUCKET, 3 * _BUCKET + 1])
def test_a_long_permutation_equals_one_plain_sort_of_the_same_numbers(n):
    pairs = draw_uint32(3, Stream.ORDER, 1, 2, np.arange((n + 1) // 2)).astype(np.uint64)
    numbers = (pairs[:, ::2] << np.uint64(32) | pairs[:, 1::2]).ravel()[:n]
    expected = np.argsort(numbers, kind="stable")
    np.testing.assert_array_equal(draw_permutation(3, Stream.ORDER, n, 1, 2), expected)


def test_equal_numbers_stay_in_order_in_every_bucket():
    numbers = np.random.default_rng(0).integers(0, 2**64, 2 * _BUCKET, np.uint64)
    numbers[::3] = numbers[1]
    np.testing.assert_array_equal(argsort_random(numbers), np.argsort(numbers, kind="stable"))
