"""Batch norm of modules whose sums are Pallas kernels, interpreted, against the same in float64 by XLA's sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from podscale import pod
from podscale.kernels.elementwise import is_differentiable
from podscale.kernels.group_sums import KernelSums
from podscale.kernels.layer_spec import BATCH_NORM, INTERPRET, REFERENCE
from podscale.models import cifarnet
from podscale.parallel.batch_norm import BatchNorm, Groups, make_tiled_groups, normalize
from podscale.pod import ALL_AXES, BATCH_AXES

# images, side, channels, groups: rows that no block divides, rows that are joined, channels that are no power of two
SHAPES = [
    (8, 7, 64, 2),
    (4, 7, 256, 4),
    (12, 5, 48, 3),
    (16, 6, 24, 4),
    (16, 14, 96, 1),
    (6, 12, 144, 3),
    (64, 4, 512, 1),
]
ACTIVATIONS = {
    "none": None,
    "relu": nnx.relu,
    "relu6": jax.nn.relu6,
    "silu": jax.nn.silu,
    "tanh gelu": jax.nn.gelu,
    "gelu with a barrier": cifarnet.gelu,
    "cubic gate": cifarnet.cubic_gelu,
}


def sample(images, side, channels):
    random = np.random.default_rng(0)
    x, dy = (random.normal(mean, 2.0, (images, side, side, channels)) for mean in (1.5, 0.2))
    scale, bias = random.normal(1, 0.3, channels), random.normal(size=channels)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.float32), jnp.asarray(bias, jnp.float32), dy


@partial(jax.jit, static_argnums=(4, 5, 6))
def differentiate(x, scale, bias, dy, groups, activation, kernels):
    """Return output, moments and gradients."""
    (y, moments), pull = jax.vjp(lambda *a: normalize(*a, groups, 1e-5, activation, kernels), x, scale, bias)
    return y, moments, *pull((jnp.asarray(dy, y.dtype), jnp.zeros_like(moments)))


def assert_equal_to_float64(actual, inputs, groups, activation):
    """Compare with XLA's sums; `y` and `dx` are rounded to bfloat16, the others sums in float32."""
    x, scale, bias, dy = inputs
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(v, np.float64)) for v in (x, scale, bias, jnp.asarray(dy, jnp.bfloat16))]
        expected = [np.asarray(v) for v in differentiate(*wide, groups, activation, None)]
    actual = [np.asarray(v, np.float64) for v in actual]
    for index in (0, 2):
        np.testing.assert_allclose(actual[index], expected[index], rtol=5e-3, atol=5e-3)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5, atol=1e-5)
    for index in (3, 4):
        np.testing.assert_allclose(actual[index], expected[index], rtol=2e-5, atol=1e-3)


CASES = [(shape, "none") for shape in SHAPES] + [(SHAPES[index % 6], name) for index, name in enumerate(ACTIVATIONS)]


@pytest.mark.parametrize(("shape", "activation"), CASES)
def test_values_and_gradients_are_those_of_batch_norm(shape, activation):
    images, side, channels, groups = shape
    inputs, kernels = sample(images, side, channels), KernelSums(INTERPRET)
    assert kernels.can_sum(groups, inputs[0], ACTIVATIONS[activation])
    arguments = Groups(images // groups), ACTIVATIONS[activation]
    assert_equal_to_float64(differentiate(*inputs, *arguments, kernels), inputs, *arguments)


def test_groups_that_span_devices_cost_one_message_each_way():
    torus = pod.make_pod(jax.devices(), "2x2")
    x, scale, bias, dy = sample(16, 8, 64)
    dy = jnp.asarray(dy, jnp.bfloat16)
    groups = make_tiled_groups(torus, 4)

    def run(kernels):
        def local(x, scale, bias, dy):
            y, moments, dx, *by_parameters = differentiate(x, scale, bias, dy, groups, nnx.relu, kernels)
            return y, jax.lax.pmean(moments, ALL_AXES), dx, *jax.lax.psum(by_parameters, ALL_AXES)

        data, all_devices = P(BATCH_AXES), P()
        return jax.shard_map(
            local,
            mesh=torus.mesh((2, 2)),
            in_specs=(data, all_devices, all_devices, data),
            out_specs=(data, all_devices, data, all_devices, all_devices),
            check_vma=False,
        )

    inputs = x, scale, bias, dy
    kernels = KernelSums(INTERPRET)
    messages = [str(jax.make_jaxpr(run(k))(*inputs)).count("psum") for k in (None, kernels)]
    assert messages[0] == messages[1]
    assert_equal_to_float64(jax.jit(run(kernels))(*inputs), inputs, Groups(), nnx.relu)


def test_what_kernels_cannot_sum_is_left_to_xla():
    x, kernels = sample(4, 8, 64)[0], KernelSums(BATCH_NORM)
    assert kernels.can_sum(2, x, jax.nn.silu)
    assert not KernelSums(REFERENCE).can_sum(2, x, None)
    assert not kernels.can_sum(2, x.astype(jnp.float32), None)
    assert not kernels.can_sum(3, x, None)
    assert not kernels.can_sum(2, x[:, :1, :1], None)
    assert not kernels.can_sum(2, x, lambda x: x * jnp.arange(64.0))
    assert not is_differentiable(jnp.sort)
    assert not is_differentiable(lambda x: x * jax.nn.sigmoid(x.mean()))


def test_a_layer_uses_the_kernels_where_they_can_sum():
    layer = BatchNorm(64)
    layer.train()
    layer.set_attributes(sum_kernels=KernelSums(INTERPRET))
    x = sample(4, 8, 64)[0]
    graph, state = nnx.split(layer)

    def trace(x):
        return str(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, x))

    assert "pallas_call" in trace(x)
    assert "pallas_call" not in trace(x.astype(jnp.float32))
    assert "pallas_call" not in trace(x[:, :1, :1])
