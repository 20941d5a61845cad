"""A small network of each modern family trains the same on every pod, in float64, with all random features on."""

import jax
import numpy as np
import pytest
from training.test_invariants import assert_close, make_small_recipe, train_on_pod, train_reference

from podscale.models import convnext, efficientnet, registry, vit

STEPS = 3
STAGES = [efficientnet.Stage(1, 3, 1, 8, 1), efficientnet.Stage(2, 5, 1, 8, 1)]


def build_vit(config, classes, image_size, rngs):
    return vit.VisionTransformer(vit.Size(width=16, depth=1, heads=2), config, classes, image_size, rngs)


def build_efficientnet(config, classes, image_size, rngs):
    return efficientnet.EfficientNet(efficientnet.Size(0.25, 1.0), STAGES, config, classes, rngs)


def build_convnext(config, classes, image_size, rngs):
    return convnext.ConvNeXt(convnext.Size((1, 1), (8, 16)), config, classes, rngs)


FAMILIES = {"vit": build_vit, "efficientnet": build_efficientnet, "convnext": build_convnext}


@pytest.fixture(autouse=True)
def _small_models():
    for family, builder in FAMILIES.items():
        registry.register_model(f"small_{family}")(builder)
    yield
    for family in FAMILIES:
        registry.unregister_model(f"small_{family}")


FEATURES = {
    "vit": {"schedule.layer_decay": 0.7, "train.loss": "binary", "augment.mixup": 0.8},
    "efficientnet": {
        "optimizer.name": "rmsprop",
        "optimizer.second_moment": 0.9,
        "optimizer.weight_decay": 1e-5,
        "model.remat": True,
        "data.balance": True,
        "data.train_sizes": [8, 10],
        "data.size_epochs": [32 / 1437],  # after the first step
        "train.class_weights": [0.5 + 0.1 * i for i in range(10)],
    },
    "convnext": {"model.remat": True, "augment.mixup": 0.0},
}


def make_recipe(family, **changes):
    settings = {
        "model.name": f"small_{family}",
        "model.dropout": 0.2,
        "model.drop_path": 0.5,
        "augment.cutmix": 1.0,
        "model.patch": 2,
        "model.norm_epsilon": 1e-3,
        "train.epochs": (STEPS - 0.5) * 64 / 1437,
        "optimizer.name": "adamw",
        "optimizer.weight_decay": 0.1,
        "optimizer.epsilon": 1e-3,  # with tiny gradients, a smaller one makes rounding errors large
        "schedule.peak": 1e-2,
    }
    return make_small_recipe("float64", **settings | FEATURES[family] | changes)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "family",
    [name if name == "efficientnet" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)  # the one with batch norm stands for all
def test_every_pod_trains_the_same_in_float64(family):
    with jax.enable_x64(True):
        recipe = make_recipe(family)
        losses, params, stats, _ = train_reference(recipe, STEPS)
        ours, state = train_on_pod(recipe, "2x4", 2, 1, "torus")
    np.testing.assert_allclose(ours, losses, rtol=1e-9)
    assert_close(state.params, params, 1e-8)
    assert_close(state.stats, stats, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("shape", "micro_batches", "steps_per_call", "summation"),
    [("1x1", 4, 1, "xla"), ("1x2", 1, 3, "xla"), ("2x2", 2, 1, "sharded"), ("4x4", 1, 1, "torus4")],
)
def test_other_pods_train_the_same_in_float64(family, shape, micro_batches, steps_per_call, summation):
    with jax.enable_x64(True):
        recipe = make_recipe(family)
        losses, state = train_on_pod(recipe, shape, micro_batches, steps_per_call, summation)
        expected, params, _, _ = train_reference(recipe, STEPS)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    assert_close(state.params, params, 1e-8)
