"""Muon against singular value decompositions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podscale.optim import newton_schulz, optimizers
from podscale.optim.muon_matrices import Matrices, list_matrices
from podscale.parallel.shared_matrices import Kind
from podscale.recipe import Recipe, override_recipe


def update_once(params, gradients, **changes):
    recipe = override_recipe(Recipe(), {"optimizer.name": "muon", "optimizer.trust": 0.25, **changes})
    rule = optimizers.make_optimizer(recipe, 0.5)
    updates, state = rule.update(gradients, rule.init(params), params)
    return updates, state


def test_step_is_along_the_nearest_orthogonal_matrix_by_a_fraction_of_the_norm():
    random = np.random.default_rng(0)
    w, g = (random.normal(size=(3, 3, 8, 16)).astype(np.float32) for _ in range(2))
    updates, _ = update_once({"kernel": w}, {"kernel": g}, **{"optimizer.weight_decay": 0})
    left, values, right = np.linalg.svd(g.reshape(72, 16), full_matrices=False)
    expected = -0.5 * 0.25 * np.linalg.norm(w) / 4 * (left @ right)  # an orthogonal matrix of 16 columns has norm 4
    moved = np.asarray(updates["kernel"]).reshape(72, 16)
    assert np.linalg.norm(moved) == pytest.approx(0.5 * 0.25 * np.linalg.norm(w), rel=1e-4)
    cosine = (moved * expected).sum() / np.linalg.norm(moved) / np.linalg.norm(expected)
    assert cosine > 0.97  # five Newton-Schulz steps leave singular values between 0.7 and 1.2
    spread = np.linalg.svd(moved, compute_uv=False)
    assert spread.max() / spread.min() < 2 < values.max() / values.min()


def test_sgd_updates_all_but_convolutions():
    params = {"kernel": np.ones((4, 3), np.float32), "bias": np.ones(3, np.float32)}
    gradients = {"kernel": np.full((4, 3), 2, np.float32), "bias": np.full(3, 3, np.float32)}
    updates, _ = update_once(params, gradients, **{"optimizer.weight_decay": 0.1})
    assert np.asarray(updates["kernel"]) == pytest.approx(-0.5 * (2 + 0.1))
    assert np.asarray(updates["bias"]) == pytest.approx(-0.5 * 3)


def orthogonal(matrix):
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left @ right


def test_dense_layers_but_the_head_move_along_orthogonal_matrices_and_fused_ones_along_several():
    """Queries, keys and values are three matrices, though one layer computes them."""
    random = np.random.default_rng(0)
    shapes = {"dense": (12, 6), "qkv": (6, 18), "head": (6, 3)}
    w, g = ({k: {"kernel": random.normal(size=s).astype(np.float32)} for k, s in shapes.items()} for _ in range(2))
    changes = {"optimizer.name": "muon", "optimizer.weight_decay": 0, "optimizer.trust": 0.25}
    rule = optimizers.make_optimizer(override_recipe(Recipe(), changes), 0.5, head="head")
    updates = rule.update(g, rule.init(w), w)[0]
    moved = {name: -np.asarray(layer["kernel"]) for name, layer in updates.items()}
    directions = {
        "dense": orthogonal(g["dense"]["kernel"]),
        "qkv": np.concatenate([orthogonal(block) for block in np.split(g["qkv"]["kernel"], 3, axis=1)], axis=1),
    }
    for name, direction in directions.items():
        length = 0.5 * 0.25 * np.linalg.norm(w[name]["kernel"])
        assert np.linalg.norm(moved[name]) == pytest.approx(length, rel=1e-4)
        assert (moved[name] * direction).sum() > 0.97 * length * np.linalg.norm(direction)
    np.testing.assert_allclose(moved["head"], 0.5 * g["head"]["kernel"], rtol=1e-5)


def test_positions_and_dense_layers_of_an_unknown_head_learn_by_sgd():
    params = {"positions": np.ones((4, 3), np.float32), "layer": {"kernel": np.ones((4, 3), np.float32)}}
    assert Matrices("head").label(params) == {"positions": False, "layer": {"kernel": True}}
    assert Matrices().label(params) == {"positions": False, "layer": {"kernel": False}}


def test_small_fused_layers_of_a_bfloat16_model_move_along_nearly_the_same_directions():
    random = np.random.default_rng(0)
    w, g = ({"qkv": {"kernel": random.normal(size=(16, 48)).astype(np.float32)}} for _ in range(2))
    results = []
    for precision in ("float32", "bfloat16"):
        changes = {"optimizer.name": "muon", "model.precision": precision}
        rule = optimizers.make_optimizer(override_recipe(Recipe(), changes), 0.5, head="head")
        results.append(np.asarray(rule.update(g, rule.init(w), w)[0]["qkv"]["kernel"]))
    assert np.linalg.norm(results[0] - results[1]) < 0.02 * np.linalg.norm(results[0])


def test_operations_of_matrices_are_counted():
    kinds = list_matrices(
        {"qkv": {"kernel": np.ones((4, 12))}, "head": {"kernel": np.ones((4, 2))}}, "head", 5, "float32"
    )
    products = 2 * 2 * 4 * 4 * 4 + 2 * 4**3  # XXᵀ, its square, and the product with X
    assert kinds == {"4x12 in 3": Kind(1, (4, 12), 3 * 5 * products)}


def test_operations_on_gram_matrices_are_counted():
    """After three iterations and after five, X is multiplied, and before them XXᵀ is computed."""
    kinds = list_matrices({"conv": {"kernel": np.ones((3, 3, 4, 6))}}, "", 5, "bfloat16")
    with_gram, with_matrix = 2 * 6**3, 2 * 36 * 6**2
    assert kinds == {"3x3x4x6": Kind(1, (3, 3, 4, 6), (9 + 5) * with_gram + 4 * with_matrix)}


def test_kernels_decay_towards_zero():
    w, g = np.ones((1, 1, 2, 2), np.float32), np.eye(2, dtype=np.float32)[None, None]
    updates, _ = update_once({"kernel": w}, {"kernel": g}, **{"optimizer.weight_decay": 0.1, "optimizer.trust": 1e-9})
    assert np.asarray(updates["kernel"]) == pytest.approx(-0.5 * 0.1, abs=1e-6)


def test_renormalize_restores_the_norm_and_steps_along_the_orthogonal_matrix():
    random = np.random.default_rng(0)
    w, g = (random.normal(size=(3, 3, 8, 16)).astype(np.float32) for _ in range(2))
    updates, _ = update_once(
        {"kernel": w}, {"kernel": g}, **{"optimizer.renormalize": True, "optimizer.weight_decay": 9}
    )
    moved = (w + np.asarray(updates["kernel"])).reshape(72, 16)
    along = (4 / np.linalg.norm(w) * w.reshape(72, 16) - moved) / (0.5 * 0.25)  # rate and trust
    values = np.linalg.svd(along, compute_uv=False)
    assert 0.6 < values.min() < values.max() < 1.3
    left, _, right = np.linalg.svd(g.reshape(72, 16), full_matrices=False)
    assert (along * (left @ right)).sum() / 16 == pytest.approx(values.mean(), rel=1e-3)


def test_more_newton_schulz_steps_come_closer_to_an_orthogonal_matrix():
    random = np.random.default_rng(0)
    w, g = (random.normal(size=(1, 1, 16, 16)).astype(np.float32) for _ in range(2))

    def spread(steps):
        updates, _ = update_once(
            {"kernel": w}, {"kernel": g}, **{"optimizer.newton_schulz": steps, "optimizer.weight_decay": 0}
        )
        values = np.linalg.svd(np.asarray(updates["kernel"])[0, 0], compute_uv=False)
        return values.max() / values.min()

    assert spread(1) > 2 * spread(3) > 2 * spread(5)


def test_each_of_several_kernels_is_updated_as_if_it_were_alone():
    random = np.random.default_rng(0)
    shapes = {"a": (3, 3, 4, 8), "b": (1, 1, 8, 8), "c": (3, 3, 4, 8), "d": (3, 3, 4, 8)}
    w, g = ({k: random.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in range(2))
    together, _ = update_once(w, g)
    for name in shapes:
        alone, _ = update_once({name: w[name]}, {name: g[name]})
        np.testing.assert_allclose(together[name], alone[name], rtol=1e-5, atol=1e-6)


# --- kernels of a bfloat16 model, orthogonalized together ------------------------------------------------------------

SHAPES = {"a": (3, 3, 8, 16), "b": (1, 1, 8, 8), "c": (3, 3, 8, 16)}
BFLOAT16 = {"model.precision": "bfloat16"}


def draw_kernels(seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def test_kernels_of_a_bfloat16_model_move_along_nearly_the_same_directions():
    w, g = draw_kernels(0), draw_kernels(1)
    fine, coarse = (update_once(w, g, **{"model.precision": kind})[0] for kind in ("float32", "bfloat16"))
    for name in w:
        assert np.linalg.norm(fine[name] - coarse[name]) < 0.02 * np.linalg.norm(fine[name])


def test_large_kernels_and_several_fused_layers_of_a_bfloat16_model_move_along_nearly_the_same_directions():
    random = np.random.default_rng(0)
    shapes = {"first": {"qkv": (16, 48)}, "second": {"qkv": (16, 48)}, "large": {"conv": (1, 1, 300, 280)}}
    w, g = (
        {k: {n: {"kernel": random.normal(size=s).astype(np.float32)} for n, s in v.items()} for k, v in shapes.items()}
        for _ in range(2)
    )
    results = []
    for precision in ("float32", "bfloat16"):
        changes = {"optimizer.name": "muon", "model.precision": precision, "optimizer.weight_decay": 0}
        rule = optimizers.make_optimizer(override_recipe(Recipe(), changes), 0.5, head="head")
        results.append(jax.tree.leaves(rule.update(g, rule.init(w), w)[0]))
    for fine, coarse in zip(*results, strict=True):
        assert np.linalg.norm(fine - coarse) < 0.02 * np.linalg.norm(fine)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_bfloat16_model_has_the_momentum_of_optax(nesterov):
    """Over several updates, so that a resumed run has the same momentum whichever way its kernels went."""
    w, states = draw_kernels(0), {}
    for precision in ("float32", "bfloat16"):
        changes = {"optimizer.name": "muon", "optimizer.nesterov": nesterov, "model.precision": precision}
        rule = optimizers.make_optimizer(override_recipe(Recipe(), changes), 0.5)
        state = rule.init(w)
        for seed in range(3):
            _, state = rule.update(draw_kernels(seed), state, w)
        states[precision] = state
    for ours, expected in zip(*(jax.tree.leaves(states[kind]) for kind in ("bfloat16", "float32")), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_state_has_the_names_and_shapes_that_checkpoints_hold(precision):
    """Runs saved before kernels were orthogonalized together resume: optax's state, with one stack per shape."""
    changes = {"optimizer.name": "muon", "model.precision": precision}
    rule = optimizers.make_optimizer(override_recipe(Recipe(), changes), 0.5)
    state = rule.init({**draw_kernels(0), "bias": np.zeros(3, np.float32)})
    _, state = rule.update({**draw_kernels(1), "bias": np.ones(3, np.float32)}, state, {**draw_kernels(0), "bias": 0.0})
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(state)
    }
    muon = {name.rsplit("True/inner_state/0/")[1]: shape for name, shape in leaves.items() if "True/" in name}
    assert muon == {
        "count": (),
        "mu/3x3x8x16": (2, 3, 3, 8, 16),
        "mu/1x1x8x8": (1, 1, 1, 8, 8),
        "ns_coeffs": (3,),
    }


def test_a_model_without_convolutions_has_an_update():
    params, gradients = {"kernel": np.ones((4, 3), np.float32)}, {"kernel": np.full((4, 3), 2, np.float32)}
    updates, _ = update_once(params, gradients, **BFLOAT16, **{"optimizer.weight_decay": 0})
    assert np.asarray(updates["kernel"]) == pytest.approx(-1)


def test_coefficients_are_those_of_optax():
    state = optax.contrib.scale_by_muon().init({"w": jnp.ones((2, 2))})
    np.testing.assert_array_equal(state.ns_coeffs, np.float32(newton_schulz.COEFFICIENTS))
