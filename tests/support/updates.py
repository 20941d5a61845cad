"""Run update rules on a small tree of parameters, for tests of optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podscale.optim import optimizers
from podscale.recipe import Recipe, override_recipe

RATES = (1.0, 0.5, 0.25)
PARAMS = {"conv": {"kernel": [3.0, 4.0], "bias": [3.0, 4.0]}, "head": {"kernel": [0.0, 0.0]}}
GRADIENTS = [
    {"conv": {"kernel": [0.0, 2.0], "bias": [0.0, 2.0]}, "head": {"kernel": [1.0, -1.0]}},
    {"conv": {"kernel": [1.0, -1.0], "bias": [1.0, -1.0]}, "head": {"kernel": [0.0, 0.0]}},
    {"conv": {"kernel": [-2.0, 0.5], "bias": [-2.0, 0.5]}, "head": {"kernel": [2.0, 1.0]}},
]


def make_recipe(**fields):
    return override_recipe(Recipe(), {f"optimizer.{key}": value for key, value in fields.items()})


def make_arrays(tree, dtype=jnp.float32):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree, is_leaf=lambda x: isinstance(x, list))


def follow_rates(step):
    """Return a learning rate that changes, as the forms of LARS differ in what they do with the change."""
    return jnp.asarray(RATES, jnp.float32)[step]


def run_updates(recipe, rate=follow_rates, params=PARAMS, gradients=GRADIENTS):
    """Return the parameters after each step."""
    params, rule, history = make_arrays(params), optimizers.make_optimizer(recipe, rate), []
    state = rule.init(params)
    for gradient in gradients:
        updates, state = jax.jit(rule.update)(make_arrays(gradient), state, params)
        params = optax.apply_updates(params, updates)
        history.append(jax.tree.map(np.asarray, params))
    return history


def select_parameter(trees, *path):
    """Return the values of one parameter, step by step, in float64."""
    for key in path:
        trees = [tree[key] for tree in trees]
    return np.array(trees, np.float64)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, np.array(expected), rtol=2e-6, atol=1e-7)
