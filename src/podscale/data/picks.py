"""Picks: which image, and which crop of it, in four numbers each.

Where the images live on the devices, the loader sends picks instead of pixels; the compiled step takes the crops."""

import numpy as np
from numpy.typing import NDArray

from podscale.data.index.dataset import Index
from podscale.data.order import crop_boxes
from podscale.recipe import Recipe

PICK_NUMBERS = 4  # numbers: sample, left, top, mirrored


def make_picks(
    recipe: Recipe, index: Index, samples: NDArray[np.int64], passes: NDArray[np.int64]
) -> NDArray[np.int32]:
    """What training takes of each sample in its pass: int32 [..., PICK]."""
    ids, data = samples.ravel(), recipe.data
    boxes, mirrored = crop_boxes(
        recipe.augment,
        recipe.train.seed,
        passes.ravel(),
        ids,
        index.sizes[ids],
        data.image_size,
        fraction=data.eval_fraction,
    )
    chosen = np.stack([ids, boxes[:, 0], boxes[:, 1], mirrored], axis=1).astype(np.int32)
    return chosen.reshape(*samples.shape, PICK_NUMBERS)
