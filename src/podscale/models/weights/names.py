"""Name the arrays of a network, and digest them."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podscale.models.functional import Tree


def name_arrays(*trees: Tree) -> dict[str, Any]:
    """The arrays of nested dicts by name.

    >>> named({"conv": {"kernel": 1}}, {"norm": {"mean": 2}})
    {'conv.kernel': 1, 'norm.mean': 2}
    """
    leaves = [pair for tree in trees for pair in jax.tree.leaves_with_path(tree)]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def digest_file(source: str) -> str:
    """Of a file's bytes; empty where there is no file, but a run's folder or nothing any more."""
    path = Path(source).expanduser()
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def digest_arrays(tensors: dict[str, np.ndarray]) -> str:
    """Of named arrays, whatever their order."""
    whole = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        whole.update(f"{name} {array.dtype} {array.shape}".encode())
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()[:16]
