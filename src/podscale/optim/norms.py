"""Norms of arrays and trees, and clipping by them.

Optimizers take a function `Norms` for the norms of whole arrays. Where a device holds only a part of each array
(`parallel/sharded.py`), another function that sums over the pod takes the place of `compute_norms`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

Norms = Callable[[PyTree], PyTree]  # a tree of arrays -> the tree of their norms
BLOCK = 128  # numbers of one array that are summed at once, after the sums of its columns
MAX_JOINED = 40  # arrays whose sums are joined: XLA computes padding within the kernel of up to 96 operands


def compute_norms(tree: PyTree) -> PyTree:
    """Return the norm of every array of a tree.

    Squares are summed over all axes but the last, and what is left of all arrays together. On a GPU that is one kernel
    per array instead of two, and no kernel of a convolution is read against its order in memory.
    """
    leaves, structure = jax.tree.flatten(tree)
    by_column = [_sum_squares(leaf) for leaf in leaves]
    # Vectors by themselves: a rule that does not need their norms then costs nothing.
    joined = [i for i, leaf in enumerate(leaves) if leaf.ndim > 1]
    norms = [jnp.sqrt(sums.sum()) for sums in by_column]
    for batch in (joined[i : i + MAX_JOINED] for i in range(0, len(joined), MAX_JOINED)):
        for i, norm in zip(batch, jnp.sqrt(sum_segments([by_column[i] for i in batch])), strict=True):
            norms[i] = norm.astype(by_column[i].dtype)
    return jax.tree.unflatten(structure, norms)


def sum_segments(vectors: Sequence[Float[Array, "_length"]]) -> Float[Array, "vectors"]:
    """Return the sum of each vector.

    All vectors lie in one array, each from a new block on. Blocks are summed, and then those of each vector, in the
    order of a table that is known when the program is compiled: three kernels on a GPU, whatever the vectors' lengths.
    """
    pieces = [piece for vector in vectors for piece in (vector, jnp.zeros(-vector.size % BLOCK, vector.dtype))]
    blocks = jnp.concatenate([piece for piece in pieces if piece.size]).reshape(-1, BLOCK).sum(axis=1)
    counts = np.array([-(-vector.size // BLOCK) for vector in vectors])
    ends = np.cumsum(counts)
    table = (ends - counts)[:, None] + np.arange(counts.max(initial=0))
    is_own = table < ends[:, None]
    return jnp.where(is_own, blocks[np.where(is_own, table, 0)], 0).sum(axis=1)


def _sum_squares(x: Float[Array, "..."]) -> Float[Array, "columns"]:
    """Return the sum of squares of each column, the last axis; a number counts as one column."""
    wide = jnp.atleast_1d(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    return jnp.square(wide).sum(axis=tuple(range(wide.ndim - 1)))


def compute_global_norm(tree: PyTree, norms: Norms = compute_norms) -> Float[Array, ""]:
    """Return the norm of all arrays of a tree together."""
    return jnp.linalg.norm(jnp.stack(jax.tree.leaves(norms(tree))))


def compute_joined_global_norm(tree: PyTree) -> Float[Array, ""]:
    """Return the norm of all arrays of a tree together, for whole arrays.

    Small arrays are joined first, which saves a GPU a hundred tiny kernels.
    """
    leaves = jax.tree.leaves(tree)
    small = [leaf.ravel() for leaf in leaves if leaf.ndim < 2]
    return compute_global_norm([leaf for leaf in leaves if leaf.ndim > 1] + ([jnp.concatenate(small)] if small else []))


def clip_by_global_norm(max_norm: float, norms: Norms) -> optax.GradientTransformation:
    """Return a transformation that scales gradients down where their global norm exceeds `max_norm`.

    Reference:
        Pascanu et al. 2012, arXiv 1211.5063.
    """

    def update(gradients: PyTree, params: PyTree) -> PyTree:
        scale = max_norm / jnp.maximum(compute_global_norm(gradients, norms), max_norm)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)

    return optax.stateless(update)
