"""Logits and gradients of a model, to compare the ways to compute it."""

import jax
import jax.numpy as jnp
import numpy as np

from podscale.models.functional import make_functional
from podscale.parallel.batch_norm import Groups

IMAGES, CLASSES = 2, 10


def differentiate(model, kernels, image_size, keys=None):
    """Return the logits of random images, and the gradients by random parameters, by name."""
    net, params, stats = make_functional(model)
    net, generator = net.use_kernels(kernels), np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + jnp.asarray(generator.normal(0, 0.1, p.shape), p.dtype), params)
    images = jnp.asarray(generator.normal(size=(IMAGES, image_size, image_size, 3)), jnp.float32)
    weights = jnp.asarray(generator.normal(size=(IMAGES, CLASSES)), jnp.float32)

    def compute(params):
        logits, _ = net.train(params, stats, images, Groups(), keys)
        return (logits * weights).sum(), logits

    gradients, logits = jax.jit(jax.grad(compute, has_aux=True))(params)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {"logits": logits} | {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
