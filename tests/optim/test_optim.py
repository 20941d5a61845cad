"""Update rules and schedules against their written-out arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from podscale.errors import UserError
from podscale.optim import optimizers, parameter_groups, schedules
from podscale.recipe import Recipe, override

FORMS = ("mlperf", "scaled", "optax")
RATES = (1.0, 0.5, 0.25)
PARAMS = {"conv": {"kernel": [3.0, 4.0], "bias": [3.0, 4.0]}, "head": {"kernel": [0.0, 0.0]}}
GRADIENTS = [
    {"conv": {"kernel": [0.0, 2.0], "bias": [0.0, 2.0]}, "head": {"kernel": [1.0, -1.0]}},
    {"conv": {"kernel": [1.0, -1.0], "bias": [1.0, -1.0]}, "head": {"kernel": [0.0, 0.0]}},
    {"conv": {"kernel": [-2.0, 0.5], "bias": [-2.0, 0.5]}, "head": {"kernel": [2.0, 1.0]}},
]
LARS = {"trust": 0.5, "momentum": 0.9, "weight_decay": 0.1, "epsilon": 0.0}


def recipe(**fields):
    return override(Recipe(), {f"optimizer.{key}": value for key, value in fields.items()})


def arrays(tree, dtype=jnp.float32):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree, is_leaf=lambda x: isinstance(x, list))


def rate_of(step):
    """A learning rate that changes, as the forms of LARS differ in what they do with the change."""
    return jnp.asarray(RATES, jnp.float32)[step]


def run(wanted, rate=rate_of, params=PARAMS, gradients=GRADIENTS):
    """The parameters after each step."""
    params, rule, history = arrays(params), optimizers.make_optimizer(wanted, rate), []
    state = rule.init(params)
    for gradient in gradients:
        updates, state = jax.jit(rule.update)(arrays(gradient), state, params)
        params = optax.apply_updates(params, updates)
        history.append(jax.tree.map(np.asarray, params))
    return history


def column(tree_list, *path):
    """One parameter's values, step by step, in float64."""
    for key in path:
        tree_list = [tree[key] for tree in tree_list]
    return np.array(tree_list, np.float64)


def length(x):
    return (x[0] ** 2 + x[1] ** 2) ** 0.5


def close(actual, expected):
    np.testing.assert_allclose(actual, np.array(expected), rtol=2e-6, atol=1e-7)


# --- LARS --------------------------------------------------------------------------------------------------------


def test_lars_mlperf_by_hand():
    w0, (_, g1, g2) = np.array([3.0, 4.0]), column(GRADIENTS, "conv", "kernel")
    # |w| = 5, |g| = 2: trust = 0.5 * 5 / (2 + 0.1 * 5) = 1; the step is 1 * 1 * (g + 0.1 w) = (0.3, 2.4)
    v0 = np.array([0.3, 2.4])
    w1 = w0 - v0
    trust1 = 0.5 * length(w1) / (2**0.5 + 0.1 * length(w1))
    v1 = 0.9 * v0 + 0.5 * trust1 * (g1 + 0.1 * w1)
    w2 = w1 - v1
    trust2 = 0.5 * length(w2) / (length(g2) + 0.1 * length(w2))
    v2 = 0.9 * v1 + 0.25 * trust2 * (g2 + 0.1 * w2)
    close(column(run(recipe(form="mlperf", **LARS)), "conv", "kernel"), [w1, w2, w2 - v2])


def test_lars_scaled_by_hand():
    w0, (g0, g1, g2) = np.array([3.0, 4.0]), column(GRADIENTS, "conv", "kernel")
    # The same trust, 1, but the step is 1 * 1 * m = g: weight decay is in the trust ratio only.
    m0 = g0
    w1 = w0 - np.array([0.0, 2.0])
    m1 = 0.9 * m0 + g1
    w2 = w1 - 0.5 * 0.5 * length(w1) / (2**0.5 + 0.1 * length(w1)) * m1
    m2 = 0.9 * m1 + g2
    w3 = w2 - 0.25 * 0.5 * length(w2) / (length(g2) + 0.1 * length(w2)) * m2
    close(column(run(recipe(form="scaled", **LARS)), "conv", "kernel"), [w1, w2, w3])


