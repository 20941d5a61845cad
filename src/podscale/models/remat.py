"""Apply layers with or without keeping what they compute for the backward pass."""

from collections.abc import Callable, Iterable

import jax
from flax import nnx


def apply_layers(layers: Iterable[Callable[[jax.Array], jax.Array]], x: jax.Array, remat: bool) -> jax.Array:
    """Apply layers one after the other.

    With `remat`, the backward pass keeps the input of each alone and computes what is inside again (Chen et al. 2016,
    arXiv 1604.06174).
    """
    for layer in layers:
        x = _apply_with_remat(layer, x) if remat else layer(x)
    return x


@nnx.remat
def _apply_with_remat(layer: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return layer(x)
