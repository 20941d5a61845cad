"""ConvNeXts in fewer passes, by interpreted Pallas kernels: logits and gradients are those of the modules."""

import jax
import numpy as np
import pytest
from flax import nnx
from support import gradients

from podscale import recipe
from podscale.kernels.layer_spec import INTERPRET, TRITON
from podscale.models import convnext, fused_convnext


def compute_error(values, exact, name):
    a, b = (np.asarray(v[name], np.float64) for v in (values, exact))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"drop_path": 0.5, "remat": True}, marks=pytest.mark.slow)], ids=["plain", "random"]
)
def test_a_fused_convnext_is_as_close_to_float32_as_modules_are(changes):
    def build(precision):
        config = recipe.Model(name="convnext_tiny", precision=precision, **changes)
        return convnext.ConvNeXt(convnext.Size((1, 1), (32, 64)), config, 10, nnx.Rngs(0))

    keys = jax.random.split(jax.random.key(0), 2) if changes else None
    assert fused_convnext.can_fuse(build("bfloat16"), INTERPRET)
    fused, modules = (gradients.differentiate(build("bfloat16"), kernels, 32, keys) for kernels in (INTERPRET, None))
    exact = gradients.differentiate(build("float32"), None, 32, keys)
    assert fused.keys() == exact.keys()
    for name in exact:
        assert compute_error(fused, exact, name) < 2 * compute_error(modules, exact, name) + 2e-3, name


def test_only_convnexts_of_bfloat16_are_fused():
    model = convnext.ConvNeXt(
        convnext.Size((1,), (8,)), recipe.Model(name="convnext_tiny", precision="float32"), 10, nnx.Rngs(0)
    )
    assert not fused_convnext.can_fuse(model, TRITON)
    assert not fused_convnext.can_fuse(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), TRITON)
