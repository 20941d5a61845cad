"""Sums over batch-norm groups: the Pallas kernels, interpreted, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from podscale.kernels import reduction
from podscale.kernels.layer_spec import HOPPER, INTERPRET, REFERENCE, LayerSpec

# images, side, channels, groups: rows that no block divides, one group, channels that are no power of two
SHAPES = [(8, 7, 64, 2), (4, 7, 256, 4), (12, 5, 48, 3), (16, 14, 96, 1), (6, 9, 128, 3)]


def sample(images, side, channels, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(images, side, side, channels)), jnp.bfloat16)


def sum_groups(values, groups):
    return values.reshape(groups, -1, values.shape[-1]).sum(1)


@pytest.mark.parametrize(("images", "side", "channels", "groups"), SHAPES)
def test_sums_of_values_and_squares_are_those_of_each_group(images, side, channels, groups):
    z = sample(images, side, channels, 0)
    spec = LayerSpec(groups, kernels=INTERPRET)
    assert reduction.can_use_kernel(spec, z)
    wide = np.asarray(z, np.float64)
    expected = np.stack([sum_groups(wide, groups), sum_groups(wide**2, groups)])
    np.testing.assert_allclose(reduction.compute_sums(spec, z), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("way", ["mask", "affine", "raw shortcut"])
@pytest.mark.parametrize(("images", "side", "channels", "groups"), SHAPES)
def test_gradient_is_masked_and_summed_by_group(images, side, channels, groups, way):
    dy, x, shortcut = (sample(images, side, channels, seed) for seed in range(3))
    factor, offset = (np.random.default_rng(seed).normal(size=(groups, channels)) for seed in (3, 4))
    per_image = [np.repeat(v.astype(np.float32), images // groups, axis=0)[:, None, None] for v in (factor, offset)]
    y = jnp.maximum(np.asarray(x, np.float32) * per_image[0] + per_image[1], 0).astype(jnp.bfloat16)
    affine = (jnp.asarray(factor, jnp.float32), jnp.asarray(offset, jnp.float32)) if way == "affine" else ()
    other = shortcut if way == "raw shortcut" else None
    g, sums = reduction.backpropagate_relu(LayerSpec(groups, kernels=INTERPRET), dy, x, y, other, affine)
    expected = np.where(np.asarray(y, np.float64) > 0, np.asarray(dy, np.float64), 0)
    np.testing.assert_array_equal(np.asarray(g, np.float64), expected)
    factors = [1.0, np.asarray(x, np.float64)] + ([] if other is None else [np.asarray(other, np.float64)])
    for total, value in zip(sums, factors, strict=True):
        np.testing.assert_allclose(total, sum_groups(expected * value, groups), rtol=1e-5, atol=1e-3)


def test_what_kernels_cannot_do_is_left_to_the_reference():
    z = sample(4, 8, 64, 0)
    assert reduction.can_use_kernel(LayerSpec(2, kernels=HOPPER), z)
    assert not reduction.can_use_kernel(LayerSpec(2, kernels=REFERENCE), z)
    assert not reduction.can_use_kernel(LayerSpec(2, kernels=HOPPER), z.astype(jnp.float32))
    assert not reduction.can_use_kernel(LayerSpec(2, kernels=HOPPER), z[:, :2, :2])  # fewer rows than a block
    assert not reduction.can_use_kernel(LayerSpec(2, kernels=HOPPER), sample(4, 8, 40, 0))
