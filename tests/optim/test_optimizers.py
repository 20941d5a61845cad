"""What all optimizers have in common: dtypes and state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.updates import PARAMS, follow_rates, make_arrays, make_recipe

from podscale.optim import optimizers, schedules

FORMS = ("mlperf", "scaled", "optax")
RULES = [{"form": form} for form in FORMS] + [{"name": "sgd"}, {"name": "adamw"}]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: next(iter(rule.values())))
def test_rate_updates_and_state_are_float64_in_64_bit_mode(rule):
    with jax.enable_x64(True):
        rate = schedules.make_schedule(make_recipe(), steps=10, steps_per_epoch=1)
        assert rate(3).dtype == jnp.float64
        transformation, params = optimizers.make_optimizer(make_recipe(**rule), rate), make_arrays(PARAMS, jnp.float64)
        updates, state = transformation.update(params, transformation.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {np.dtype("float64")}
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {np.dtype("float64")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: next(iter(rule.values())))
def test_state_is_a_tree_of_arrays_with_the_shapes_of_the_parameters(rule):
    params = make_arrays(PARAMS)
    transformation = optimizers.make_optimizer(make_recipe(clip_norm=1.0, **rule), follow_rates)
    state = transformation.init(params)
    _, after = transformation.update(params, state, params)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) % sum(x.size for x in jax.tree.leaves(params)) == 0
