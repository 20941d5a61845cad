"""Picks: which image, and which crop of it, in four numbers each.

Where the images are on the devices, the loader sends picks instead of pixels; the compiled step takes the crops.
"""

import numpy as np
from numpy.typing import NDArray

from podscale.data.index.dataset import Index
from podscale.data.order import compute_crop_boxes
from podscale.parallel.inputs import PICK_NUMBERS
from podscale.recipe import Recipe


def make_picks(
    recipe: Recipe, index: Index, samples: NDArray[np.int64], passes: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return what training takes of each sample in its pass: int32 [..., PICK_NUMBERS]."""
    ids, data = samples.ravel(), recipe.data
    boxes, flips = compute_crop_boxes(
        recipe.augment,
        recipe.train.seed,
        passes.ravel(),
        ids,
        index.sizes[ids],
        data.image_size,
        fraction=data.eval_fraction,
    )
    picks = np.stack([ids, boxes[:, 0], boxes[:, 1], flips], axis=1).astype(np.int32)
    return picks.reshape(*samples.shape, PICK_NUMBERS)