def test_lars_optax_by_hand():
    w0, (_, g1, g2) = np.array([3.0, 4.0]), column(GRADIENTS, "conv", "kernel")
    # g + 0.1 w = (0.3, 2.4): trust = 0.5 * 5 / |(0.3, 2.4)|
    v0 = 2.5 / (0.09 + 5.76) ** 0.5 * np.array([0.3, 2.4])
    w1 = w0 - v0
    d1 = g1 + 0.1 * w1
    v1 = 0.9 * v0 + 0.5 * 0.5 * length(w1) / length(d1) * d1
    w2 = w1 - v1
    d2 = g2 + 0.1 * w2
    v2 = 0.9 * v1 + 0.25 * 0.5 * length(w2) / length(d2) * d2
    close(column(run(recipe(form="optax", **LARS)), "conv", "kernel"), [w1, w2, w2 - v2])


@pytest.mark.parametrize(("form", "step"), [("mlperf", [0.15, 1.2]), ("scaled", [0.0, 1.0])])
def test_epsilon_is_added_to_the_denominator(form, step):
    after = run(recipe(form=form, **LARS | {"epsilon": 2.5}))  # trust = 2.5 / (2.5 + 2.5)
    close(after[0]["conv"]["kernel"], np.array([3.0, 4.0]) - step)


@pytest.mark.parametrize("form", ["mlperf", "optax"])
def test_skipped_parameters_have_the_plain_rate_and_momentum(form):
    # v: (0, 2), then 0.9 v + 0.5 (1, -1) = (0.5, 1.3), then 0.9 v + 0.25 (-2, 0.5) = (-0.05, 1.295)
    expected = [[3.0, 2.0], [2.5, 0.7], [2.55, -0.595]]
    close(column(run(recipe(form=form, **LARS)), "conv", "bias"), expected)


def test_skipped_parameters_have_the_plain_rate_and_momentum_when_scaled():
    # m: (0, 2), (1, 0.8), (-1.1, 1.22), each times the rate of its own step
    expected = [[3.0, 2.0], [2.5, 1.6], [2.775, 1.295]]
    close(column(run(recipe(form="scaled", **LARS)), "conv", "bias"), expected)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_adapted_if_everything_is_skipped(form):
    after = run(recipe(form=form, skip=["bias", "kernel"], **LARS))
    np.testing.assert_array_equal(column(after, "conv", "kernel"), column(after, "conv", "bias"))


@pytest.mark.parametrize("form", FORMS)
def test_trust_is_one_where_the_weights_are_zero(form):
    close(run(recipe(form=form, **LARS))[0]["head"]["kernel"], [-1.0, 1.0])


@pytest.mark.parametrize(("form", "decayed"), [("mlperf", 0.9), ("scaled", 1.0), ("optax", 0.5)])
def test_without_a_gradient_weights_only_decay(form, decayed):
    """Trust is 1 where the gradient is zero; optax measures g + βw instead, so that trust = η/β and the step is ηw."""
    silent = jax.tree.map(lambda x: 0 * x, arrays(PARAMS))
    after = run(recipe(form=form, **LARS), gradients=[silent])
    close(after[0]["conv"]["kernel"], [3 * decayed, 4 * decayed])


def test_a_change_of_rate_acts_on_new_gradients_in_mlperf_and_on_all_momentum_in_scaled():
    """With nothing to adapt both are momentum: equal at a constant rate, different once the rate goes to zero."""
    plain = {"skip": ["w"], "momentum": 0.5}
    problem = {"params": {"w": [0.0, 0.0]}, "gradients": [{"w": [1.0, 2.0]}] * 3}

    def moves(form, rate):
        return column(run(recipe(form=form, **plain), rate, **problem), "w")

    np.testing.assert_array_equal(moves("mlperf", 0.1), moves("scaled", 0.1))

    def stops(step):
        return jnp.where(step < 1, 1.0, 0.0)

    close(moves("mlperf", stops), [[-1, -2], [-1.5, -3], [-1.75, -3.5]])  # rolls on: v halves
    close(moves("scaled", stops), [[-1, -2], [-1, -2], [-1, -2]])  # stands


