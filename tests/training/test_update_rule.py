"""Recipes that differ in learning rates, weight decay, momentum, seed or length share one compiled program."""

import jax
import numpy as np
import optax
import pytest
from training.test_invariants import train_on_pod

from podscale import pod
from podscale.config.fields import ADDED_CHOICES
from podscale.config.options import Options
from podscale.data import loader
from podscale.optim import optimizers
from podscale.pod import make_batch_sharding
from podscale.recipe import load_recipe
from podscale.training import step
from podscale.training.compilation import make_train_call
from podscale.training.setup import prepare
from podscale.training.update_rule import describe_scalars

COMMON = {
    "model.name": "small_resnet",
    "model.width": 4,
    "batch.size": 64,
    "batch.span": 16,
    "train.epochs": 0.25,
    "augment.label_smoothing": 0.1,
    "schedule.peak": 0.1,
    "schedule.warmup_epochs": 0.1,
    "schedule.end": 0.01,
}
RULES = {
    "lars": {"optimizer.name": "lars", "optimizer.trust": 0.1, "schedule.bias_peak": 0.02, "schedule.decay": "cosine"},
    "sgd": {
        "optimizer.name": "sgd",
        "schedule.decay": "step",
        "schedule.milestones": (0.1, 0.2),
        "augment.mixup": 0.3,  # takes longer to compile than the rest
    },
    "adamw": {"optimizer.name": "adamw", "optimizer.epsilon": 1e-3, "schedule.peak": 1e-3},
    "muon": {"optimizer.name": "muon", "optimizer.trust": 0.1, "schedule.head_peak": 0.05},
    "rmsprop": {"optimizer.name": "rmsprop", "schedule.decay": "exponential", "schedule.decay_epochs": 0.1},
}
OTHER_NUMBERS = {
    "schedule.peak": 0.3,
    "schedule.end": 0.02,
    "schedule.warmup_epochs": 0.05,
    "optimizer.weight_decay": 0.02,
    "optimizer.momentum": 0.8,
    "augment.label_smoothing": 0.2,
    "train.epochs": 0.5,
    "train.seed": 7,
}


def make_recipe(rule, **changes):
    return load_recipe("digits").override(COMMON | RULES[rule] | changes)


def lower(recipe):
    program = prepare(recipe, pod.make_pod(jax.devices(), "1x2"), Options(steps_per_call=2))
    batch = step.describe_call_arguments(program.plan, program.mesh)
    scalars = describe_scalars(program.plan, program.mesh)
    return make_train_call(program).lower(program.describe_state(), *batch, scalars).as_text()


@pytest.mark.parametrize("rule", RULES)
def test_recipes_that_differ_in_numbers_share_one_program(rule):
    assert lower(make_recipe(rule)) == lower(make_recipe(rule, **OTHER_NUMBERS))


def test_a_number_of_0_turns_something_off_and_makes_another_program():
    text = lower(make_recipe("sgd"))
    assert lower(make_recipe("sgd", **{"augment.mixup": 0.0})) != text
    assert lower(make_recipe("sgd", **{"schedule.head_peak": 0.05})) != text


def test_the_settings_of_a_registered_optimizer_are_plain_numbers():
    settings = []

    def make_rule(section, rate):
        settings.append((float(section.momentum), float(section.weight_decay)))
        return optax.sgd(rate, section.momentum)

    optimizers.register_optimizer("plain_sgd")(make_rule)
    try:
        lower(make_recipe("sgd", **{"optimizer.name": "plain_sgd", "optimizer.momentum": 0.7}))
    finally:
        optimizers.RULES.remove("plain_sgd")
        ADDED_CHOICES.remove("optimizer.name")
    assert set(settings) == {(0.7, 1e-4)}


def list_rules():
    """Yield all rules; those that test_invariants.py and test_modern_models.py compare, too, are slow."""
    for rule in RULES:
        yield pytest.param(rule, marks=pytest.mark.slow if rule in ("lars", "adamw") else ())


@pytest.mark.heavy
@pytest.mark.parametrize("rule", list(list_rules()))
def test_numbers_as_arguments_train_as_constants_do(rule):
    recipe = make_recipe(rule, **{"model.precision": "float64"})
    with jax.enable_x64(True):
        losses, state = train_on_pod(recipe, "1x2")
        expected, expected_state = train_with_constants(recipe)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9), state, expected_state)


def train_with_constants(recipe):
    """Train with the recipe's numbers as constants of the compiled program."""
    program = prepare(recipe, pod.make_pod(jax.devices(), "1x2"))
    call = step.make_train_call(program.net, program.plan, program.optimizer, program.schedule, program.mesh)
    state, losses, sharding = program.init_state(), [], make_batch_sharding(program.mesh, axis=2)
    with loader.load_train_batches(program.data.train, program.plan, program.plan.calls(), sharding) as batches:
        for batch in batches:
            state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
            losses += list(np.asarray(metrics.loss)[: batch.count])
    return np.array(losses), state
