"""Learning rates per group of parameters, and masks by name."""

import jax
import numpy as np
import pytest
from flax import nnx

from podscale.errors import UserError
from podscale.optim import optimizers, parameter_groups, schedules
from podscale.recipe import Recipe, override_recipe

MODEL = {
    "layers": {
        0: {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)},
        1: {"bias": np.ones(3, np.float32)},
        10: {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)},
    }
}


def measure_steps(steps, name="sgd", **changes):
    """Return how far each parameter of MODEL moves at each step under gradients of 1, by its first element."""
    settings = {"optimizer.name": name, "optimizer.momentum": 0, "optimizer.weight_decay": 0, "train.epochs": 8}
    recipe = override_recipe(Recipe(), settings | {"schedule.decay": "polynomial", "schedule.end": 0} | changes)
    recipe = override_recipe(recipe, {"schedule.power": 1})
    rule = optimizers.make_optimizer(recipe, schedules.make_schedule(recipe, 8, 1.0), stem="layers.0", head="layers.10")
    gradients, state, movements = jax.tree.map(np.ones_like, MODEL), rule.init(MODEL), []
    for _ in range(steps):
        updates, state = rule.update(gradients, state, MODEL)
        movements.append([float(leaf.ravel()[0]) for leaf in jax.tree.leaves(updates)])
    return -np.array(movements).T  # parameters: bias 0, kernel 0, bias 1, bias 10, kernel 10


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_biases_and_the_head_may_have_their_own_peaks(name):
    movements = measure_steps(5, name, **{"schedule.peak": 2, "schedule.bias_peak": 16, "schedule.head_peak": 32})
    shape = 1 - np.arange(5) / 8
    peaks = np.array([[16], [2], [16], [16], [32]])
    own = [0, 2, 3, 4] if name == "muon" else slice(None)  # Muon's step along kernel 0 is a share of the kernel
    np.testing.assert_allclose(movements[own], (peaks * shape)[own], rtol=1e-5)


def test_first_layer_may_pass_through_the_schedule_faster():
    movements = measure_steps(6, **{"schedule.peak": 2, "schedule.bias_peak": 16, "schedule.stem_epochs": 2})
    others, stem = 1 - np.arange(6) / 8, np.array([1, 0.5, 0, 0, 0, 0])
    np.testing.assert_allclose(movements[:2], np.array([[16], [2]]) * stem, atol=1e-6)
    np.testing.assert_allclose(movements[2:], np.array([[16], [16], [2]]) * others, rtol=1e-5)


def test_parameters_that_muon_leaves_to_sgd_may_have_their_own_momentum():
    constant, by_sgd = {"schedule.decay": "constant", "schedule.peak": 1}, [0, 2, 3, 4]  # all but the first kernel
    movements = measure_steps(2, "muon", **constant, **{"optimizer.rest_momentum": 0.5})
    np.testing.assert_allclose(movements[by_sgd, 1], 1.5)
    np.testing.assert_allclose(measure_steps(2, "muon", **constant)[by_sgd, 1], 1)


def test_rates_of_unknown_layers_are_refused():
    for field in ("head_peak", "stem_epochs"):
        recipe = override_recipe(Recipe(), {f"schedule.{field}": 1})
        with pytest.raises(UserError, match=f"schedule.{field} needs a model with a list of `layers`"):
            optimizers.make_optimizer(recipe, 1.0)


def test_mask_goes_by_the_last_name_in_any_kind_of_tree():
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    state = nnx.state({"bias": linear}, nnx.Param)
    expected = {"bias": {"bias": False, "kernel": True}}
    assert parameter_groups.mask_skipped(nnx.to_pure_dict(state), ("bias",)) == expected
    assert nnx.to_pure_dict(parameter_groups.mask_skipped(state, ("bias",))) == expected
    assert parameter_groups.mask_skipped({"scale": 1.0, "scales": 3.0}, ("scale",)) == {"scale": False, "scales": True}
    assert parameter_groups.mask_skipped(1.0, ("scale",)) is True


STEM = {"schedule.stem_epochs": 3, "schedule.end": 0, "schedule.decay": "polynomial", "train.epochs": 10}


@pytest.mark.parametrize("steps", [1, 7, 100, 267])
@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_updates_without_a_gradient_of_the_first_layer_are_those_at_rate_zero(steps, warmup):
    recipe = override_recipe(Recipe(), STEM | {"schedule.warmup_epochs": warmup})
    schedule = schedules.make_schedule(recipe, steps, steps / 10)
    rate = parameter_groups.make_group_rates(recipe, schedule, "stem", "head")["rest of the stem"]
    count = parameter_groups.count_stem_updates(recipe, steps)
    assert all(float(rate(step)) < 1e-5 for step in range(count, steps))  # but for rounding, 0
    assert count == 1 or float(rate(count - 1)) > 0


@pytest.mark.parametrize(
    "changes",
    [{"schedule.end": 1e-4}, {"schedule.decay": "constant"}, {"schedule.stem_epochs": 0}, {"optimizer.clip_norm": 1.0}],
)
def test_the_first_layer_always_has_a_gradient_where_it_matters(changes):
    assert parameter_groups.count_stem_updates(override_recipe(Recipe(), STEM | changes), 100) == 100