# --- the others ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_the_recurrence_of_pytorch(nesterov):
    after = run(recipe(name="sgd", nesterov=nesterov, momentum=0.9, weight_decay=0.1))
    for name, decay in (("kernel", 0.1), ("bias", 0.0)):
        w, v, expected = np.array([3.0, 4.0]), np.zeros(2), []
        for rate, g in zip(RATES, column(GRADIENTS, "conv", name), strict=True):
            d = g + decay * w
            v = 0.9 * v + d
            w = w - rate * (d + 0.9 * v if nesterov else v)
            expected.append(w)
        close(column(after, "conv", name), expected)


def test_adamw_is_its_recurrence():
    after = run(recipe(name="adamw", momentum=0.9, second_moment=0.99, epsilon=1e-3, weight_decay=0.1))
    for name, decay in (("kernel", 0.1), ("bias", 0.0)):
        w, m, v, expected = np.array([3.0, 4.0]), np.zeros(2), np.zeros(2), []
        for t, (rate, g) in enumerate(zip(RATES, column(GRADIENTS, "conv", name), strict=True), start=1):
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * g**2
            w = w - rate * (m / (1 - 0.9**t) / ((v / (1 - 0.99**t)) ** 0.5 + 1e-3) + decay * w)
            expected.append(w)
        close(column(after, "conv", name), expected)


def test_adamw_survives_a_zero_gradient_without_epsilon():
    silent = jax.tree.map(lambda x: 0 * x, arrays(PARAMS))
    after = run(recipe(name="adamw", epsilon=0.0, weight_decay=0.0), gradients=[silent])
    close(after[0]["conv"]["kernel"], [3, 4])


@pytest.mark.parametrize(("limit", "step"), [(2.5, [1.5, 2.0]), (10.0, [3.0, 4.0])])
def test_gradients_are_clipped_to_the_global_norm_first(limit, step):
    wanted = recipe(name="sgd", clip_norm=limit, weight_decay=0.1, momentum=0.0)
    after = run(wanted, 1.0, {"a": [0.0], "b": [0.0]}, [{"a": [3.0], "b": [4.0]}])
    close([-after[0]["a"][0], -after[0]["b"][0]], step)


# --- trees and dtypes ------------------------------------------------------------------------------------------------

RULES = [{"form": form} for form in FORMS] + [{"name": "sgd"}, {"name": "adamw"}]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: next(iter(rule.values())))
def test_in_64_bit_mode_rate_updates_and_state_are_float64(rule):
    with jax.enable_x64(True):
        rate = schedules.make_schedule(recipe(), steps=10, steps_per_epoch=1)
        assert rate(3).dtype == jnp.float64
        transformation, params = optimizers.make_optimizer(recipe(**rule), rate), arrays(PARAMS, jnp.float64)
        updates, state = transformation.update(params, transformation.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {np.dtype("float64")}
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {np.dtype("float64")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: next(iter(rule.values())))
def test_the_state_is_a_tree_of_arrays_with_the_shapes_of_the_parameters(rule):
    params = arrays(PARAMS)
    transformation = optimizers.make_optimizer(recipe(clip_norm=1.0, **rule), rate_of)
    state = transformation.init(params)
    _, after = transformation.update(params, state, params)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) % sum(x.size for x in jax.tree.leaves(params)) == 0


