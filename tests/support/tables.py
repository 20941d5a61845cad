"""Comparison of the tables of data sets."""

import numpy as np


def is_same_table(ours, theirs):
    """Return whether two tables have the same values of the same types, names and paths."""
    columns = ("labels", "sizes", "files", "offsets", "lengths")
    return (
        all(np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in columns)
        and all(getattr(ours, name).dtype == getattr(theirs, name).dtype for name in columns)
        and [ours.names[i] for i in range(len(ours.names))] == [theirs.names[i] for i in range(len(theirs.names))]
        and ours.paths == theirs.paths
    )
