"""Distributed batch norm against NumPy in float64, for many ways of splitting one batch over 1 to 16 devices."""

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


def compute_reference(x, scale, bias, dy, span):
    """Return output, moments and gradients, group by group, by the chain rule of Ioffe and Szegedy (2015)."""
    y, dx = np.empty_like(x), np.empty_like(x)
    means, variances, dscale, dbias = [], [], 0.0, 0.0
    axes = (0, 1, 2)
    for start in range(0, len(x), span):
        group = slice(start, start + span)
        mean, var = x[group].mean(axes), x[group].var(axes)
        centered, root = x[group] - mean, np.sqrt(var + EPSILON)
        y[group] = centered / root * scale + bias
        dnormal = dy[group] * scale
        dvar = (dnormal * centered).sum(axes) * -0.5 * root**-3
        dmean = -dnormal.sum(axes) / root - 2 * dvar * centered.mean(axes)
        dx[group] = dnormal / root + (2 * dvar * centered + dmean) / centered[..., 0].size
        dscale, dbias = dscale + (dy[group] * centered / root).sum(axes), dbias + dy[group].sum(axes)
        means.append(mean)
        variances.append(var)
    return y, np.stack([np.mean(means, 0), np.mean(variances, 0)]), dx, dscale, dbias


def compute_on_pod(values, shape, span, dtype):
    """Return the same from a pod: outputs by position, moments and parameter gradients summed over the pod."""
    torus = pod.make_pod(jax.devices(), shape)
    changes = {"batch.size": IMAGES, "batch.span": span, "data.lanes": 1}
    layout = plan.make_plan(recipes.override_recipe(recipes.load_recipe(), changes), torus, Counts(1000, 100, 10))

    def local(x, scale, bias, dy):
        (y, moments), pull = jax.vjp(lambda *a: normalize(*a, layout.groups, EPSILON), x, scale, bias)
        dx, dscale, dbias = pull((dy, jnp.zeros_like(moments)))
        return y, jax.lax.pmean(moments, ALL_AXES), dx, *jax.lax.psum((dscale, dbias), ALL_AXES)

    data = P(BATCH_AXES)
    call = jax.shard_map(
        local,
        mesh=torus.mesh(layout.tile),
        in_specs=(data, P(), P(), data),
        out_specs=(data, P(), data, P(), P()),
        check_vma=False,
    )
    x, scale, bias, dy = values
    wide = jnp.promote_types(dtype, jnp.float32)
    return [
        np.asarray(v) for v in jax.jit(call)(x.astype(dtype), scale.astype(wide), bias.astype(wide), dy.astype(dtype))
    ]