def test_norms_of_bfloat16_are_taken_in_float32():
    """A sum of ones in bfloat16 stands still at 256."""
    ones = {"w": jnp.ones(4096, jnp.bfloat16)}
    rule = optimizers.make_optimizer(recipe(form="mlperf", trust=1.0, weight_decay=0.0), 1.0)
    gradient = {"w": jnp.ones(4096, jnp.bfloat16).at[1:].set(0)}  # |w| = 64, |g| = 1
    updates, _ = rule.update(gradient, rule.init(ones), ones)
    assert float(updates["w"][0]) == -64


def test_skipping_goes_by_the_last_name_whatever_the_tree():
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    state = nnx.state({"bias": linear}, nnx.Param)
    expected = {"bias": {"bias": False, "kernel": True}}
    assert parameter_groups.mask_skipped(nnx.to_pure_dict(state), ("bias",)) == expected
    assert nnx.to_pure_dict(parameter_groups.mask_skipped(state, ("bias",))) == expected
    assert parameter_groups.mask_skipped({"scale": 1.0, "scales": 3.0}, ("scale",)) == {"scale": False, "scales": True}
    assert parameter_groups.mask_skipped(1.0, ("scale",)) is True


# --- schedules -----------------------------------------------------------------------------------------------------


def rates(at, steps=100, steps_per_epoch=10.0, size=128, **fields):
    changes = {f"schedule.{key}": value for key, value in fields.items()} | {"batch.size": size}
    rate = schedules.make_schedule(override(Recipe(), changes), steps, steps_per_epoch)
    return [float(jax.jit(rate)(step)) for step in at]


def test_polynomial_decay_from_the_end_of_warmup_to_the_end():
    wanted = {"peak": 8.0, "warmup_epochs": 2.0, "decay": "polynomial", "power": 2.0, "end": 0.5}
    middle = 0.5 + 7.5 * 0.5**2
    close(rates((0, 5, 20, 60, 100, 1000), **wanted), [0, 2, 8, middle, 0.5, 0.5])


def test_cosine_decay():
    wanted = {"peak": 8.0, "warmup_epochs": 2.0, "decay": "cosine", "end": 1.0}
    quarter = 1 + 7 * (1 + 0.5**0.5) / 2
    close(rates((0, 20, 40, 60, 100), **wanted), [0, 8, quarter, 4.5, 1])


def test_step_decay_multiplies_at_each_milestone():
    wanted = {"peak": 4.0, "warmup_epochs": 1.0, "decay": "step", "milestones": [3.0, 6.0], "factor": 0.5}
    close(rates((0, 5, 10, 29, 30, 59, 60, 100), **wanted), [0, 2, 4, 4, 2, 2, 1, 1])


def test_constant_rate_and_no_warmup():
    close(rates((0, 50, 100), peak=3.0, decay="constant"), [3, 3, 3])


def test_warmup_may_end_between_two_steps():
    close(rates((0, 2, 3), peak=5.0, warmup_epochs=0.25, decay="constant"), [0, 4, 5])


def test_a_run_that_is_all_warmup_only_rises():
    close(rates((0, 50, 99), peak=1.0, warmup_epochs=10.0), [0, 0.5, 0.99])


def test_linear_scaling_of_the_peak_with_the_batch():
    """Goyal et al. 2017: 0.1 for 256 images makes 3.2 for 8192."""
    wanted = {"peak": 0.1, "scale_batch": 256, "warmup_epochs": 5.0, "decay": "step"}
    close(rates((0, 25, 50), size=8192, **wanted), [0, 1.6, 3.2])


@pytest.mark.parametrize(
    ("batch", "peak", "warmup", "epochs"), [(4096, 10.0, 5, 60), (32768, 31.2, 25, 72), (65536, 24.7, 31, 88)]
)
def test_published_schedules_peak_at_the_end_of_warmup_and_end_at_1e_4(batch, peak, warmup, epochs):
    steps_per_epoch = 1281167 / batch
    steps, top = int(np.ceil(epochs * steps_per_epoch)), warmup * steps_per_epoch
    wanted = {"peak": peak, "warmup_epochs": float(warmup), "power": 2.0, "end": 1e-4}
    at = (0, top / 2, top, steps)
    close(rates(at, steps, steps_per_epoch, batch, **wanted), [0, peak / 2, peak, 1e-4])
    before, after = rates((int(top), int(top) + 1), steps, steps_per_epoch, batch, **wanted)
    assert 0.98 * peak < min(before, after) <= max(before, after) <= peak * (1 + 1e-6)


