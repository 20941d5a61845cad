"""Distributed batch norm against NumPy in float64, for every way of splitting one batch over 1 to 16 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from podscale import plan, pod
from podscale import recipe as recipes
from podscale.errors import UserError
from podscale.parallel import batch_norm
from podscale.parallel.batch_norm import BatchNorm, Groups, normalize
from podscale.plan import Counts
from podscale.pod import ALL_AXES, BATCH_AXES

IMAGES, CHANNELS, EPSILON = 32, 5, 1e-5
SHAPES = ["1x1", "1x2", "2x1", "2x2", "1x4", "2x4", "4x2", "8x1", "4x4", "2x8", "16x1"]
SPANS = [1, 2, 4, 8, 16, 32]


@pytest.fixture(scope="module")
def values():
    random = np.random.default_rng(0)
    x = random.normal(1.5, 2.0, (IMAGES, 3, 2, CHANNELS))
    return x, random.normal(size=CHANNELS), random.normal(size=CHANNELS), random.normal(size=x.shape)


def reference(x, scale, bias, dy, span):
    """Forward, moments and gradients, group by group; the gradient by the chain rule of Ioffe and Szegedy (2015)."""
    y, dx = np.empty_like(x), np.empty_like(x)
    means, variances, dscale, dbias = [], [], 0.0, 0.0
    axes = (0, 1, 2)
    for start in range(0, len(x), span):
        here = slice(start, start + span)
        mean, var = x[here].mean(axes), x[here].var(axes)
        centred, root = x[here] - mean, np.sqrt(var + EPSILON)
        y[here] = centred / root * scale + bias
        dnormal = dy[here] * scale
        dvar = (dnormal * centred).sum(axes) * -0.5 * root**-3
        dmean = -dnormal.sum(axes) / root - 2 * dvar * centred.mean(axes)
        dx[here] = dnormal / root + (2 * dvar * centred + dmean) / centred[..., 0].size
        dscale, dbias = dscale + (dy[here] * centred / root).sum(axes), dbias + dy[here].sum(axes)
        means.append(mean)
        variances.append(var)
    return y, np.stack([np.mean(means, 0), np.mean(variances, 0)]), dx, dscale, dbias


def distributed(values, shape, span, dtype):
    """The same over a pod: outputs in the order of positions, moments and parameter gradients summed over the pod."""
    here = pod.of(jax.devices(), shape)
    changes = {"batch.size": IMAGES, "batch.span": span, "data.lanes": 1}
    mapped = plan.make_plan(recipes.override(recipes.load(), changes), here, Counts(1000, 100, 10))

    def local(x, scale, bias, dy):
        (y, moments), pull = jax.vjp(lambda *a: normalize(*a, mapped.groups, EPSILON), x, scale, bias)
        dx, dscale, dbias = pull((dy, jnp.zeros_like(moments)))
        return y, jax.lax.pmean(moments, ALL_AXES), dx, *jax.lax.psum((dscale, dbias), ALL_AXES)

    data = P(BATCH_AXES)
    call = jax.shard_map(
        local,
        mesh=here.mesh(mapped.tile),
        in_specs=(data, P(), P(), data),
        out_specs=(data, P(), data, P(), P()),
        check_vma=False,
    )
    x, scale, bias, dy = values
    wide = jnp.promote_types(dtype, jnp.float32)
    return [
        np.asarray(v) for v in jax.jit(call)(x.astype(dtype), scale.astype(wide), bias.astype(wide), dy.astype(dtype))
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("span", SPANS)
def test_any_split_of_a_batch_normalizes_the_same_groups(values, shape, span):
    with jax.enable_x64(True):
        for ours, theirs in zip(distributed(values, shape, span, np.float64), reference(*values, span), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", ["1x1", "2x2"])
def test_float32_is_right_to_rounding(values, shape):
    for ours, theirs in zip(distributed(values, shape, 8, np.float32), reference(*values, 8), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_statistics_are_float32_under_bfloat16(values):
    x, scale, bias, dy = values
    rounded = tuple(np.asarray(v.astype(jnp.bfloat16), np.float64) for v in (x, dy))
    exact = reference(rounded[0], scale, bias, rounded[1], 16)
    y, moments, dx, dscale, dbias = distributed(values, "2x2", 16, jnp.bfloat16)
    assert (y.dtype, dx.dtype, moments.dtype, dscale.dtype) == (jnp.bfloat16, jnp.bfloat16, np.float32, np.float32)
    np.testing.assert_allclose(moments, exact[1], rtol=1e-6, atol=1e-6)  # far finer than bfloat16's 4e-3
    np.testing.assert_allclose(dscale, exact[3], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dbias, exact[4], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y.astype(np.float32), exact[0], rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(dx.astype(np.float32), exact[2], rtol=1e-2, atol=2e-3)


def test_one_message_forward_and_one_backward():
    here = pod.of(jax.devices(), "2x2")
    groups = Groups(4, ("y", "x", "core"))
    grad = jax.grad(lambda x, s, b: (normalize(x, s, b, groups)[0] ** 3).sum(), argnums=(0, 1, 2))
    mapped = jax.shard_map(
        grad,
        mesh=here.mesh((2, 2)),
        in_specs=(P(BATCH_AXES), P(), P()),
        out_specs=(P(BATCH_AXES), P(), P()),
        check_vma=False,
    )
    program = str(jax.make_jaxpr(mapped)(jnp.ones((16, 2, 2, 3)), jnp.ones(3), jnp.ones(3)))
    assert program.count("psum") == 2


def test_a_constant_channel_gives_its_bias_and_finite_gradients():
    x = jnp.full((8, 2, 2, 3), 7.0)
    (y, _), pull = jax.vjp(lambda x: normalize(x, jnp.ones(3), jnp.full(3, 0.5)), x)
    np.testing.assert_allclose(y, 0.5, atol=1e-2)
    assert np.isfinite(pull((jnp.ones_like(x), jnp.zeros((2, 3))))[0]).all()


def test_evaluation_uses_the_running_statistics_and_training_leaves_them_alone():
    layer = BatchNorm(3)
    layer.mean[...], layer.var[...] = jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 4.0, 4.0])
    x = jnp.ones((2, 2, 2, 3))
    expected = (1 - np.array([1.0, 2.0, 3.0])) / np.sqrt(4 + EPSILON)
    np.testing.assert_allclose(layer(x)[0, 0, 0], expected, rtol=1e-6)
    layer.train()
    layer(x)
    np.testing.assert_array_equal(layer.mean[...], [1.0, 2.0, 3.0])
    np.testing.assert_allclose(nnx.pop(layer, batch_norm.Moments)["moments"][...], [[1, 1, 1], [0, 0, 0]], atol=1e-6)


def test_running_statistics_move_by_the_momentum():
    stats = {"a": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}
    moments = {"a": {"moments": jnp.array([[1.0, 2.0], [3.0, 4.0]])}}
    moved = batch_norm.running_update(stats, moments, 0.9)["a"]
    np.testing.assert_allclose(moved["mean"], [0.1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(moved["var"], [1.2, 1.3], rtol=1e-6)


class FlaxModel(nnx.Module):
    """A user's model with flax's own batch norm, in an attribute and in a list."""

    def __init__(self, **settings):
        rngs = nnx.Rngs(0)
        self.first = nnx.BatchNorm(3, rngs=rngs, **settings)
        self.rest = nnx.List([nnx.BatchNorm(3, rngs=rngs, **settings)])

    def __call__(self, x):
        return self.rest[0](self.first(x))


def test_flax_batch_norms_become_distributed_ones_and_compute_the_same():
    theirs = FlaxModel()
    theirs.first.scale[...] = jnp.array([1.0, 2.0, 3.0])
    x = jax.random.normal(jax.random.key(0), (8, 2, 2, 3))
    expected = theirs(x)  # flax's own starts in training mode
    ours = batch_norm.distribute(FlaxModel())
    ours.first.scale[...] = jnp.array([1.0, 2.0, 3.0])
    ours.train()
    assert isinstance(ours.first, BatchNorm)
    assert isinstance(ours.rest[0], BatchNorm)
    np.testing.assert_allclose(ours(x), expected, atol=1e-5)


def test_a_flax_batch_norm_without_scale_is_refused():
    with pytest.raises(UserError, match="scale and a bias"):
        batch_norm.distribute(FlaxModel(use_scale=False))
