"""Norms of arrays and trees, and clipping by them.

Optimizers take a function `Norms` for the norms of whole arrays. Where a device holds only a part of each array
(`parallel/sharded.py`), another function that sums over the pod takes the place of `compute_norms`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

Norms = Callable[[PyTree], PyTree]  # a tree of arrays -> the tree of their norms
BLOCK = 128  # numbers of one array that are summed at once, after the sums of its columns
MAX_JOINED = 40  # arrays whose sums are joined: XLA computes padding within the kernel of up to 96 operands
ROW = 1024  # numbers of an array that a warp of a GPU sums; the kernels of wide networks are multiples of it
ROWS = 64  # sums of rows of one array that are summed at once


def compute_norms(tree: PyTree) -> PyTree:
    """Return the norm of every array of a tree.

    Those of matrices and kernels are computed together, because a GPU would need two kernels for each of them.
    """
    leaves, structure = jax.tree.flatten(tree)
    # Vectors by themselves: a rule that does not need their norms then costs nothing.
    norms = [None if leaf.ndim > 1 else jnp.sqrt(_sum_squares(leaf).sum()) for leaf in leaves]
    joined = [i for i, leaf in enumerate(leaves) if leaf.ndim > 1]
    for batch in (joined[i : i + MAX_JOINED] for i in range(0, len(joined), MAX_JOINED)):
        arrays = [leaves[i] for i in batch]
        squares = lax.platform_dependent(*arrays, cuda=_sum_squares_by_rows, default=_sum_squares_by_columns)
        for i, norm in zip(batch, jnp.sqrt(squares), strict=True):
            norms[i] = norm.astype(jnp.promote_types(leaves[i].dtype, jnp.float32))
    return jax.tree.unflatten(structure, norms)


def _sum_squares_by_columns(*arrays: Float[Array, "..."]) -> Float[Array, " arrays"]:
    """Return the sum of squares of each array: over all axes but the last, and then of all arrays together."""
    return sum_segments([_sum_squares(array) for array in arrays])


def _sum_squares_by_rows(*arrays: Float[Array, "..."]) -> Float[Array, " arrays"]:
    """Return the same, in three kernels on a GPU: rows of all arrays, in the order in which they lie in memory.

    GPUs hold the kernels of convolutions with the output channels first. Arrays that are no multiple of a row are
    summed by columns.
    """
    whole = [i for i, array in enumerate(arrays) if array.size % ROW == 0 and array.size]
    sums = dict(zip(whole, _sum_rows([arrays[i] for i in whole]), strict=True)) if whole else {}
    others = [i for i in range(len(arrays)) if i not in sums]
    sums |= dict(zip(others, sum_segments([_sum_squares(arrays[i]) for i in others]), strict=True)) if others else {}
    wide = jnp.result_type(*(sum_.dtype for sum_ in sums.values()))
    return jnp.stack([sums[i].astype(wide) for i in range(len(arrays))])


def _sum_rows(arrays: Sequence[Float[Array, "..."]]) -> Float[Array, " arrays"]:
    """Return the sum of squares of each array of whole rows."""
    wide = jnp.result_type(jnp.float32, *(array.dtype for array in arrays))
    pieces = []
    for array in arrays:
        ordered = array.transpose(3, 0, 1, 2) if array.ndim == 4 else array
        rows = ordered.astype(wide).reshape(-1, ROW)
        pieces += [rows, jnp.zeros((-len(rows) % ROWS, ROW), wide)]
    by_row = jnp.square(jnp.concatenate([piece for piece in pieces if piece.size])).sum(axis=1)
    return _add_blocks(by_row.reshape(-1, ROWS).sum(axis=1), [-(-array.size // (ROW * ROWS)) for array in arrays])


def sum_segments(vectors: Sequence[Float[Array, "_length"]]) -> Float[Array, "vectors"]:
    """Return the sum of each vector.

    All vectors lie in one array, each from a new block on. Blocks are summed, and then those of each vector, in the
    order of a table that is known when the program is compiled: three kernels on a GPU, whatever the vectors' lengths.
    """
    pieces = [piece for vector in vectors for piece in (vector, jnp.zeros(-vector.size % BLOCK, vector.dtype))]
    blocks = jnp.concatenate([piece for piece in pieces if piece.size]).reshape(-1, BLOCK).sum(axis=1)
    return _add_blocks(blocks, [-(-vector.size // BLOCK) for vector in vectors])


def _add_blocks(blocks: Float[Array, " blocks"], lengths: Sequence[int]) -> Float[Array, " arrays"]:
    """Return the sum of the blocks of each array, of which there are so many, one array after the other."""
    counts = np.array(lengths)
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
