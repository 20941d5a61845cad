"""Fused layers: the reference implementation against autodiff in float64, and the Pallas kernels against both."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.closeness import assert_close

from podscale.kernels import fused, reference
from podscale.kernels.fused import RawOutput
from podscale.kernels.layer_spec import INTERPRET, REFERENCE, LayerSpec

KINDS = {
    "no normalization": (False, "none"),
    "normalized": (True, "none"),
    "with a shortcut": (True, "array"),
    "with a raw shortcut": (True, "raw"),
}
SIZES = [(4, 8, 128, 64), (8, 8, 64, 384)]  # images, side, channels in and out; two groups


def sample_layer(images, side, inputs, outputs, dtype, groups=2):
    """Return random inputs, parameters and cotangents of a layer."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    image_shape, wide = (images, side, side, inputs), jnp.promote_types(dtype, jnp.float32)
    channel = partial(normal, groups, inputs)
    return {
        "x": normal(*image_shape),
        "affine": (channel().astype(wide), channel().astype(wide)),
        "shortcut": normal(*image_shape),
        "shortcut_affine": (channel().astype(wide), channel().astype(wide)),
        "kernel": normal(1, 1, inputs, outputs) / np.sqrt(inputs).astype(dtype),
        "dy": normal(*image_shape),
        "dz": normal(images, side, side, outputs),
        "dsums": normal(2, groups, outputs).astype(wide) / 100,
        "factor": normal(groups, outputs).astype(wide),
    }


def select_inputs(kind, numbers):
    """Return the arguments that a layer of this kind has."""
    affine, shortcut = KINDS[kind]
    return (
        numbers["x"],
        numbers["affine"] if affine else (),
        None if shortcut == "none" else numbers["shortcut"],
        numbers["shortcut_affine"] if shortcut == "raw" else (),
        numbers["kernel"],
    )


@partial(jax.jit, static_argnames="kind")
def compute_by_definition(kind, numbers):
    """Return outputs and gradients in float64, each step written out and differentiated by JAX."""
    numbers = jax.tree.map(lambda v: v.astype(jnp.float64), numbers)
    groups = numbers["factor"].shape[0]

    def spread(channels, like):
        return jnp.repeat(channels, like.shape[0] // groups, axis=0)[:, None, None]

    def function(x, affine, shortcut, shortcut_affine, kernel):
        y = x
        if affine:
            y = x * spread(affine[0], x) + spread(affine[1], x)
            if shortcut is not None:
                y += (
                    shortcut * spread(shortcut_affine[0], x) + spread(shortcut_affine[1], x)
                    if shortcut_affine
                    else shortcut
                )
            y = jax.nn.relu(y)
        z = jnp.einsum("nhwi,io->nhwo", y, kernel[0, 0])
        grouped = z.reshape(groups, -1, z.shape[-1])
        return y, z, jnp.stack([grouped.sum(1), (grouped**2).sum(1)])

    outputs, pull = jax.vjp(function, *select_inputs(kind, numbers))
    dz = numbers["dz"] * spread(numbers["factor"], numbers["dz"])
    return outputs, pull((numbers["dy"], dz, numbers["dsums"]))


@partial(jax.jit, static_argnames=("kind", "kernels"))
def compute_by_layers(kind, numbers, kernels):
    """Return outputs and gradients of a fused layer."""
    spec = LayerSpec(numbers["factor"].shape[0], keep_input=True, kernels=kernels)
    inputs = select_inputs(kind, numbers)

    def function(x, affine, shortcut, shortcut_affine, kernel):
        ones = jax.tree.map(jnp.ones_like, numbers["affine"][0])
        raw = RawOutput(shortcut, None, ones) if shortcut_affine else shortcut
        y, out = fused.apply_layer(
            spec, RawOutput(x, None, ones) if affine else x, affine, raw, shortcut_affine, kernel
        )
        return y, out.values, out.sums, out.factor

    (y, z, sums, _), pull = jax.vjp(function, *inputs)
    dx, *others = pull((numbers["dy"], numbers["dz"], tuple(numbers["dsums"]), numbers["factor"]))
    return (y, z, jnp.stack(sums)), (dx, *others)


@partial(jax.jit, static_argnames="kind")
def apply_factors(kind, numbers, gradients):
    """Multiply gradients by raw arrays, which come without their factors, by these factors."""
    dx, daffine, dshortcut, dshortcut_affine, dkernel = gradients

    def multiply(g, factor):
        return g.astype(jnp.float64) * jnp.repeat(factor, g.shape[0] // factor.shape[0], axis=0)[:, None, None]

    dx = multiply(dx, numbers["affine"][0]) if KINDS[kind][0] else dx
    dshortcut = multiply(dshortcut, numbers["shortcut_affine"][0]) if dshortcut_affine else dshortcut
    return dx, daffine, dshortcut, dshortcut_affine, dkernel


@pytest.mark.parametrize("kind", KINDS)
def test_reference_matches_the_definition(kind):
    with jax.enable_x64(True):
        numbers = sample_layer(*SIZES[0], jnp.float64)
        outputs, gradients = compute_by_layers(kind, numbers, REFERENCE)
        assert_close((outputs, apply_factors(kind, numbers, gradients)), compute_by_definition(kind, numbers), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_match_the_definition_to_bfloat16_precision(kind, size):
    numbers = sample_layer(*size, jnp.bfloat16)
    outputs, gradients = compute_by_layers(kind, numbers, INTERPRET)
    with jax.enable_x64(True):
        assert_close((outputs, apply_factors(kind, numbers, gradients)), compute_by_definition(kind, numbers), 0.03)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["with a raw shortcut"])
def test_kernels_match_the_reference_closely(kind):
    numbers = sample_layer(*SIZES[0], jnp.bfloat16)
    assert_close(compute_by_layers(kind, numbers, INTERPRET), compute_by_layers(kind, numbers, REFERENCE), 0.01)


def test_reference_sums_are_by_group():
    z = jnp.arange(16.0).reshape(4, 2, 1, 2)
    np.testing.assert_array_equal(reference.compute_sums(LayerSpec(2), z)[0], [[12, 16], [44, 48]])
