"""Which layers Pallas kernels compute."""

import jax
import jax.numpy as jnp

from podscale.kernels import pointwise
from podscale.kernels.layer_spec import HOPPER, INTERPRET, REFERENCE, LayerSpec


def test_kernels_are_used_for_large_products_in_bfloat16():
    def can_use_kernel(images=64, dtype=jnp.bfloat16, size=1, **fields):
        x, kernel = jax.ShapeDtypeStruct((images, 56, 56, 64), dtype), jax.ShapeDtypeStruct((size, size, 64, 64), dtype)
        return pointwise.can_use_kernel(LayerSpec(1, **{"kernels": HOPPER} | fields), x, kernel)

    assert can_use_kernel()
    assert not can_use_kernel(kernels=REFERENCE)
    assert not can_use_kernel(dtype=jnp.float32)
    assert not can_use_kernel(stride=2)
    assert not can_use_kernel(size=3, padding=1)
    assert not can_use_kernel(images=5)  # fewer tiles than a GPU has multiprocessors
    assert can_use_kernel(images=5, kernels=INTERPRET)
