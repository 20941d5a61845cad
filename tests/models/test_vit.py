"""Vision Transformers: parameters, tokens, positions, attention, and the image sizes that fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podscale import recipe
from podscale.errors import UserError
from podscale.kernels.layer_spec import CUDNN
from podscale.models import registry, vit

PARAMETERS = {  # timm's vit_*_patch16_224 and vit_*_patch32_224
    ("vit_tiny", 16): 5_717_416,
    ("vit_tiny", 32): 6_131_560,
    ("vit_small", 16): 22_050_664,
    ("vit_small", 32): 22_878_952,
    ("vit_base", 16): 86_567_656,
    ("vit_base", 32): 88_224_232,
}
SMALL = vit.Size(width=16, depth=2, heads=2)


def make_config(**changes):
    return recipe.Model(**{"name": "vit_tiny", "patch": 4} | changes)


def build_small(size=8, classes=10, **changes):
    return vit.VisionTransformer(SMALL, make_config(**changes), classes, size, nnx.Rngs(0))


def sample_images(size=8, n=2):
    return jnp.asarray(np.random.default_rng(0).normal(size=(n, size, size, 3)), jnp.float32)


def count_parameters(model):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "patch"), PARAMETERS)
def test_parameter_counts_are_the_published_ones(name, patch):
    model = nnx.eval_shape(lambda: registry.build_model(make_config(name=name, patch=patch), 1000, 224))
    assert count_parameters(model) == PARAMETERS[name, patch]


def test_patches_must_divide_the_image():
    with pytest.raises(UserError, match=r"model.patch 16 does not divide data.image_size 40; nearest .*: 32, 48"):
        registry.build_model(make_config(patch=16), 10, 40)


@pytest.mark.parametrize(("field", "value"), [("width", 32), ("stem", "conv7"), ("padding", "same")])
def test_fields_of_other_networks_are_refused(field, value):
    with pytest.raises(UserError, match=f"vit_tiny has no model.{field} .*--model.{field} "):
        registry.build_model(make_config(**{field: value}), 10, 8)


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_patches_are_those_of_a_strided_convolution():
    embedding = build_small().layers[0]
    x, kernel = sample_images(), embedding.patches.kernel[...]
    expected = jax.lax.conv_general_dilated(x, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    np.testing.assert_allclose(embedding.patches(x), expected, atol=1e-5)


def test_sincos_positions_are_sines_and_cosines_of_column_and_row():
    positions = vit.make_sincos_positions(3, 8)
    for row in range(3):
        for column in range(3):
            parts = [function(place * w) for place in (column, row) for function in (np.sin, np.cos) for w in (1, 1e-4)]
            np.testing.assert_allclose(positions[3 * row + column], parts, atol=1e-12)


def test_fixed_positions_are_no_parameters_and_mean_pooling_has_no_token():
    learned, fixed = build_small(), build_small(positions="sincos")
    assert count_parameters(learned) - count_parameters(fixed) == 5 * 16
    assert count_parameters(fixed) - count_parameters(build_small(positions="sincos", pooling="mean")) == 16
    assert fixed(sample_images()).shape == (2, 10)


def test_mean_pooling_with_fixed_positions_sees_where_patches_are():
    model = build_small(pooling="mean", positions="sincos")
    model.layers[-1].kernel[...] = jnp.asarray(np.random.default_rng(1).normal(size=(16, 10)), jnp.float32)
    x = sample_images()
    swapped = jnp.concatenate([x[:, 4:], x[:, :4]], axis=1)
    assert float(abs(model(x) - model(swapped)).max()) > 1e-3
    model.layers[0].get_positions = lambda width: jnp.zeros((4, width))
    np.testing.assert_allclose(model(x), model(swapped), atol=1e-5)


@pytest.mark.parametrize("pooling", ["token", "mean"])
def test_positions_are_resampled_for_images_of_another_size(pooling):
    """A linear ramp stays a ramp inside the grid, and the class token keeps its position."""
    small, large = (build_small(size, pooling=pooling) for size in (32, 64))
    extra, ramp = int(pooling == "token"), np.broadcast_to(np.arange(8.0)[None, :, None], (8, 8, 16))
    old = np.concatenate([np.full((extra, 16), 7.0), ramp.reshape(64, 16)])
    name = "layers.0.positions"
    new = vit.adapt_positions(large, {name: old})[name]
    assert new.shape == large.layers[0].positions.shape
    np.testing.assert_array_equal(new[:extra], old[:extra])
    grid = new[extra:].reshape(16, 16, 16)
    np.testing.assert_allclose(grid[4, 4:12, 0], (np.arange(4, 12) + 0.5) / 2 - 0.5, atol=1e-5)
    np.testing.assert_array_equal(vit.adapt_positions(small, {name: old})[name], old)
    other = build_small(64, pooling="mean" if extra else "token")
    np.testing.assert_array_equal(vit.adapt_positions(other, {name: old})[name], old)  # its check of shapes refuses


# --- attention -------------------------------------------------------------------------------------------------------


def test_attention_is_that_of_the_paper():
    """Equations 5 to 8 of appendix A, head by head, in float64."""
    with jax.enable_x64(True):
        attention = build_small(precision="float64").layers[1].attention
        x = np.random.default_rng(0).normal(size=(2, 5, 16))
        q, k, v = np.split(x @ attention.qkv.kernel[...] + attention.qkv.bias[...], 3, axis=-1)
        heads = []
        for head in (slice(0, 8), slice(8, 16)):
            scores = np.exp(q[..., head] @ k[..., head].swapaxes(1, 2) / np.sqrt(8))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[..., head])
        expected = np.concatenate(heads, -1) @ attention.project.kernel[...] + attention.project.bias[...]
        np.testing.assert_allclose(attention(jnp.asarray(x)), expected, atol=1e-12)


@pytest.mark.heavy
@pytest.mark.parametrize("pooling", ["token", "mean"])
def test_padded_tokens_change_nothing(monkeypatch, pooling):
    """The fused path, with JAX's own attention in the place of cuDNN's, which needs a GPU."""
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: attention(*a, **k | {"implementation": "xla"}))
    model, images = build_small(precision="bfloat16", pooling=pooling), sample_images()
    model.layers[-1].kernel[...] = jax.random.normal(jax.random.key(0), model.layers[-1].kernel.shape)
    expected = model(images)
    model.use_kernels(CUDNN)
    assert model.layers[0].padding == model.layers[1].attention.padding == (3 if pooling == "token" else 4)
    np.testing.assert_allclose(model(images), expected, rtol=0.05, atol=0.05)
    assert float(jnp.abs(expected).max()) > 1


def test_kernels_are_for_bfloat16_alone():
    model = build_small()
    expected = model(sample_images())
    model.use_kernels(CUDNN)
    assert model.layers[1].attention.kernels is None
    np.testing.assert_array_equal(model(sample_images()), expected)  # float32: the reference, on any machine


def test_a_new_network_has_equal_logits_and_bfloat16_keeps_float32_parameters():
    model = build_small(precision="bfloat16")
    logits = model(sample_images().astype(jnp.bfloat16))
    assert logits.dtype == jnp.float32
    assert not np.asarray(logits).any()  # the head starts at 0
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}


def test_float64_starts_from_the_same_values():
    first = jax.tree.leaves(nnx.state(build_small()))
    with jax.enable_x64(True):
        wide = jax.tree.leaves(nnx.state(build_small(precision="float64")))
    assert all(b.dtype == np.float64 and np.array_equal(a, b) for a, b in zip(first, wide, strict=True))
