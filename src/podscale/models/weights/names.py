"""Names and digests of a network's arrays."""

import hashlib
from pathlib import Path

import jax
import numpy as np

from podscale.models.functional import Tree


def name_arrays(*trees: Tree) -> dict[str, jax.Array]:
    """Return the arrays of nested dicts by name.

    >>> name_arrays({"conv": {"kernel": 1}}, {"norm": {"mean": 2}})
    {'conv.kernel': 1, 'norm.mean': 2}
    """
    leaves = [pair for tree in trees for pair in jax.tree.leaves_with_path(tree)]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def digest_file(source: str) -> str:
    """Return a digest of a file's bytes; empty if `source` is not a file, but a run's folder or no longer there."""
    path = Path(source).expanduser()
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def digest_arrays(tensors: dict[str, np.ndarray]) -> str:
    """Return a digest of named arrays that does not depend on their order."""
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
