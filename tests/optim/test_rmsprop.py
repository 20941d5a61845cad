"""RMSProp against TensorFlow's formula, and layer-wise decay of the learning rate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.updates import GRADIENTS, PARAMS, RATES, make_recipe, run_updates, select_parameter

from podscale.errors import UserError
from podscale.optim import optimizers
from podscale.optim.layer_decay import compute_layer_factors
from podscale.recipe import Recipe, override_recipe

SETTINGS = {"name": "rmsprop", "momentum": 0.9, "second_moment": 0.9, "epsilon": 1e-3, "weight_decay": 0.01}


@pytest.mark.parametrize(("path", "decay"), [(("conv", "kernel"), 0.01), (("conv", "bias"), 0.0)])
def test_updates_are_tensorflows(path, decay):
    w = np.array(PARAMS[path[0]][path[1]])
    mean_square, velocity, expected = np.ones(2), np.zeros(2), []
    for rate, gradient in zip(RATES, select_parameter(GRADIENTS, *path), strict=True):
        g = np.asarray(gradient) + decay * w
        mean_square = 0.9 * mean_square + 0.1 * g**2
        velocity = 0.9 * velocity + rate * g / np.sqrt(mean_square + 1e-3)
        w = w - velocity
        expected.append(w)
    history = select_parameter(run_updates(make_recipe(**SETTINGS)), *path)
    np.testing.assert_allclose(history, expected, rtol=1e-5)


def test_epsilon_is_tensorflows_unless_given():
    first, second = (run_updates(make_recipe(**SETTINGS | {"epsilon": value})) for value in (0.0, 1e-3))
    jax.tree.map(np.testing.assert_array_equal, first, second)


# --- layer-wise decay ------------------------------------------------------------------------------------------------

LAYERS = {
    "layers": {
        0: {"patches": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "positions": jnp.ones(2)},
        1: {"qkv": {"kernel": jnp.ones((2, 2))}},
        2: {"scale": jnp.ones(2)},
        3: {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
    }
}


@pytest.mark.parametrize("rule", ["adamw", "lars", "sgd"])
def test_layer_decay_scales_the_updates_of_each_layer(rule):
    changes = {"optimizer.name": rule, "optimizer.weight_decay": 0.1}
    gradients = jax.tree.map(lambda w: 0.5 * w, LAYERS)
    updates = []
    for decay in (1.0, 0.5):
        recipe = override_recipe(Recipe(), changes | {"schedule.layer_decay": decay})
        optimizer = optimizers.make_optimizer(recipe, 0.1)
        state = optimizer.init(LAYERS)
        for _ in range(2):
            update, state = optimizer.update(gradients, state, LAYERS)
        updates.append(update)
    factors = {0: 0.25, 1: 0.5, 2: 1.0, 3: 1.0}  # the norm before the head counts with it
    for layer, factor in factors.items():
        whole, scaled = (tree["layers"][layer] for tree in updates)
        jax.tree.map(lambda a, b, f=factor: np.testing.assert_allclose(f * a, b, rtol=1e-6), whole, scaled)


def test_a_model_without_a_list_of_layers_is_refused():
    with pytest.raises(UserError, match=r"schedule\.layer_decay needs a model whose layers are all in a list"):
        compute_layer_factors({"dense": {"kernel": jnp.ones(2)}}, 0.5)