@pytest.mark.sample(20)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("span", SPANS)
def test_any_split_of_a_batch_normalizes_the_same_groups(values, shape, span):
    with jax.enable_x64(True):
        for actual, expected in zip(
            compute_on_pod(values, shape, span, np.float64), compute_reference(*values, span), strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", ["1x1", "2x2"])
def test_float32_matches_the_reference_to_rounding(values, shape):
    for actual, expected in zip(
        compute_on_pod(values, shape, 8, np.float32), compute_reference(*values, 8), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def test_statistics_are_float32_under_bfloat16(values):
    x, scale, bias, dy = values
    rounded = tuple(np.asarray(v.astype(jnp.bfloat16), np.float64) for v in (x, dy))
    exact = compute_reference(rounded[0], scale, bias, rounded[1], 16)
    y, moments, dx, dscale, dbias = compute_on_pod(values, "2x2", 16, jnp.bfloat16)
    assert (y.dtype, dx.dtype, moments.dtype, dscale.dtype) == (jnp.bfloat16, jnp.bfloat16, np.float32, np.float32)
    np.testing.assert_allclose(moments, exact[1], rtol=1e-6, atol=1e-6)  # far finer than bfloat16's 4e-3
    np.testing.assert_allclose(dscale, exact[3], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dbias, exact[4], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y.astype(np.float32), exact[0], rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(dx.astype(np.float32), exact[2], rtol=1e-2, atol=2e-3)


def test_one_message_forward_and_one_backward():
    torus = pod.make_pod(jax.devices(), "2x2")
    groups = Groups(4, ("y", "x", "core"))
    grad = jax.grad(lambda x, s, b: (normalize(x, s, b, groups)[0] ** 3).sum(), argnums=(0, 1, 2))
    mapped = jax.shard_map(
        grad,
        mesh=torus.mesh((2, 2)),
        in_specs=(P(BATCH_AXES), P(), P()),
        out_specs=(P(BATCH_AXES), P(), P()),
        check_vma=False,
    )
    program = str(jax.make_jaxpr(mapped)(jnp.ones((16, 2, 2, 3)), jnp.ones(3), jnp.ones(3)))
    assert program.count("psum") == 2


def test_constant_channel_gives_its_bias_and_finite_gradients():
    x = jnp.full((8, 2, 2, 3), 7.0)
    (y, _), pull = jax.vjp(lambda x: normalize(x, jnp.ones(3), jnp.full(3, 0.5)), x)
    np.testing.assert_allclose(y, 0.5, atol=1e-2)
    assert np.isfinite(pull((jnp.ones_like(x), jnp.zeros((2, 3))))[0]).all()


def test_evaluation_uses_the_running_statistics_and_training_does_not_change_them():
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
    updated = batch_norm.update_running_statistics(stats, moments, 0.9)["a"]
    np.testing.assert_allclose(updated["mean"], [0.1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(updated["var"], [1.2, 1.3], rtol=1e-6)


class FlaxModel(nnx.Module):
    """A user's model with batch norms of flax, in an attribute and in a list."""

    def __init__(self, **settings):
        rngs = nnx.Rngs(0)
        self.first = nnx.BatchNorm(3, rngs=rngs, **settings)
        self.others = nnx.List([nnx.BatchNorm(3, rngs=rngs, **settings)])

    def __call__(self, x):
        return self.others[0](self.first(x))


def test_replaced_flax_batch_norms_compute_the_same():
    original = FlaxModel()
    original.first.scale[...] = jnp.array([1.0, 2.0, 3.0])
    x = jax.random.normal(jax.random.key(0), (8, 2, 2, 3))
    expected = original(x)  # flax's batch norm starts in training mode
    replaced = batch_norm.replace_batch_norms(FlaxModel())
    replaced.first.scale[...] = jnp.array([1.0, 2.0, 3.0])
    replaced.train()
    assert isinstance(replaced.first, BatchNorm)
    assert isinstance(replaced.others[0], BatchNorm)
    np.testing.assert_allclose(replaced(x), expected, atol=1e-5)


def test_flax_batch_norm_without_scale_is_refused():
    with pytest.raises(UserError, match="scale and a bias"):
        batch_norm.replace_batch_norms(FlaxModel(use_scale=False))


@pytest.mark.parametrize("span", [8, 32])
def test_fused_activation_and_its_gradient_match_one_after_the_layer(values, span):
    with jax.enable_x64(True):
        x, scale, bias, dy = map(jnp.asarray, values)

        def activate_after(x, scale, bias):
            y, moments = normalize(x, scale, bias, Groups(span), EPSILON)
            return (jnp.tanh(y) * dy).sum(), moments

        def activate_inside(x, scale, bias):
            y, moments = normalize(x, scale, bias, Groups(span), EPSILON, jnp.tanh)
            return (y * dy).sum(), moments

        ours, expected = (
            jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(x, scale, bias)
            for f in (activate_inside, activate_after)
        )
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_evaluation_applies_the_activation():
    layer = BatchNorm(3)
    x = jax.random.normal(jax.random.key(0), (2, 2, 2, 3))
    np.testing.assert_array_equal(layer(x, activation=jnp.tanh), jnp.tanh(layer(x)))
