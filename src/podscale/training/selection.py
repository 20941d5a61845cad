"""Select between two trees by one truth value, in few kernels: the last operation of every update.

On a GPU, XLA computes a whole update of an array in the kernel that selects its new value. Scales, biases and running
statistics are hundreds of short vectors, and a kernel for each takes longer to start than to run. Joined in small
groups, they are selected, and with that updated, by a few kernels: XLA merges the groups' kernels, as those of a group
have the same form.
"""

from itertools import accumulate

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Shaped

VECTORS_PER_GROUP = 8  # with 24, XLA merges fewer of the kernels of ResNet-50; kernels also take longer to compile
MAX_LENGTH = 2**14  # of vectors that are joined; longer ones are worth a kernel


def select(condition: Bool[Array, ""], new: PyTree, old: PyTree, *, joins_vectors: bool) -> PyTree:
    """Return `new` where the condition holds, otherwise `old`.

    Args:
        condition: one for all.
        new: a tree of arrays.
        old: a tree of the same structure, shapes and dtypes.
        joins_vectors: whether short vectors are joined. Results are the same.
    """
    leaves, structure = jax.tree.flatten(new)
    pairs = list(zip(leaves, jax.tree.leaves(old), strict=True))
    results = dict[int, Array]()
    for group in _group_vectors(leaves) if joins_vectors else ():
        joined_new, joined_old = (jnp.concatenate([pairs[i][side] for i in group]) for side in (0, 1))
        joined: Array = jnp.where(condition, joined_new, joined_old)
        ends = list(accumulate(leaves[i].size for i in group))
        results |= dict(zip(group, jnp.split(joined, ends[:-1]), strict=True))
    return jax.tree.unflatten(
        structure, [results[i] if i in results else jnp.where(condition, *pair) for i, pair in enumerate(pairs)]
    )


def _group_vectors(leaves: list[Shaped[Array, "..."]]) -> list[list[int]]:
    """Return the positions of short vectors of one dtype, in groups."""
    by_dtype = dict[jnp.dtype, list[int]]()
    for i, leaf in enumerate(leaves):
        if leaf.ndim == 1 and leaf.size <= MAX_LENGTH:
            by_dtype.setdefault(leaf.dtype, []).append(i)
    return [
        positions[start : start + VECTORS_PER_GROUP]
        for positions in by_dtype.values()
        for start in range(0, len(positions), VECTORS_PER_GROUP)
    ]