# --- muon --------------------------------------------------------------------------------------------------------


def muon_step(params, gradients, **changes):
    recipe = override(Recipe(), {"optimizer.name": "muon", "optimizer.trust": 0.25, **changes})
    rule = optimizers.make_optimizer(recipe, 0.5)
    updates, state = rule.update(gradients, rule.init(params), params)
    return updates, state


def test_muon_moves_a_kernel_along_the_nearest_orthogonal_matrix_by_a_share_of_its_norm():
    random = np.random.default_rng(0)
    w, g = (random.normal(size=(3, 3, 8, 16)).astype(np.float32) for _ in range(2))
    updates, _ = muon_step({"kernel": w}, {"kernel": g}, **{"optimizer.weight_decay": 0})
    left, values, right = np.linalg.svd(g.reshape(72, 16), full_matrices=False)
    wanted = -0.5 * 0.25 * np.linalg.norm(w) / 4 * (left @ right)  # an orthogonal matrix of 16 columns has norm 4
    moved = np.asarray(updates["kernel"]).reshape(72, 16)
    assert np.linalg.norm(moved) == pytest.approx(0.5 * 0.25 * np.linalg.norm(w), rel=1e-4)
    cosine = (moved * wanted).sum() / np.linalg.norm(moved) / np.linalg.norm(wanted)
    assert cosine > 0.97  # five Newton-Schulz steps leave singular values between 0.7 and 1.2
    spread = np.linalg.svd(moved, compute_uv=False)
    assert spread.max() / spread.min() < 2 < values.max() / values.min()


def test_muon_leaves_all_but_convolutions_to_sgd():
    params = {"kernel": np.ones((4, 3), np.float32), "bias": np.ones(3, np.float32)}
    gradients = {"kernel": np.full((4, 3), 2, np.float32), "bias": np.full(3, 3, np.float32)}
    updates, _ = muon_step(params, gradients, **{"optimizer.weight_decay": 0.1})
    assert np.asarray(updates["kernel"]) == pytest.approx(-0.5 * (2 + 0.1))
    assert np.asarray(updates["bias"]) == pytest.approx(-0.5 * 3)


def test_muon_decays_kernels_towards_zero():
    w, g = np.ones((1, 1, 2, 2), np.float32), np.eye(2, dtype=np.float32)[None, None]
    updates, _ = muon_step({"kernel": w}, {"kernel": g}, **{"optimizer.weight_decay": 0.1, "optimizer.trust": 1e-9})
    assert np.asarray(updates["kernel"]) == pytest.approx(-0.5 * 0.1, abs=1e-6)


def test_muon_that_renormalizes_gives_a_kernel_its_norm_back_and_moves_it_along_the_orthogonal_matrix():
    random = np.random.default_rng(0)
    w, g = (random.normal(size=(3, 3, 8, 16)).astype(np.float32) for _ in range(2))
    updates, _ = muon_step({"kernel": w}, {"kernel": g}, **{"optimizer.renormalize": True, "optimizer.weight_decay": 9})
    moved = (w + np.asarray(updates["kernel"])).reshape(72, 16)
    along = (4 / np.linalg.norm(w) * w.reshape(72, 16) - moved) / (0.5 * 0.25)  # rate and trust
    values = np.linalg.svd(along, compute_uv=False)
    assert 0.6 < values.min() < values.max() < 1.3
    left, _, right = np.linalg.svd(g.reshape(72, 16), full_matrices=False)
    assert (along * (left @ right)).sum() / 16 == pytest.approx(values.mean(), rel=1e-3)


