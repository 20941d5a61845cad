"""The end of the stem: normalize, rectify and max-pool 3x3 windows at stride 2, without the maps in between.

The pixels come in blocks of 2x2, as many as there are windows: a window consists of its own block and of the adjacent
pixels of the blocks above and to the left of it. All loads and stores are then of whole rows of channels.

Forward, each window records which of its nine places was the largest, and the value there before normalization.
Backward, each pixel looks at the windows that contain it, at most two by two, for whether it was their largest, instead
of the windows scattering their gradients. The sums that the gradient through batch norm needs are over windows, a
quarter as many as pixels. Where several places are the largest, the first one counts, as in XLA's own gradient.

The gradient by the pixels is never written before batch norm's own gradient is applied to it: until then it travels as
the gradient by the windows and the places of their maxima, in the place of the gradients by `Windows`, two arrays that
the forward pass does not use (as `fused.RawOutput.factor` does).
"""

from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Num, UInt8

from podscale.kernels import reduction, reference, unpool, window_maxima
from podscale.kernels.fused import RawOutput, make_raw_output, make_unit_factor
from podscale.kernels.layer_spec import FactorAndOffset, LayerSpec, SumAndSquareSum, Sums

Blocks: TypeAlias = Float[Array, "images rows columns pixels"]  # of 2x2 pixels, 4 · channels
Maxima: TypeAlias = Float[Array, "images rows columns channels"]
Places: TypeAlias = UInt8[Array, "images rows columns channels"]
PLACE_DTYPE = jnp.float8_e4m3fn  # only types of real numbers have gradients; this one has a byte


