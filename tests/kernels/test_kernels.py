"""Fused layers: the plain twin against autodiff in float64, the Pallas kernels against both, and whole networks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from podscale import pod
from podscale import recipe as recipes
from podscale.kernels import blocking, fused, pointwise, pool, reference
from podscale.kernels.fused import Raw
from podscale.kernels.shape import Shape
from podscale.models import fused_resnet
from podscale.models.functional import functional
from podscale.models.resnet import BasicBlock, BottleneckBlock, ResNet
from podscale.parallel.batch_norm import BatchNorm, Groups, Moments
from podscale.pod import ALL_AXES, BATCH_AXES

KINDS = {
    "plain input": (False, "none"),
    "normalized": (True, "none"),
    "with a shortcut": (True, "array"),
    "with a raw shortcut": (True, "raw"),
}
SIZES = [(4, 8, 128, 64), (8, 8, 64, 384)]  # images, side, channels in and out; two groups


def drawn(images, side, inputs, outputs, dtype, groups=2):
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    picture, wide = (images, side, side, inputs), jnp.promote_types(dtype, jnp.float32)
    channel = partial(normal, groups, inputs)
    return {
        "x": normal(*picture),
        "affine": (channel().astype(wide), channel().astype(wide)),
        "rest": normal(*picture),
        "rest_affine": (channel().astype(wide), channel().astype(wide)),
        "kernel": normal(1, 1, inputs, outputs) / np.sqrt(inputs).astype(dtype),
        "dy": normal(*picture),
        "dz": normal(images, side, side, outputs),
        "dsums": normal(2, groups, outputs).astype(wide) / 100,
        "factor": normal(groups, outputs).astype(wide),
    }


def taken(kind, numbers):
    affine, rest = KINDS[kind]
    return (
        numbers["x"],
        numbers["affine"] if affine else (),
        None if rest == "none" else numbers["rest"],
        numbers["rest_affine"] if rest == "raw" else (),
        numbers["kernel"],
    )


def by_definition(kind, numbers):
    """Outputs and gradients in float64, each step written out and left to autodiff."""
    numbers = jax.tree.map(lambda v: v.astype(jnp.float64), numbers)
    groups = numbers["factor"].shape[0]

    def spread(channels, like):
        return jnp.repeat(channels, like.shape[0] // groups, axis=0)[:, None, None]

    def function(x, affine, rest, rest_affine, kernel):
        y = x
        if affine:
            y = x * spread(affine[0], x) + spread(affine[1], x)
            if rest is not None:
                y += rest * spread(rest_affine[0], x) + spread(rest_affine[1], x) if rest_affine else rest
            y = jax.nn.relu(y)
        z = jnp.einsum("nhwi,io->nhwo", y, kernel[0, 0])
        grouped = z.reshape(groups, -1, z.shape[-1])
        return y, z, jnp.stack([grouped.sum(1), (grouped**2).sum(1)])

    outputs, pull = jax.vjp(function, *taken(kind, numbers))
    dz = numbers["dz"] * spread(numbers["factor"], numbers["dz"])
    return outputs, pull((numbers["dy"], dz, numbers["dsums"]))


def by_layers(kind, numbers, kernels):
    shape = Shape(numbers["factor"].shape[0], keeps=True, kernels=kernels)
    inputs = taken(kind, numbers)

    def function(x, affine, rest, rest_affine, kernel):
        ones = jax.tree.map(jnp.ones_like, numbers["affine"][0])
        raw = Raw(rest, None, ones) if rest_affine else rest
        y, out = fused.layer(shape, Raw(x, None, ones) if affine else x, affine, raw, rest_affine, kernel)
        return y, out.values, out.sums, out.factor

    (y, z, sums, _), pull = jax.vjp(function, *inputs)
    dx, *others = pull((numbers["dy"], numbers["dz"], numbers["dsums"], numbers["factor"]))
    return (y, z, sums), (dx, *others)


def settled(kind, numbers, gradients):
    """Gradients by raw arrays, which come without their factors, as they are by definition."""
    dx, daffine, drest, drest_affine, dkernel = gradients

    def times(g, factor):
        return g.astype(jnp.float64) * jnp.repeat(factor, g.shape[0] // factor.shape[0], axis=0)[:, None, None]

    dx = times(dx, numbers["affine"][0]) if KINDS[kind][0] else dx
    drest = times(drest, numbers["rest_affine"][0]) if drest_affine else drest
    return dx, daffine, drest, drest_affine, dkernel


def close(found, wanted, tolerance):
    both = (map(partial(np.asarray, dtype=np.float64), jax.tree.leaves(tree)) for tree in (found, wanted))
    for one, other in zip(*both, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_twin_is_the_definition(kind):
    with jax.enable_x64(True):
        numbers = drawn(*SIZES[0], jnp.float64)
        outputs, gradients = by_layers(kind, numbers, "plain")
        close((outputs, settled(kind, numbers, gradients)), by_definition(kind, numbers), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_are_the_definition_to_the_precision_of_bfloat16(kind, size):
    numbers = drawn(*size, jnp.bfloat16)
    outputs, gradients = by_layers(kind, numbers, "interpret")
    with jax.enable_x64(True):
        close((outputs, settled(kind, numbers, gradients)), by_definition(kind, numbers), 0.03)


@pytest.mark.parametrize("kind", ["with a raw shortcut"])
def test_kernels_and_twin_agree_closely(kind):
    numbers = drawn(*SIZES[0], jnp.bfloat16)
    close(by_layers(kind, numbers, "interpret"), by_layers(kind, numbers, "plain"), 0.01)


def cut(rows, groups, depth, columns, lefts=2, extras=3, sums=2, computed=True):
    return blocking.cut(rows, groups, depth, columns, lefts, extras, sums, computed)


def test_what_does_not_fit_is_left_to_the_twin():
    assert cut(1000, 1, 64, 64) is None  # rows that tiles of 128 do not divide
    assert cut(64 * 49 * 4, 4, 2048, 512) is None
    assert cut(1024, 1, 96, 64) is None  # channels that boxes of 64 do not divide
    assert cut(1024, 1, 64, 32) is None
    assert cut(1024, 1, 2048, 512) is None  # more than shared memory holds


def test_kernels_are_for_large_products_in_bfloat16():
    def fits(images=64, dtype=jnp.bfloat16, size=1, **shape):
        x, kernel = jax.ShapeDtypeStruct((images, 56, 56, 64), dtype), jax.ShapeDtypeStruct((size, size, 64, 64), dtype)
        return pointwise.fits(Shape(1, **{"kernels": "hopper"} | shape), x, kernel)

    assert fits()
    assert not fits(kernels="plain")
    assert not fits(dtype=jnp.float32)
    assert not fits(stride=2)
    assert not fits(size=3, padding=1)
    assert not fits(images=5)  # fewer tiles than a GPU has multiprocessors
    assert fits(images=5, kernels="interpret")


def test_every_cut_fits_shared_memory():
    for depth in (64, 128, 256, 512, 1024, 2048):
        for columns in (64, 128, 256, 512, 1024, 2048):
            for lefts, extras, sums in ((1, 0, 2), (2, 0, 2), (2, 2, 2), (2, 4, 3)):
                found = cut(1 << 16, 4, depth, columns, lefts, extras, sums)
                assert found is None or found.bytes <= blocking.SHARED_BYTES
                assert found is None or found.part * found.parts == columns


# --- whole networks ----------------------------------------------------------------------------------------------


def network(block, stages, precision, stem="conv7"):
    config = recipes.Model(stem=stem, width=8, precision=precision)
    net, params, stats = functional(ResNet(block, stages, config, 10, nnx.Rngs(0)))
    # Scales that start at 0 would hide whatever comes before them.
    params = jax.tree.map(lambda v: v + 0.3 * jnp.asarray(np.random.default_rng(v.size).normal(size=v.shape)), params)
    return net, jax.tree.map(lambda v: v.astype(jnp.float64 if precision == "float64" else jnp.float32), params), stats


def trained(net, params, stats, images, groups, kernels):
    """Loss, its gradients, and the moments that batch norms saw."""

    def loss_of(params):
        model = net.model(params, stats)
        model.train()
        model.set_attributes(BatchNorm, groups=groups)
        logits = fused_resnet.forward(model, images, kernels) if kernels else model(images)
        moments = nnx.to_pure_dict(nnx.pop(model, Moments))
        return (logits * jnp.cos(jnp.arange(logits.size).reshape(logits.shape))).sum(), moments

    return jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)


STEMS = [
    (BasicBlock, "small", 32),
    pytest.param(BottleneckBlock, "space_to_depth", 32, marks=pytest.mark.slow),
    (BottleneckBlock, "space_to_depth", 34),
]


@pytest.mark.parametrize(("block", "stem", "size"), STEMS)
def test_a_chain_is_the_network(block, stem, size):
    with jax.enable_x64(True):
        net, params, stats = network(block, (2, 1), "float64", stem)
        images = jnp.asarray(np.random.default_rng(1).normal(size=(8, size, size, 3)))
        wanted = trained(net, params, stats, images, Groups(4), "")
        close(trained(net, params, stats, images, Groups(4), "plain"), wanted, 1e-8)


def test_a_chain_over_tiles_is_the_network():
    with jax.enable_x64(True):
        net, params, stats = network(BasicBlock, (1, 1), "float64", "small")
        images = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8, 8, 3)))
        mesh = pod.of(jax.devices()[:4], "2x2").mesh((1, 2))
        groups = Groups(0, pod.TILE)

        def local(images, kernels):
            (loss, moments), gradients = trained(net, params, stats, images, groups, kernels)
            return jax.lax.psum((loss, moments, gradients), ALL_AXES)

        def over(kernels):
            mapped = jax.shard_map(
                partial(local, kernels=kernels), mesh=mesh, in_specs=P(BATCH_AXES), out_specs=P(), check_vma=False
            )
            return jax.jit(mapped)(images)

        close(over("plain"), over(""), 1e-8)


@pytest.mark.parametrize(("block", "stem", "size"), STEMS)
def test_folded_batch_norms_are_the_network(block, stem, size):
    with jax.enable_x64(True):
        net, params, stats = network(block, (2, 1), "float64", stem)
        random = np.random.default_rng(1)
        stats = jax.tree.map(lambda v: jnp.asarray(random.uniform(0.5, 2, v.shape)), stats)
        images = jnp.asarray(random.normal(size=(4, size, size, 3)))
        wanted = jax.jit(net.evaluate)(params, stats, images)
        close(jax.jit(partial(net.evaluate, kernels="plain"))(params, stats, images), wanted, 1e-10)


def test_a_chain_whose_layers_are_frozen_is_the_network():
    net, params, stats = network(BottleneckBlock, (2, 1), "float32")
    images = jnp.asarray(np.random.default_rng(1).normal(size=(4, 32, 32, 3)), jnp.float32)
    model = net.model(params, stats)
    model.eval()
    chained = jax.jit(lambda images: fused_resnet.forward(model, images, "plain"))(images)
    close(chained, jax.jit(model.__call__)(images), 1e-4)


# --- the pool ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [3, 1000])  # with three, most windows have several largest places
def test_the_pool_and_its_gradient_are_the_twin(levels):
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x = jnp.asarray(random.integers(-levels, levels, (4, 4, 3, 12)), jnp.float64)
        dy = jnp.asarray(random.normal(size=(4, 4, 3, 3)))
        affine = tuple(jnp.asarray(random.normal(size=(2, 3))) for _ in range(2))
        ones = jnp.ones((2, 12))
        y, pull = jax.vjp(lambda x, factor, affine: pool.pooled(2, Raw(x, None, factor), affine), x, ones, affine)
        wanted, wanted_pull = jax.vjp(pool.twin, x, affine)
        close(y, wanted, 1e-15)
        g, factor, daffine = pull(dy)
        dx = g * jnp.repeat(factor, 2, axis=0)[:, None, None]
        close((dx, daffine), wanted_pull(dy), 1e-12)


def test_sums_of_the_twin_are_by_group():
    z = jnp.arange(16.0).reshape(4, 2, 1, 2)
    np.testing.assert_array_equal(reference.counted(Shape(2), z)[0], [[12, 16], [44, 48]])
