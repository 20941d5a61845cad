"""Which attention the kernels of `attention.py` compute; it does without Pallas, which takes a second to import."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podscale.kernels.layer_spec import TRITON, Kernels

DEPTH, TILE = 64, 64  # of a head; tokens that a warpgroup computes at once
FIRST_JAX = (0, 10, 2)  # whose Pallas has what the kernels need
MAX_TOKENS = 200  # two pairs of an image and a head with more would not fit shared memory


def can_attend(kernels: Kernels, x: Float[Array, "images tokens width"], heads: int, padding: int = 0) -> bool:
    """Return whether kernels for Hopper GPUs can compute attention over these tokens."""
    _, tokens, width = x.shape
    fits = width == heads * DEPTH and TILE <= tokens <= MAX_TOKENS and tokens % 8 == 0 and 0 <= padding < tokens
    is_known = jax.__version_info__ >= FIRST_JAX and (kernels == TRITON or kernels.are_interpreted)
    return fits and x.dtype == jnp.bfloat16 and is_known
