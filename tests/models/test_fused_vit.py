"""Vision Transformers in fewer passes: logits and gradients are those of the modules, with drop-path and remat too.

Pallas kernels are interpreted, and JAX's own attention takes the place of cuDNN's, which needs a GPU.
"""

import jax
import numpy as np
import pytest
from flax import nnx
from support import gradients

from podscale import recipe
from podscale.kernels.layer_spec import CUDNN, INTERPRET, REFERENCE, TRITON
from podscale.models import fused_vit, vit

SIZE = vit.Size(width=64, depth=2, heads=2)


@pytest.fixture(autouse=True)
def attend_without_cudnn(monkeypatch):
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: attention(*a, **k | {"implementation": "xla"}))


def build(precision, size=SIZE, pixels=16, **changes):
    config = recipe.Model(name="vit_tiny", patch=4, precision=precision, **changes)
    return vit.VisionTransformer(size, config, 10, pixels, nnx.Rngs(0))


def differentiate(precision, kernels, size=SIZE, pixels=16, **changes):
    """Return logits and gradients by name."""
    keys = jax.random.split(jax.random.key(0), gradients.IMAGES) if changes.get("drop_path") else None
    return gradients.differentiate(build(precision, size, pixels, **changes), kernels, pixels, keys)


def compute_error(values, exact, name):
    """Return the difference as a share of the norm, without the biases of keys: their gradient is rounding alone."""
    a, b = (np.asarray(v[name], np.float64) for v in (values, exact))
    if name.endswith("qkv.bias"):
        width = len(a) // 3
        a, b = (np.delete(v, slice(width, 2 * width)) for v in (a, b))
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


@pytest.mark.slow  # the interpreter takes a second for every head of an image
def test_logits_and_gradients_with_attention_by_kernels_are_those_of_modules():
    """65 tokens, padded to 72, with heads of 64."""
    network = {"size": vit.Size(width=128, depth=1, heads=2), "pixels": 32}
    exact = differentiate("float32", None, **network)
    modules, fused = (differentiate("bfloat16", kernels, **network) for kernels in (None, INTERPRET))
    for name in exact:
        assert compute_error(fused, exact, name) <= max(0.02, 2 * compute_error(modules, exact, name)), name


def test_only_what_has_kernels_is_fused():
    assert fused_vit.can_fuse(build("bfloat16"), TRITON)
    assert not fused_vit.can_fuse(build("float32"), TRITON)
    assert not fused_vit.can_fuse(build("bfloat16"), None)
    assert not any(fused_vit.can_fuse(build("bfloat16"), kernels) for kernels in (CUDNN, REFERENCE))
