"""The gradient of the stem's end as a Pallas kernel for GPUs: from windows to pixels, and through batch norm.

Every window and place is read by up to four programs' threads, which hit the cache; the pixels are read and written
once.
"""

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from podscale.kernels.layer_spec import INTERPRET, REFERENCE, LayerSpec

Maxima: TypeAlias = Float[Array, "images rows columns channels"]
Places: TypeAlias = UInt8[Array, "images rows columns channels"]
Blocks: TypeAlias = Float[Array, "images rows columns 4*channels"]  # of 2x2 pixels
BLOCK = 1024  # elements of a program's block, for each of the four pixels; with twice as many, 184 registers per thread
CHANNELS = 64  # of a block at most
WARPS = 4
MAX_ELEMENTS = 2**31  # offsets are 32-bit integers


def can_use_kernel(spec: LayerSpec, z: Float[Array, "images rows columns pixels"]) -> bool:
    """Return whether the windows of an array of blocks can be divided among programs."""
    is_divisible = z.shape[-1] % (4 * 16) == 0 and z.shape[0] % spec.groups == 0
    return spec.kernels != REFERENCE and z.dtype == jnp.bfloat16 and is_divisible and z.size < MAX_ELEMENTS


def unpool_and_combine(
    spec: LayerSpec, dy: Maxima, place: Places, z: Blocks, terms: tuple[Float[Array, "groups 4*channels"], ...]
) -> Blocks:
    """Return factor · d + offset + slope · z, where d is the gradient by the pixels, from that by the windows.

    Args:
        spec: the layer.
        dy: the gradient by each window's maximum.
        place: where that is, 1 to 9, or 0: it has no gradient.
        z: blocks of 2x2 pixels.
        terms: factor, offset and slope.
    """
    from jax.experimental import pallas as pl  # takes a second
    from jax.experimental.pallas import triton

    images, map_rows, map_columns, channels = dy.shape
    total = images * map_rows * map_columns
    width = min(CHANNELS, channels & -channels)
    group_size = total // spec.groups
    block = min(BLOCK // width, 1 << (group_size.bit_length() - 1))  # a power of two

    def body(gradient_ref: jax.Ref, place_ref: jax.Ref, z_ref: jax.Ref, *refs: jax.Ref) -> None:
        *term_refs, result_ref = refs
        group = pl.program_id(0)
        channel = pl.program_id(2) * width + lax.broadcasted_iota(jnp.int32, (1, width), 1)
        first = jnp.minimum(pl.program_id(1) * block, group_size - block)  # the last block may overlap another
        window = group * group_size + first + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
        row, column = lax.rem(lax.div(window, map_columns), map_rows), lax.rem(window, map_columns)

        neighbours = {}
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            is_inside = (row + down < map_rows) & (column + right < map_columns)
            at = jnp.minimum(window + down * map_columns + right, total - 1), channel
            place = jnp.where(is_inside, place_ref[at].astype(jnp.int32), 0)
            neighbours[down, right] = gradient_ref[at].astype(jnp.float32), place
        # The places of a block's two rows (or columns) in the window that begins above the block, and in the next.
        places = {0: {0: 1}, 1: {0: 2, 1: 0}}
        for pixel, (i, j) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
            d = jnp.zeros((block, width), jnp.float32)
            for down, place_down in places[i].items():
                for right, place_right in places[j].items():
                    gradient, place = neighbours[down, right]
                    d += jnp.where(place == 1 + 3 * place_down + place_right, gradient, 0.0)
            pixel_channel = pixel * channels + channel
            factor, offset, slope = (ref[group, pixel_channel] for ref in term_refs)
            values = z_ref[window, pixel_channel].astype(jnp.float32)
            result_ref[window, pixel_channel] = (factor * d + offset + slope * values).astype(result_ref.dtype)

    result = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((total, 4 * channels), z.dtype),
        grid=(spec.groups, math.ceil(group_size / block), channels // width),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=spec.kernels == INTERPRET,
        name="unpool_and_combine",
    )(dy.reshape(total, channels), place.reshape(total, channels), z.reshape(total, 4 * channels), *terms)
    return result.reshape(z.shape)
