"""Norms of arrays and trees, and clipping by them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Norms = Callable[[Any], Any]  # a tree of arrays -> the tree of their norms


def whole_norms(tree: Any) -> Any:
    """The norm of every array, in float32 or wider."""
    return jax.tree.map(norm, tree)


def global_norm(tree: Any, norms: Norms = whole_norms) -> jax.Array:
    """The norm of all arrays of a tree together."""
    return jnp.linalg.norm(jnp.stack(jax.tree.leaves(norms(tree))))


def whole_norm(tree: Any) -> jax.Array:
    """The same of whole arrays. The small ones are joined first, which spares a GPU a hundred tiny kernels."""
    leaves = jax.tree.leaves(tree)
    small = [leaf.ravel() for leaf in leaves if leaf.ndim < 2]
    return global_norm([leaf for leaf in leaves if leaf.ndim > 1] + ([jnp.concatenate(small)] if small else []))


def clip_by_global_norm(most: float, norms: Norms) -> optax.GradientTransformation:
    """Gradients scaled down where their norm, all together, is more than `most` (Pascanu et al. 2012, 1211.5063)."""

    def update(gradients: Any, params: Any) -> Any:
        scale = most / jnp.maximum(global_norm(gradients, norms), most)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)

    return optax.stateless(update)


def norm(x: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x.astype(jnp.promote_types(x.dtype, jnp.float32)).ravel())
