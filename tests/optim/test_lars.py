"""LARS against its arithmetic, computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.updates import GRADIENTS, PARAMS, assert_close, make_arrays, make_recipe, run_updates, select_parameter

from podscale.optim import optimizers

FORMS = ("mlperf", "scaled", "optax")
LARS = {"trust": 0.5, "momentum": 0.9, "weight_decay": 0.1, "epsilon": 0.0}


def compute_length(x):
    return (x[0] ** 2 + x[1] ** 2) ** 0.5


def test_mlperf_form_matches_a_computation_by_hand():
    w0, (_, g1, g2) = np.array([3.0, 4.0]), select_parameter(GRADIENTS, "conv", "kernel")
    # |w| = 5, |g| = 2: trust = 0.5 * 5 / (2 + 0.1 * 5) = 1; the step is 1 * 1 * (g + 0.1 w) = (0.3, 2.4)
    v0 = np.array([0.3, 2.4])
    w1 = w0 - v0
    trust1 = 0.5 * compute_length(w1) / (2**0.5 + 0.1 * compute_length(w1))
    v1 = 0.9 * v0 + 0.5 * trust1 * (g1 + 0.1 * w1)
    w2 = w1 - v1
    trust2 = 0.5 * compute_length(w2) / (compute_length(g2) + 0.1 * compute_length(w2))
    v2 = 0.9 * v1 + 0.25 * trust2 * (g2 + 0.1 * w2)
    assert_close(select_parameter(run_updates(make_recipe(form="mlperf", **LARS)), "conv", "kernel"), [w1, w2, w2 - v2])


def test_scaled_form_matches_a_computation_by_hand():
    w0, (g0, g1, g2) = np.array([3.0, 4.0]), select_parameter(GRADIENTS, "conv", "kernel")
    # The same trust, 1, but the step is 1 * 1 * m = g: weight decay is in the trust ratio only.
    m0 = g0
    w1 = w0 - np.array([0.0, 2.0])
    m1 = 0.9 * m0 + g1
    w2 = w1 - 0.5 * 0.5 * compute_length(w1) / (2**0.5 + 0.1 * compute_length(w1)) * m1
    m2 = 0.9 * m1 + g2
    w3 = w2 - 0.25 * 0.5 * compute_length(w2) / (compute_length(g2) + 0.1 * compute_length(w2)) * m2
    assert_close(select_parameter(run_updates(make_recipe(form="scaled", **LARS)), "conv", "kernel"), [w1, w2, w3])


def test_optax_form_matches_a_computation_by_hand():
    w0, (_, g1, g2) = np.array([3.0, 4.0]), select_parameter(GRADIENTS, "conv", "kernel")
    # g + 0.1 w = (0.3, 2.4): trust = 0.5 * 5 / |(0.3, 2.4)|
    v0 = 2.5 / (0.09 + 5.76) ** 0.5 * np.array([0.3, 2.4])
    w1 = w0 - v0
    d1 = g1 + 0.1 * w1
    v1 = 0.9 * v0 + 0.5 * 0.5 * compute_length(w1) / compute_length(d1) * d1
    w2 = w1 - v1
    d2 = g2 + 0.1 * w2
    v2 = 0.9 * v1 + 0.25 * 0.5 * compute_length(w2) / compute_length(d2) * d2
    assert_close(select_parameter(run_updates(make_recipe(form="optax", **LARS)), "conv", "kernel"), [w1, w2, w2 - v2])


@pytest.mark.parametrize(("form", "step"), [("mlperf", [0.15, 1.2]), ("scaled", [0.0, 1.0])])
def test_epsilon_is_added_to_the_denominator(form, step):
    after = run_updates(make_recipe(form=form, **LARS | {"epsilon": 2.5}))  # trust = 2.5 / (2.5 + 2.5)
    assert_close(after[0]["conv"]["kernel"], np.array([3.0, 4.0]) - step)


@pytest.mark.parametrize("form", ["mlperf", "optax"])
def test_skipped_parameters_have_the_plain_rate_and_momentum(form):
    # v: (0, 2), then 0.9 v + 0.5 (1, -1) = (0.5, 1.3), then 0.9 v + 0.25 (-2, 0.5) = (-0.05, 1.295)
    expected = [[3.0, 2.0], [2.5, 0.7], [2.55, -0.595]]
    assert_close(select_parameter(run_updates(make_recipe(form=form, **LARS)), "conv", "bias"), expected)


def test_skipped_parameters_have_the_plain_rate_and_momentum_in_the_scaled_form():
    # m: (0, 2), (1, 0.8), (-1.1, 1.22), each times the rate of its own step
    expected = [[3.0, 2.0], [2.5, 1.6], [2.775, 1.295]]
    assert_close(select_parameter(run_updates(make_recipe(form="scaled", **LARS)), "conv", "bias"), expected)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_adapted_if_all_parameters_are_skipped(form):
    after = run_updates(make_recipe(form=form, skip=["bias", "kernel"], **LARS))
    np.testing.assert_array_equal(select_parameter(after, "conv", "kernel"), select_parameter(after, "conv", "bias"))


@pytest.mark.parametrize("form", FORMS)
def test_trust_is_one_where_the_weights_are_zero(form):
    assert_close(run_updates(make_recipe(form=form, **LARS))[0]["head"]["kernel"], [-1.0, 1.0])


@pytest.mark.parametrize(("form", "decayed"), [("mlperf", 0.9), ("scaled", 1.0), ("optax", 0.5)])
def test_weights_only_decay_without_a_gradient(form, decayed):
    """Trust is 1 where the gradient is 0; optax takes the norm of g + βw, so trust = η/β and the step is ηw."""
    zeros = jax.tree.map(lambda x: 0 * x, make_arrays(PARAMS))
    after = run_updates(make_recipe(form=form, **LARS), gradients=[zeros])
    assert_close(after[0]["conv"]["kernel"], [3 * decayed, 4 * decayed])


def test_new_rate_acts_on_new_gradients_in_mlperf_and_on_all_momentum_in_scaled():
    """With nothing to adapt, both are SGD with momentum: equal at a constant rate, different once it drops to 0."""
    plain = {"skip": ["w"], "momentum": 0.5}
    problem = {"params": {"w": [0.0, 0.0]}, "gradients": [{"w": [1.0, 2.0]}] * 3}

    def train(form, rate):
        return select_parameter(run_updates(make_recipe(form=form, **plain), rate, **problem), "w")

    np.testing.assert_array_equal(train("mlperf", 0.1), train("scaled", 0.1))

    def stop_after_one(step):
        return jnp.where(step < 1, 1.0, 0.0)

    assert_close(train("mlperf", stop_after_one), [[-1, -2], [-1.5, -3], [-1.75, -3.5]])  # v halves each step
    assert_close(train("scaled", stop_after_one), [[-1, -2], [-1, -2], [-1, -2]])  # stops at once


def test_norms_of_bfloat16_are_taken_in_float32():
    """A sum of ones in bfloat16 stands still at 256."""
    ones = {"w": jnp.ones(4096, jnp.bfloat16)}
    rule = optimizers.make_optimizer(make_recipe(form="mlperf", trust=1.0, weight_decay=0.0), 1.0)
    gradient = {"w": jnp.ones(4096, jnp.bfloat16).at[1:].set(0)}  # |w| = 64, |g| = 1
    updates, _ = rule.update(gradient, rule.init(ones), ones)
    assert float(updates["w"][0]) == -64