def pool_reference(x: Blocks, affine: FactorAndOffset) -> Maxima:
    """Return what `normalize_and_pool` does, step by step."""
    images, rows, columns, channels = x.shape
    pixels = x.reshape(images, rows, columns, 2, 2, channels // 4).transpose(0, 1, 3, 2, 4, 5)
    y = reference.normalize_and_rectify(pixels.reshape(images, 2 * rows, 2 * columns, channels // 4), affine, None, ())
    return nnx.max_pool(y, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


class Windows(NamedTuple):
    """Zeros; what matters is what stands in the place of their gradients."""

    gradient: Maxima  # the gradient by the maximum of each window
    place: Maxima  # bits of 1 to 9: where it is; 0: the maximum is not above zero, and has no gradient


def make_raw_blocks(spec: LayerSpec, z: Blocks) -> tuple[RawOutput, Windows]:
    """Return a convolution's output, in blocks of 2x2 pixels, as a raw output for `normalize_and_pool`."""
    if not spec.output_sums:
        return make_raw_output(spec, z), _make_windows(z)
    z, sums, factor, windows = _attach_sums(spec, z)
    return RawOutput(z, sums, factor), windows


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach_sums(spec: LayerSpec, z: Blocks) -> tuple[Blocks, SumAndSquareSum, Float[Array, "groups pixels"], Windows]:
    sums, square_sums = reduction.compute_sums(spec, z)
    return z, (sums, square_sums), make_unit_factor(spec.groups, z), _make_windows(z)


def _attach_sums_backward(
    spec: LayerSpec,
    z: Blocks,
    cotangents: tuple[Blocks, SumAndSquareSum, Float[Array, "groups pixels"], Windows],
) -> tuple[Blocks]:
    _, dsums, factor, (dy, bits) = cotangents
    place = lax.bitcast_convert_type(bits, jnp.uint8)
    terms = factor, dsums[0], 2 * dsums[1]
    if unpool.can_use_kernel(spec, z):
        return (unpool.unpool_and_combine(spec, dy, place, z, terms),)
    return (reference.combine_gradient(_unpool(dy, place), z, terms),)


_attach_sums.defvjp(lambda spec, z: (_attach_sums(spec, z), z), _attach_sums_backward)


def _make_windows(z: Blocks) -> Windows:
    shape = (*z.shape[:-1], z.shape[-1] // 4)
    return Windows(jnp.zeros(shape, z.dtype), jnp.zeros(shape, PLACE_DTYPE))


def normalize_and_pool(spec: LayerSpec, x: RawOutput, windows: Windows, affine: FactorAndOffset) -> Maxima:
    """Return the maxima of all windows of the normalized and rectified input.

    Args:
        spec: of the layer; its convolution is not used.
        x: raw blocks of 2x2 pixels.
        windows: what `make_raw_blocks` returned with them.
        affine: factor and offset that normalize.
    """
    return _pool(spec, x.values, x.factor, windows, affine)


class PoolResiduals(NamedTuple):
    """What the gradient needs: where each window's maximum is, its value before normalization, and what normalizes."""

    place: Places
    raw_largest: Maxima
    affine: FactorAndOffset


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pool(
    spec: LayerSpec, x: Blocks, x_factor: Float[Array, "groups pixels"], windows: Windows, affine: FactorAndOffset
) -> Maxima:
    return _pool_forward(spec, x, x_factor, windows, affine)[0]


def _pool_forward(
    spec: LayerSpec, x: Blocks, x_factor: Float[Array, "groups pixels"], windows: Windows, affine: FactorAndOffset
) -> tuple[Maxima, PoolResiduals]:
    if unpool.can_use_kernel(spec, x):
        largest, place, raw_largest = window_maxima.find_maxima(spec, x, affine)
    else:
        largest, place, raw_largest = _find_maxima(x, affine)
    return largest, PoolResiduals(place, raw_largest, affine)


def _find_maxima(x: Blocks, affine: FactorAndOffset) -> tuple[Maxima, Places, Maxima]:
    """Return what `window_maxima.find_maxima` does."""
    images, rows, columns, channels = x.shape
    blocks = x.reshape(images, rows, columns, 2, 2, channels // 4)
    inner_row, inner_column = (jnp.arange(n) > 0 for n in (rows, columns))
    for k in range(9):
        down, right = divmod(k, 3)
        raw = blocks[:, :, :, (down + 1) % 2, (right + 1) % 2]
        if down == 0:
            raw = jnp.pad(raw, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :rows]  # the block above
        if right == 0:
            raw = jnp.pad(raw, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :columns]
        value = reference.normalize_and_rectify(raw, affine, None, ())
        # Outside the image there is 0, which is never more than what is inside, and takes no part in the gradient.
        if down == 0:
            value = jnp.where(inner_row[:, None, None], value, 0)
        if right == 0:
            value = jnp.where(inner_column[:, None], value, 0)
        if k == 0:
            largest, place, raw_largest = value, jnp.ones((), jnp.uint8), raw
        else:
            is_larger = value > largest
            largest, place, raw_largest = (
                jnp.maximum(value, largest),
                jnp.where(is_larger, jnp.uint8(k + 1), place),
                jnp.where(is_larger, raw, raw_largest),
            )
    place = jnp.where(largest > 0, place, jnp.uint8(0))
    # Compute all three now, or XLA keeps the eight maps of comparisons until the gradient needs the place.
    largest, place, raw_largest = lax.optimization_barrier((largest, place, raw_largest))
    return largest, place, raw_largest


def _pool_backward(
    spec: LayerSpec, residuals: PoolResiduals, dy: Maxima
) -> tuple[None, Float[Array, "groups pixels"], Windows, Sums]:
    place, raw_largest, affine = residuals
    sums = reduction.sum_relu_gradient(spec, dy, raw_largest, place)
    return None, jnp.tile(affine[0], 4), Windows(dy, lax.bitcast_convert_type(place, PLACE_DTYPE)), (sums[1], sums[0])


def _unpool(dy: Maxima, place: Places) -> Blocks:
    """Return the gradient by the blocks of pixels, from that by the windows and the place of each one's maximum."""
    images, rows, columns, channels = dy.shape
    # The places of a block's two rows (or columns) in the window that begins above the block, and in the next window.
    # The first of them lies in the first window only: 9 makes a place that no window has.
    places = np.array([[1, 2], [9, 0]])
    terms = []
    for down, right in np.ndindex(2, 2):
        own_place = 1 + 3 * places[down][:, None, None] + places[right][:, None]
        terms.append(jnp.where(_shift(place, down, right) == own_place, _shift(dy, down, right), 0))
    return jnp.reshape(sum(terms), (images, rows, columns, 4 * channels))


def _shift(
    x: Num[Array, "images rows columns channels"], down: int, right: int
) -> Num[Array, "images rows columns 1 1 channels"]:
    """Return the windows `down` below and `right` of each, 0 past the border."""
    x = jnp.pad(x, ((0, 0), (0, down), (0, right), (0, 0)))
    return x[:, down:, right:, None, None]


_pool.defvjp(_pool_forward, _pool_backward)
