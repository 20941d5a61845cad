"""timm's weights: logits and gradients that timm computed, and, where it is installed, timm itself.

`timm_record.json` is what `benchmarks/parity.py --record` wrote with timm 1.0.31, in float64. Weights are random
numbers that depend on timm's names and shapes alone, so the record needs no weights.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from support.benchmarks import load_benchmark

from podscale import recipe
from podscale.errors import UserError
from podscale.models import registry, vit
from podscale.models.weights.layouts import adapt_tensors
from podscale.models.weights.timm import from_timm, load_timm, to_timm

parity = load_benchmark("parity")
RECORD = json.loads((Path(__file__).parent / "timm_record.json").read_text())
SAMPLED = ["vit_tiny"]
TITLES = [title if title in SAMPLED else pytest.param(title, marks=pytest.mark.slow) for title in RECORD]


@pytest.mark.heavy
@pytest.mark.parametrize("title", TITLES)
def test_logits_and_gradients_are_those_that_timm_computed(title):
    """Gradients agree to 1e-9 or, if the network amplifies rounding, to ten times what rounding its weights changes."""
    inputs, direction = parity.sample_inputs(2, parity.RECORD_SIZE, parity.RECORD_CLASSES)
    inputs = inputs.astype(np.float64)
    with jax.enable_x64(True), jax.disable_jit():  # layers are alike: their operations compile sooner than a program
        model = parity.build_randomized(parity.PAIRS[title], parity.RECORD_SIZE, parity.RECORD_CLASSES, "float64")
        logits, gradients = parity.compute_with_podscale(model, inputs, direction)
        expected = np.array(RECORD[title]["logits"])
        assert abs(expected).max() > 0.1
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-9 * abs(expected).max())
        recorded = RECORD[title]["gradient_norms"]
        norms = measure_norms(gradients, recorded)
        allowed = 1e-9
        if get_largest_difference(norms, recorded) > allowed:
            from_timm(model, {name: round_differently(array) for name, array in to_timm(model).items()})
            _, others = parity.compute_with_podscale(model, inputs, direction)
            allowed = 10 * get_largest_difference(measure_norms(others, recorded), norms)
            assert allowed < 1e-6
    assert get_largest_difference(norms, recorded) <= allowed


def round_differently(array):
    """Change each number by one or two units in its last place, as the rounding of a layer's products does."""
    return array * (1 + np.random.default_rng(array.size).choice([-(2**-52), 2**-52], array.shape))


def measure_norms(gradients, names):
    return {name: np.linalg.norm(gradients[name]) for name in names}


def get_largest_difference(norms, others):
    """Return the largest difference of two records of norms, relative to the second."""
    return max(abs(norms[name] - other) / other for name, other in others.items())


@pytest.mark.heavy
@pytest.mark.parametrize("title", ["vit_tiny", "efficientnet_b0", "efficientnet_lite0, TensorFlow's", "convnext_tiny"])
def test_logits_and_gradients_match_timm(title):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
    result = parity.compare(parity.PAIRS[title], images=2)
    assert result.parameters == result.timm_parameters
    assert result.logits < 1e-4
    assert result.gradients < 1e-4, result.worst


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["vit_tiny", "efficientnet_b1", "efficientnet_lite0", "convnext_tiny", "resnet50"])
def test_timm_accepts_what_is_exported(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    timm = pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
    timm_name = {"vit_tiny": "vit_tiny_patch16_224"}.get(name, name)
    peer = timm.create_model(timm_name, num_classes=10)
    tensors = to_timm(registry.build_model(recipe.Model(name=name, stem="small"), 10, 224))
    peer.load_state_dict({key: torch.from_numpy(np.array(array)) for key, array in tensors.items()})


# --- exchange --------------------------------------------------------------------------------------------------------


def build_small(**changes):
    size = vit.Size(width=16, depth=2, heads=2)
    return vit.VisionTransformer(size, recipe.Model(**{"patch": 4} | changes), 10, 8, nnx.Rngs(0))


def test_import_undoes_export_and_files_are_read(tmp_path):
    model, path = build_small(), tmp_path / "w.safetensors"
    weights = parity.randomize(to_timm(model))
    assert weights["blocks.1.attn.qkv.weight"].shape == (48, 16)
    assert weights["pos_embed"].shape == (1, 5, 16)
    safetensors.numpy.save_file(weights, path)
    load_timm(model, path)
    after = to_timm(model)
    assert weights.keys() == after.keys()
    assert all(np.array_equal(weights[name], after[name]) for name in weights)


def test_fixed_positions_are_exported_as_timms_and_not_imported():
    model = build_small(positions="sincos")
    tensors = to_timm(model)
    np.testing.assert_allclose(tensors["pos_embed"][0, 1:], vit.make_sincos_positions(2, 16), atol=1e-6)
    with pytest.raises(UserError, match="pos_embed has no place in this model"):
        from_timm(model, tensors)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"blocks.0.norm1.bias": None}, r"the weights lack blocks\.0\.norm1\.bias.*\(16,\)"),
        ({"blocks.7.norm1.bias": np.zeros(3)}, r"blocks\.7\.norm1\.bias has no place in this model"),
        ({"head.weight": np.zeros((11, 16))}, r"head\.weight has shape \(11, 16\), but this model needs \(10, 16\)"),
        ({"cls_token": np.zeros(16)}, r"cls_token has shape \(16,\), but this model needs \(1, 1, 16\)"),
    ],
)
def test_tensor_that_does_not_fit_is_named_and_the_model_stays_unchanged(change, sentence):
    model = build_small()
    before = to_timm(model)
    weights = {key: value for key, value in (parity.randomize(before) | change).items() if value is not None}
    with pytest.raises(UserError, match=sentence):
        from_timm(model, weights)
    after = to_timm(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_other_kinds_of_models_are_refused():
    with pytest.raises(UserError, match="timm has no weights for a Linear"):
        to_timm(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_weights_of_other_names_are_adapted_and_ours_are_left_alone():
    model = build_small()
    ours = adapt_tensors(model, to_timm(model))
    assert ours["layers.1.attention.qkv.kernel"].shape == (16, 48)
    assert adapt_tensors(model, ours) == ours
    with pytest.raises(UserError, match=r"cls_token has shape \(16,\), wanted"):
        adapt_tensors(model, to_timm(model) | {"cls_token": np.zeros(16)})


def test_positions_are_resampled_as_timm_does():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
    from timm.layers import resample_abs_pos_embed

    old = np.random.default_rng(0).normal(size=(1 + 14 * 14, 8)).astype(np.float32)
    for grid in (10, 24):
        expected = resample_abs_pos_embed(torch.from_numpy(old[None]), [grid, grid])[0].numpy()
        np.testing.assert_allclose(vit.resample_positions(old, 1 + grid * grid), expected, atol=1e-5)
