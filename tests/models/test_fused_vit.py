"""Vision Transformers in fewer passes: logits and gradients are those of the modules, with drop-path and remat too.

Pallas kernels are interpreted, and JAX's own attention takes the place of cuDNN's, which needs a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podscale import recipe
from podscale.kernels.layer_spec import CUDNN, INTERPRET, REFERENCE, TRITON
from podscale.models import fused_vit, vit
from podscale.models.functional import make_functional
from podscale.parallel.batch_norm import Groups

SIZE = vit.Size(width=64, depth=2, heads=2)


@pytest.fixture(autouse=True)
def attend_without_cudnn(monkeypatch):
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: attention(*a, **k | {"implementation": "xla"}))


def build(precision, **changes):
    config = recipe.Model(name="vit_tiny", patch=4, precision=precision, **changes)
    return vit.VisionTransformer(SIZE, config, 10, 16, nnx.Rngs(0))


def differentiate(precision, kernels, **changes):
    """Return logits and gradients by name."""
    net, params, stats = make_functional(build(precision, **changes))
    net, generator = net.use_kernels(kernels), np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + jnp.asarray(generator.normal(0, 0.1, p.shape), p.dtype), params)
    images = jnp.asarray(generator.normal(size=(2, 16, 16, 3)), jnp.float32)
    weights = jnp.asarray(generator.normal(size=(2, 10)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 2) if changes.get("drop_path") else None

    def compute(params):
        logits, _ = net.train(params, stats, images, Groups(), keys)
        return (logits * weights).sum(), logits

    gradients, logits = jax.jit(jax.grad(compute, has_aux=True))(params)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {"logits": logits} | {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def compute_error(values, exact, name):
    """Return the difference as a share of the norm, without the biases of keys: their gradient is rounding alone."""
    a, b = (np.asarray(v[name], np.float64) for v in (values, exact))
    if name.endswith("qkv.bias"):
        a, b = (np.delete(v, slice(SIZE.width, 2 * SIZE.width)) for v in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"drop_path": 0.5, "remat": True, "pooling": "mean"}, marks=pytest.mark.slow)]
)
def test_logits_and_gradients_are_those_of_modules_up_to_rounding(changes):
    exact = differentiate("float32", None, **changes)
    modules, fused = (differentiate("bfloat16", kernels, **changes) for kernels in (None, INTERPRET))
    for name in exact:
        assert compute_error(fused, exact, name) <= max(0.02, 2 * compute_error(modules, exact, name)), name


def test_only_what_has_kernels_is_fused():
    assert fused_vit.can_fuse(build("bfloat16"), TRITON)
    assert not fused_vit.can_fuse(build("float32"), TRITON)
    assert not fused_vit.can_fuse(build("bfloat16"), None)
    assert not any(fused_vit.can_fuse(build("bfloat16"), kernels) for kernels in (CUDNN, REFERENCE))
