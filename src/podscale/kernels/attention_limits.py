"""Which attention the kernels of `attention.py` compute; it does without Pallas, which takes a second to import."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from podscale.kernels.layer_spec import TRITON, Kernels

DEPTH, TILE = 64, 64  # of a head; tokens that a warpgroup computes at once
MAX_TOKENS = 200  # two pairs of an image and a head with more would not fit shared memory


def can_attend(kernels: Kernels, x: Float[Array, "images tokens width"], heads: int, padding: int = 0) -> bool:
    """Return whether kernels for Hopper GPUs can compute attention over these tokens."""
    _, tokens, width = x.shape
    fits = width == heads * DEPTH and TILE <= tokens <= MAX_TOKENS and tokens % 8 == 0 and 0 <= padding < tokens
    return fits and x.dtype == jnp.bfloat16 and (kernels == TRITON or kernels.are_interpreted)
