"""ResNets with folded batch norms compute what their modules compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.closeness import assert_close
from support.networks import STEMS, make_network

from podscale.kernels.layer_spec import REFERENCE


@pytest.mark.parametrize(("block", "stem", "size"), STEMS)
def test_folded_network_matches_the_modules(block, stem, size):
    with jax.enable_x64(True):
        net, params, stats = make_network(block, (2, 1), "float64", stem)
        random = np.random.default_rng(1)
        stats = jax.tree.map(lambda v: jnp.asarray(random.uniform(0.5, 2, v.shape)), stats)
        images = jnp.asarray(random.normal(size=(4, size, size, 3)))
        expected = jax.jit(net.evaluate)(params, stats, images)
        assert_close(jax.jit(net.use_kernels(REFERENCE).evaluate)(params, stats, images), expected, 1e-10)
