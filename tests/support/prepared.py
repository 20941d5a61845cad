"""Comparison of a prepared data set with its source, and a check of refusals to prepare."""

from pathlib import Path

import numpy as np
import pytest

from podscale.data import crop
from podscale.data.index.dataset import open_index
from podscale.data.order import compute_crop_boxes
from podscale.data.tools import prepare
from podscale.errors import UserError
from podscale.recipe import Augment, Data

SPLITS = ("train", "val")


def open_data_set(root, source="tar", **fields):
    return open_index(Data(source=source, path=str(root), **fields))


def read_contents(folder):
    """Return the bytes of every file below a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def crop_all(index, size=48):
    """Return the crops that training would see of every sample."""
    samples = np.arange(len(index))
    boxes, flips = compute_crop_boxes(Augment(), 7, np.zeros_like(samples), samples, index.sizes, size)
    out = np.zeros((len(index), size, size, 3), np.uint8)
    crop.crop_batch(index, samples, boxes, flips, out)
    return out


def assert_same_samples(ours, theirs):
    """Assert that samples have the same numbers, labels, sizes, crops and pixels."""
    assert ours.classes == theirs.classes
    for split in SPLITS:
        a, b = getattr(ours, split), getattr(theirs, split)
        assert np.array_equal(a.labels, b.labels)
        assert np.array_equal(a.sizes, b.sizes)
        assert np.array_equal(crop_all(a), crop_all(b))
        assert all(np.array_equal(a.load_pixels(i), b.load_pixels(i)) for i in range(len(a)))


def assert_refused(message, *arguments, **options):
    """Assert that a prepare is refused in one sentence that contains `message`."""
    with pytest.raises(UserError) as error:
        prepare.prepare_data_set(*arguments, **options)
    assert "\n" not in str(error.value)
    assert message in str(error.value)
