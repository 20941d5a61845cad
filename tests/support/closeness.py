"""Comparison of trees of arrays."""

from functools import partial

import jax
import numpy as np


def assert_close(actual, expected, tolerance):
    """Compare trees of arrays; the tolerance is relative to the largest value of each expected array."""
    trees = (map(partial(np.asarray, dtype=np.float64), jax.tree.leaves(tree)) for tree in (actual, expected))
    for a, b in zip(*trees, strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()
