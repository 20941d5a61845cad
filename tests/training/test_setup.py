"""The setup of a run: when a model is fitted to the data, and which lanes are refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from rich.console import Console
from training.test_loop import OwnModel, assert_identical, read_losses

from podscale import pod as pods
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.config.stop_condition import StopCondition
from podscale.data import order
from podscale.errors import UserError
from podscale.models.functional import make_functional
from podscale.models.weights.names import name_arrays
from podscale.plan import Counts
from podscale.runs.folder import Run
from podscale.training import loop
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.program import Weights
from podscale.training.setup import fit_model, has_fit, initialize, plan_recipe, prepare, resolve

QUIET = Console(quiet=True)


class Fitted(OwnModel):
    """A model whose `fit_parameters` stores the images' mean in its head, and counts its calls."""

    calls = 0

    def fit_parameters(self, images):
        type(self).calls += 1
        return {"head.bias": np.full(self.head.bias.shape, images.mean() + 1)}


@pytest.fixture(autouse=True)
def reset_calls():
    Fitted.calls = 0


@pytest.fixture(scope="module")
def recipe():
    changes = {"train.epochs": 1, "train.eval_epochs": 0.5, "augment.mixup": 0.0}
    return recipes.override_recipe(recipes.load_recipe("digits"), changes)


@pytest.fixture(scope="module")
def pod():
    return pods.make_pod(jax.devices()[:1], "1x1")


def make_model(kind=Fitted):
    return kind(10, nnx.Rngs(0))


def train(recipe, pod, folder, **more):
    return loop.train(recipe, pod=pod, model=make_model(), folder=folder, console=QUIET, **more)


def read_state(folder, recipe, pod):
    setup = prepare(recipe, pod, model=make_model())
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        return jax.device_get(checkpoints.restore(checkpoints.newest(), setup.init_state()))


# --- fit -----------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_resumed_run_does_not_fit_again_and_is_bit_identical(recipe, pod, tmp_path):
    train(recipe, pod, tmp_path / "whole")
    assert Fitted.calls == 1
    train(recipe, pod, tmp_path / "stopped", until=StopCondition("accuracy", 0.0))
    assert Fitted.calls == 2
    assert Run.load(tmp_path / "stopped").summary()["steps"] == 6
    train(recipe, pod, tmp_path / "stopped")
    assert Fitted.calls == 2
    assert read_losses(tmp_path / "stopped") == read_losses(tmp_path / "whole")
    assert_identical(*(read_state(tmp_path / name, recipe, pod) for name in ("stopped", "whole")))


@pytest.mark.heavy
def test_a_run_whose_checkpoints_are_all_damaged_fits_again(recipe, pod, tmp_path):
    train(recipe, pod, tmp_path / "whole")
    train(recipe, pod, tmp_path / "damaged")
    for checkpoint in (tmp_path / "damaged" / "checkpoints").iterdir():
        (checkpoint / "manifest.json").write_text("{")
    train(recipe, pod, tmp_path / "damaged", from_scratch=True)
    assert Fitted.calls == 3
    assert read_losses(tmp_path / "damaged") == read_losses(tmp_path / "whole")


def write_weights(path, classes=10):
    """Write weights that fit the model and name the digits, but for its head if the number of classes differs."""
    _, params, stats = make_functional(OwnModel(classes, nnx.Rngs(7)))
    metadata = {"labels": json.dumps([str(number) for number in range(classes)])}
    safetensors.numpy.save_file({k: np.asarray(v) for k, v in name_arrays(params, stats).items()}, path, metadata)
    return str(path)


def test_initial_weights_that_replace_everything_make_fit_superfluous(recipe, pod, tmp_path):
    weights = write_weights(tmp_path / "w.safetensors")
    setup = prepare(recipe.override({"model.init": weights}), pod, model=make_model())
    initialized, loaded = initialize(setup)
    assert (loaded.reinitialized, Fitted.calls) == ([], 0)
    np.testing.assert_array_equal(initialized.weights.params["head"]["bias"], loaded.params["head"]["bias"])


def test_a_head_that_keeps_its_random_initialization_is_fitted(recipe, pod, tmp_path):
    weights = write_weights(tmp_path / "w.safetensors", classes=7)
    setup = prepare(recipe.override({"model.init": weights}), pod, model=make_model())
    initialized, loaded = initialize(setup)
    assert loaded.reinitialized == ["head.bias", "head.kernel"]
    fitted = fit_model(setup).weights.params
    assert not np.array_equal(fitted["head"]["bias"], setup.weights.params["head"]["bias"])
    np.testing.assert_array_equal(initialized.weights.params["head"]["bias"], fitted["head"]["bias"])


def test_no_array_is_read_to_see_whether_a_model_has_a_fit(recipe, pod):
    for kind, expected in ((OwnModel, False), (Fitted, True)):
        setup = replace(prepare(recipe, pod, model=make_model(kind)), weights=Weights(None, None))
        assert has_fit(setup) == expected
        if not expected:
            assert fit_model(setup) is setup