def test_more_newton_schulz_steps_come_nearer_to_an_orthogonal_matrix():
    random = np.random.default_rng(0)
    w, g = (random.normal(size=(1, 1, 16, 16)).astype(np.float32) for _ in range(2))

    def spread(steps):
        updates, _ = muon_step(
            {"kernel": w}, {"kernel": g}, **{"optimizer.newton_schulz": steps, "optimizer.weight_decay": 0}
        )
        values = np.linalg.svd(np.asarray(updates["kernel"])[0, 0], compute_uv=False)
        return values.max() / values.min()

    assert spread(1) > 2 * spread(3) > 2 * spread(5)


def test_muon_moves_each_of_several_kernels_as_if_it_were_alone():
    random = np.random.default_rng(0)
    shapes = {"a": (3, 3, 4, 8), "b": (1, 1, 8, 8), "c": (3, 3, 4, 8), "d": (3, 3, 4, 8)}
    w, g = ({k: random.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in range(2))
    together, _ = muon_step(w, g)
    for name in shapes:
        alone, _ = muon_step({name: w[name]}, {name: g[name]})
        np.testing.assert_allclose(together[name], alone[name], rtol=1e-5, atol=1e-6)


# --- rates of their own ------------------------------------------------------------------------------------------

MODEL = {
    "layers": {
        0: {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)},
        1: {"bias": np.ones(3, np.float32)},
        10: {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)},
    }
}


def moves(steps, name="sgd", **changes):
    """How far each parameter of MODEL moves at each step under gradients of 1, by the first of its numbers."""
    settings = {"optimizer.name": name, "optimizer.momentum": 0, "optimizer.weight_decay": 0, "train.epochs": 8}
    wanted = override(Recipe(), settings | {"schedule.decay": "polynomial", "schedule.end": 0} | changes)
    wanted = override(wanted, {"schedule.power": 1})
    rule = optimizers.make_optimizer(wanted, schedules.make_schedule(wanted, 8, 1.0), stem="layers.0", head="layers.10")
    gradients, state, found = jax.tree.map(np.ones_like, MODEL), rule.init(MODEL), []
    for _ in range(steps):
        updates, state = rule.update(gradients, state, MODEL)
        found.append([float(leaf.ravel()[0]) for leaf in jax.tree.leaves(updates)])
    return -np.array(found).T  # parameters: bias 0, kernel 0, bias 1, bias 10, kernel 10


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_biases_and_the_head_may_have_peaks_of_their_own(name):
    found = moves(5, name, **{"schedule.peak": 2, "schedule.bias_peak": 16, "schedule.head_peak": 32})
    shape = 1 - np.arange(5) / 8
    np.testing.assert_allclose(found, np.array([[16], [2], [16], [16], [32]]) * shape, rtol=1e-5)


def test_the_first_layer_may_go_through_the_schedule_sooner_than_the_rest():
    found = moves(6, **{"schedule.peak": 2, "schedule.bias_peak": 16, "schedule.stem_epochs": 2})
    rest, stem = 1 - np.arange(6) / 8, np.array([1, 0.5, 0, 0, 0, 0])
    np.testing.assert_allclose(found[:2], np.array([[16], [2]]) * stem, atol=1e-6)
    np.testing.assert_allclose(found[2:], np.array([[16], [16], [2]]) * rest, rtol=1e-5)


def test_what_muon_leaves_to_sgd_may_have_a_momentum_of_its_own():
    found = moves(2, "muon", **{"schedule.decay": "constant", "schedule.peak": 1, "optimizer.rest_momentum": 0.5})
    np.testing.assert_allclose(found[:, 1], 1.5)
    np.testing.assert_allclose(moves(2, "muon", **{"schedule.decay": "constant", "schedule.peak": 1})[:, 1], 1)


def test_rates_of_layers_that_nobody_knows_are_refused():
    for field in ("head_peak", "stem_epochs"):
        wanted = override(Recipe(), {f"schedule.{field}": 1})
        with pytest.raises(UserError, match=f"schedule.{field} needs a model with a list of `layers`"):
            optimizers.make_optimizer(wanted, 1.0)
