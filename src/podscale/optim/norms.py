"""Norms of arrays and trees, and clipping by them.

Optimizers take a function `Norms` for the norms of whole arrays. Where a device holds only a part of each array
(`parallel/sharded.py`), another function that sums over the pod takes the place of `compute_norms`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

Norms = Callable[[Any], Any]  # a tree of arrays -> the tree of their norms


def compute_norm(x: jax.Array) -> jax.Array:
    """Return the Euclidean norm of an array, in float32 or wider."""
    return jnp.linalg.norm(x.astype(jnp.promote_types(x.dtype, jnp.float32)).ravel())


def compute_norm_unflattened(x: jax.Array) -> jax.Array:
    """Return the same without flattening the array, for which a GPU may have to reorder a kernel in memory."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(wide * wide))


def compute_norms(tree: Any) -> Any:
    """Return the norm of every array of a tree."""
    return jax.tree.map(compute_norm, tree)


def compute_global_norm(tree: Any, norms: Norms = compute_norms) -> jax.Array:
    """Return the norm of all arrays of a tree together."""
    return jnp.linalg.norm(jnp.stack(jax.tree.leaves(norms(tree))))


def compute_joined_global_norm(tree: Any, norm: Callable[[jax.Array], jax.Array] = compute_norm) -> jax.Array:
    """Return the norm of all arrays of a tree together, for whole arrays.

    Small arrays are joined first, which saves a GPU a hundred tiny kernels.
    """
    leaves = jax.tree.leaves(tree)
    small = [leaf.ravel() for leaf in leaves if leaf.ndim < 2]
    arrays = [leaf for leaf in leaves if leaf.ndim > 1] + ([jnp.concatenate(small)] if small else [])
    return compute_global_norm(arrays, partial(jax.tree.map, norm))


def clip_by_global_norm(max_norm: float, norms: Norms) -> optax.GradientTransformation:
    """Return a transformation that scales gradients down where their global norm exceeds `max_norm`.

    Reference:
        Pascanu et al. 2012, arXiv 1211.5063.
    """

    def update(gradients: Any, params: Any) -> Any:
        scale = max_norm / jnp.maximum(compute_global_norm(gradients, norms), max_norm)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)

    return optax.stateless(update)