def fit_with(recipe, pod, fit_parameters):
    kind = type("Other", (OwnModel,), {"fit_parameters": fit_parameters})
    return fit_model(prepare(recipe, pod, model=make_model(kind)))


def test_fitted_parameters_enter_the_average_too(recipe, pod):
    state = fit_model(prepare(recipe.override({"optimizer.average": 0.9}), pod, model=make_model())).init_state()
    np.testing.assert_array_equal(state.average["params"]["head"]["bias"], state.params["head"]["bias"])
    assert np.abs(state.params["head"]["bias"]).max() > 0


def test_fitted_parameters_that_the_model_does_not_have_are_refused(recipe, pod):
    with pytest.raises(UserError, match=r"no parameter 'head.bais'.*head.bias"):
        fit_with(recipe, pod, lambda self, images: {"head.bais": np.zeros(10)})
    with pytest.raises(UserError, match=r"head.bias has shape \(10,\), not \(9,\)"):
        fit_with(recipe, pod, lambda self, images: {"head.bias": np.zeros(9)})


def test_a_model_with_the_former_method_fit_is_refused(recipe, pod):
    kind = type("Old", (OwnModel,), {"fit": lambda self, images: None})
    with pytest.raises(UserError, match=r"Old\.fit is no longer called; rename it to fit_parameters"):
        initialize(prepare(recipe, pod, model=make_model(kind)))


# --- lanes ---------------------------------------------------------------------------------------------------------


def test_training_planning_and_the_order_refuse_the_same_lanes_with_the_same_message(recipe, pod):
    recipe = recipe.override({"data.lanes": 128})
    batch, seed = recipe.batch.size, recipe.train.seed
    messages = set()
    for build in (
        lambda: prepare(recipe, pod),
        lambda: plan_recipe(recipe, pod, Options()),
        lambda: order.Order(1437, 128, batch, seed),
        lambda: order.check_lanes(1437, 128, batch),
    ):
        with pytest.raises(UserError, match=r"fewer than 500 of 1437") as error:
            build()
        messages.add(str(error.value))
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "decodde"}, "plan.cache cannot be 'decodde': choose auto, none, encoded, decoded, device"),
        ({"fused": "yes"}, "plan.fused cannot be 'yes': choose auto, on, off"),
        ({"remat": "yes"}, "plan.remat cannot be 'yes': choose auto, on, off"),
        ({"tile_summation": "ring"}, "plan.tile_summation cannot be 'ring'"),
        ({"orthogonalize": "colum"}, "plan.orthogonalize cannot be 'colum': choose auto, device, row, slice, pod"),
        ({"micro_batches": "2"}, "plan.micro_batches must be a whole number, not '2'"),
        ({"micro_batches": True}, "plan.micro_batches must be a whole number, not True"),
        ({"cache_gib": float("nan")}, "plan.cache_gib must be a number, not nan"),
        ({"deterministic": "no"}, "plan.deterministic must be true or false, not 'no'"),
        ({"summation": 3}, "plan.summation must be text, not 3"),
        ({"summation": "swng"}, "no gradient summation 'swng': did you mean swing"),
        ({"save_steps": -1}, "plan.save_steps must be 0 or more, not -1"),
    ],
)
def test_options_that_a_program_sets_are_checked_like_those_of_the_command_line(options, message):
    recipe = recipes.load_recipe("digits").override({"optimizer.name": "muon"})
    with pytest.raises(UserError) as error:
        plan_recipe(recipe, pods.parse_pod("cpu:1x2"), Options(**options))
    assert message in str(error.value)


def test_wrong_options_are_refused_before_a_run_is_made(recipe, pod, tmp_path):
    with pytest.raises(UserError, match=r"plan\.keep must be a whole number"):
        loop.train(recipe, pod=pod, options=Options(keep=2.5), folder=tmp_path / "run", console=QUIET)
    with pytest.raises(UserError, match=r"plan\.cache cannot be"):
        prepare(recipe, pod, Options(cache="devise"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("resnet18", "hopper"),
        ("vit_tiny", "triton"),
        ("convnext_tiny", "triton"),
        ("efficientnet_b0", "batch_norm"),
        (OwnModel, "batch_norm"),
    ],
)
def test_a_plan_has_kernels_only_for_models_that_they_compute(name, kernels):
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    pod = pods.Pod("gpu", 1, 1, devices=(gpu,), memory_bytes=80 << 30)
    changes = {"model.name": name if isinstance(name, str) else "resnet50", "model.width": recipes.Model.width}
    changes |= {"model.precision": "bfloat16", "data.image_size": 32}
    recipe = recipes.load_recipe("digits").override(changes)
    model = None if isinstance(name, str) else make_model(name)
    plan = resolve(recipe, pod, Counts(1437, 360, 10), Options(fused="on"), model).plan
    assert plan.to_dict()["kernels"] == kernels
