"""Small ResNets for comparisons of implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podscale import recipe as recipes
from podscale.models.functional import make_functional
from podscale.models.resnet import BasicBlock, BottleneckBlock, ResNet

STEMS = [
    (BasicBlock, "small", 32),
    pytest.param(BottleneckBlock, "space_to_depth", 32, marks=pytest.mark.slow),
    (BottleneckBlock, "space_to_depth", 34),
]


def make_network(block, stages, precision, stem="conv7"):
    """Return a small ResNet as functions, its parameters and its statistics."""
    config = recipes.Model(stem=stem, width=8, precision=precision)
    net, params, stats = make_functional(ResNet(block, stages, config, 10, nnx.Rngs(0)))
    # Scales that start at 0 would hide errors of the layers before them.
    dtype = np.float64 if precision == "float64" else np.float32

    def change(v):  # in NumPy, which compiles nothing
        return jnp.asarray(np.asarray(v) + 0.3 * np.random.default_rng(v.size).normal(size=v.shape), dtype)

    return net, jax.tree.map(change, params), stats
