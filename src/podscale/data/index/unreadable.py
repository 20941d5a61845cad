"""How many unreadable images a data set may have."""

import shlex

import numpy as np

from podscale import recipe
from podscale.data.files import Files
from podscale.errors import UserError


def check_unreadable(files: Files, split: str, data: recipe.Data) -> None:
    """Refuse a split with more unreadable images than `data.bad_share` allows."""
    unreadable = np.flatnonzero((files.table.sizes == 0).any(axis=1))
    allowed = count_allowed(len(files.table), data.bad_share)
    if len(unreadable) > allowed:
        try:
            files.measure_one(int(unreadable[0]))
            reason = f"{files.name(int(unreadable[0]))} has changed since it was indexed"
        except UserError as error:
            reason = str(error)
        check = f"podscale data check {shlex.quote(data.path)}"
        raise UserError(
            f"{len(unreadable):,} of {len(files.table):,} {split} images cannot be read, and data.bad_share "
            f"{data.bad_share:g} allows {allowed:,}; the first: {reason}; `{check}` lists all, "
            "and a larger --data.bad_share tolerates them"
        )


def count_allowed(images: int, share: float) -> int:
    """Return how many of so many images may be unreadable: that share of them, but at least one unless it is 0.

    >>> count_allowed(2000, 0.001), count_allowed(50, 0.001), count_allowed(50, 0.0)
    (2, 1, 0)
    """
    return max(int(share * images), 1) if share else 0
