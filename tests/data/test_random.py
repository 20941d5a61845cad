"""The counter-based generator against the published vectors and against a scalar Philox written from the paper."""

import numpy as np
import pytest

from podscale.data.random import Stream, bits, permutation, uniform, words
from podscale.errors import UserError

VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def numbers(text):
    return [int(word, 16) for word in text.split()]


def philox(key, counter):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b % 2**32, a >> 32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), VECTORS)
def test_gives_the_known_answers(counter, key, answer):
    counters = np.array([numbers(counter)] * 3, np.uint32)
    assert bits(tuple(numbers(key)), counters).tolist() == [numbers(answer)] * 3


def test_counters_name_stream_then_numbers_and_the_seed_is_the_key():
    seed = 0x123456789ABCDEF0
    drawn = words(seed, Stream.FLIP, np.array([[5], [6]]), [7, 8, 9])
    assert drawn.shape == (2, 3, 4)
    assert drawn[1, 2].tolist() == philox((0x9ABCDEF0, 0x12345678), (Stream.FLIP, 6, 9, 0))


def test_uniform_numbers_fill_the_unit_interval():
    drawn = uniform(1, Stream.CROP, 0, np.arange(50_000), 0)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 10_000).max() < 500
    assert np.abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 0.02


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_a_permutation_holds_everything_once(n):
    assert sorted(permutation(3, Stream.ORDER, n, 1, 2)) == list(range(n))


def test_permutations_differ_by_seed_lane_and_pass():
    drawn = {tuple(permutation(s, Stream.ORDER, 50, lane, p)) for s in (0, 1) for lane in (0, 1) for p in (0, 1)}
    assert len(drawn) == 8


def test_permutations_are_fair():
    drawn = np.stack([permutation(0, Stream.ORDER, 4, 0, i) for i in range(4000)])
    counts = np.stack([np.bincount(place, minlength=4) for place in drawn.T])
    assert np.abs(counts - 1000).max() < 130


def test_refuses_seeds_that_are_no_key():
    with pytest.raises(UserError, match=r"train\.seed must be at least 0 and below 2\*\*64"):
        words(2**64, Stream.ORDER, 0)
