"""ResNets of fused layers compute what their modules compute."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.closeness import assert_close
from support.networks import STEMS, make_network

from podscale import pod
from podscale.kernels.layer_spec import REFERENCE
from podscale.models import fused_resnet
from podscale.models.resnet import BasicBlock, BottleneckBlock
from podscale.parallel.batch_norm import BatchNorm, Groups, Moments
from podscale.pod import ALL_AXES, BATCH_AXES


def compute_gradients(net, params, stats, images, groups, kernels):
    """Return the loss, its gradients, and the moments of all batch norms."""

    def compute_loss(params):
        model = net.build_module(params, stats)
        model.train()
        model.set_attributes(BatchNorm, groups=groups)
        logits = fused_resnet.forward(model, images, kernels) if kernels else model(images)
        moments = nnx.to_pure_dict(nnx.pop(model, Moments))
        return (logits * jnp.cos(jnp.arange(logits.size).reshape(logits.shape))).sum(), moments

    return jax.jit(jax.value_and_grad(compute_loss, has_aux=True))(params)


@pytest.mark.heavy
@pytest.mark.parametrize(("block", "stem", "size"), STEMS)
def test_fused_network_matches_the_modules(block, stem, size):
    with jax.enable_x64(True):
        net, params, stats = make_network(block, (2, 1), "float64", stem)
        images = jnp.asarray(np.random.default_rng(1).normal(size=(8, size, size, 3)))
        expected = compute_gradients(net, params, stats, images, Groups(4), None)
        assert_close(compute_gradients(net, params, stats, images, Groups(4), REFERENCE), expected, 1e-8)


@pytest.mark.heavy
def test_fused_network_matches_the_modules_over_tiles():
    with jax.enable_x64(True):
        net, params, stats = make_network(BasicBlock, (1, 1), "float64", "small")
        images = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8, 8, 3)))
        mesh = pod.make_pod(jax.devices()[:4], "2x2").mesh((1, 2))
        groups = Groups(0, pod.TILE)

        def local(images, kernels):
            (loss, moments), gradients = compute_gradients(net, params, stats, images, groups, kernels)
            return jax.lax.psum((loss, moments, gradients), ALL_AXES)

        def compute_on_pod(kernels):
            mapped = jax.shard_map(
                partial(local, kernels=kernels), mesh=mesh, in_specs=P(BATCH_AXES), out_specs=P(), check_vma=False
            )
            return jax.jit(mapped)(images)

        assert_close(compute_on_pod(REFERENCE), compute_on_pod(None), 1e-8)


def test_fused_network_with_running_statistics_matches_the_modules():
    net, params, stats = make_network(BottleneckBlock, (2, 1), "float32")
    images = jnp.asarray(np.random.default_rng(1).normal(size=(4, 32, 32, 3)), jnp.float32)
    model = net.build_module(params, stats)
    model.eval()
    fused_logits = jax.jit(lambda images: fused_resnet.forward(model, images, REFERENCE))(images)
    assert_close(fused_logits, jax.jit(model.__call__)(images), 1e-4)
