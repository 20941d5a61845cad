"""The end of the stem as a Pallas kernel for GPUs: normalize, rectify, and find the maximum of every window.

A window's nine pixels come from up to four blocks of 2x2, of which neighbours in the same program hit the cache. XLA's
own kernel reads them at two thirds of the memory's rate.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from podscale.kernels.layer_spec import FactorAndOffset, LayerSpec

Maxima: TypeAlias = Float[Array, "images rows columns channels"]
Places: TypeAlias = UInt8[Array, "images rows columns channels"]
Blocks: TypeAlias = Float[Array, "images rows columns pixels"]  # of 2x2 pixels, 4 · channels
Block: TypeAlias = Float[Array, "windows block_channels"]
BLOCK = 1024  # elements of a program's block
CHANNELS = 64  # of a block at most
WARPS = 4


def find_maxima(spec: LayerSpec, x: Blocks, affine: FactorAndOffset) -> tuple[Maxima, Places, Maxima]:
    """Return each window's maximum after normalizing and rectifying, where it is, and its value before.

    Args:
        spec: the layer.
        x: raw blocks of 2x2 pixels, for which `unpool.can_use_kernel`.
        affine: factor and offset that normalize.

    Returns:
        the maxima; their places, 1 to 9, the first of equals, or 0 where none is above zero; raw maxima.
    """
    from jax.experimental import pallas as pl  # takes a second
    from jax.experimental.pallas import triton

    images, map_rows, map_columns, pixels = x.shape
    channels = pixels // 4
    total = images * map_rows * map_columns
    width = min(CHANNELS, channels & -channels)
    group_size = total // spec.groups
    block = min(BLOCK // width, 1 << (group_size.bit_length() - 1))  # a power of two

    def body(
        x_ref: jax.Ref, factor_ref: jax.Ref, offset_ref: jax.Ref, largest_ref: jax.Ref, place_ref: jax.Ref, raw: jax.Ref
    ) -> None:
        group = pl.program_id(0)
        channel = pl.program_id(2) * width + lax.broadcasted_iota(jnp.int32, (1, width), 1)
        first = jnp.minimum(pl.program_id(1) * block, group_size - block)  # the last block may overlap another
        window = group * group_size + first + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
        row, column = lax.rem(lax.div(window, map_columns), map_rows), lax.rem(window, map_columns)
        factor, offset = factor_ref[group, channel], offset_ref[group, channel]

        def read_place(down: int, right: int) -> tuple[Block, Block]:
            """Return a pixel of each window, raw and rectified; outside the image both are 0."""
            is_above, is_left = down == 0, right == 0
            is_inside = (row >= is_above) & (column >= is_left)
            at = jnp.maximum(window - is_above * map_columns - is_left, 0)
            pixel = (down + 1) % 2 * 2 + (right + 1) % 2
            values = jnp.where(is_inside, x_ref[at, pixel * channels + channel].astype(jnp.float32), 0.0)
            rectified = jnp.maximum(values * factor + offset, 0.0).astype(x.dtype).astype(jnp.float32)
            return values, jnp.where(is_inside, rectified, 0.0)

        largest, place, raw_largest = _select_largest(read_place)
        largest_ref[window, channel] = largest.astype(x.dtype)
        place_ref[window, channel] = place.astype(jnp.uint8)
        raw[window, channel] = raw_largest.astype(x.dtype)

    shape, dtypes = (images, map_rows, map_columns, channels), (x.dtype, jnp.uint8, x.dtype)
    results = pl.pallas_call(
        body,
        out_shape=tuple(jax.ShapeDtypeStruct((total, channels), dtype) for dtype in dtypes),
        grid=(spec.groups, math.ceil(group_size / block), channels // width),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=spec.kernels.are_interpreted,
        name="find_maxima",
    )(x.reshape(total, pixels), *affine)
    largest, place, raw_largest = (result.reshape(shape) for result in results)
    return largest, place, raw_largest


def _select_largest(
    read_place: Callable[[int, int], tuple[Block, Block]],
) -> tuple[Block, Int[Array, "windows block_channels"], Block]:
    """Return the largest of nine rectified values, its place, and its raw value."""
    raw_largest, largest = read_place(0, 0)
    place = jnp.ones(largest.shape, jnp.int32)
    for k in range(1, 9):
        raw, value = read_place(*divmod(k, 3))
        is_larger = value > largest
        largest = jnp.maximum(value, largest)
        place = jnp.where(is_larger, k + 1, place)
        raw_largest = jnp.where(is_larger, raw, raw_largest)
    return largest, jnp.where(largest > 0, place, 0), raw_largest
