"""Sharded updates equal updates of all weights on all devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.config.stop_condition import StopCondition
from podscale.optim import optimizers
from podscale.optim.muon import Sharing
from podscale.optim.muon_matrices import name_parameter
from podscale.parallel import collectives, sharded
from podscale.parallel.state_layout import StateLayout
from podscale.parallel.strategies import STRATEGIES
from podscale.parallel.summation import PAYLOADS, Transfer
from podscale.pod import ALL_AXES
from podscale.runs.folder import Run
from podscale.training import compilation, loop, setup
from podscale.training.replicas import ReplicaCheck, ReplicaMismatchError

pytestmark = pytest.mark.usefixtures("small_models")  # compiled in half the time of a resnet8

RULES = [{"name": "lars", "form": form} for form in ("mlperf", "scaled", "optax")] + [
    {"name": "sgd"},
    {"name": "adamw"},
    {"name": "muon"},
    {"name": "muon", "renormalize": True, "nesterov": True},
]
RATES = {"schedule.bias_peak": 3, "schedule.head_peak": 2, "schedule.stem_epochs": 20}
ENDS = {"stem": "conv", "head": "head"}
SHAPES = {
    "conv": {"kernel": (3, 3, 2, 5), "bias": (5,)},
    "qkv": {"kernel": (4, 12)},
    "dense": {"kernel": (4, 12)},
    "scale": (1,),
    "head": {"kernel": (7, 3)},
}
PODS = [("2x2", 1), ("2x3", 2), ("1x4", 1), ("1x2*2", 2)]
ROUNDING = 1e-12
SHARDED = STRATEGIES["sharded"]


def sample_tree(shapes, seed, copies=()):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.standard_normal((*copies, *s)), shapes, is_leaf=lambda s: isinstance(s, tuple))


def make_recipe(**changes):
    settings = {
        "model.name": "small_resnet",
        "model.width": 8,
        "train.epochs": 2,
        "train.eval_epochs": 1,
        "optimizer.average": 0.9,
    }
    return recipes.override_recipe(recipes.load_recipe("digits"), settings | changes)


def update_parts(recipe, mesh, params, gradients):
    """Return parameters and optimizer state after one update per gradient [step, device, ...], and their layout."""
    shapes = {name_parameter(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    sharing = Sharing(shapes, SHARDED.share_matrices(()))
    optimizer = optimizers.make_optimizer(
        recipe, optax.linear_schedule(0.1, 0.2, 3), sharded.compute_norms, **ENDS, sharing=sharing
    )
    layout, transfer = StateLayout(SHARDED, mesh, optimizer, params), Transfer(bucket_bytes=600)

    def body(params, state, gradient):
        local = SHARDED.select(params)
        parts = SHARDED.sum_gradients(jax.tree.map(lambda g: g[0], gradient), transfer)
        updates, state = optimizer.update(parts, state, local)
        return SHARDED.gather(optax.apply_updates(local, updates), params, transfer), state

    specs = layout.specs
    step = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P(), specs, P(ALL_AXES)), out_specs=(P(), specs), check_vma=False)
    )
    state = layout.place(optimizer.init(params))
    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params, state, layout


def pair_rules_with_pods():
    """Pair every rule with one pod for `make test`, in turn, and with all others for `make test-slow`."""
    for i, rule in enumerate(RULES):
        for j, (shape, cores) in enumerate(PODS):
            marks = () if i % len(PODS) == j and "renormalize" not in rule else pytest.mark.slow
            yield pytest.param(
                rule, shape, cores, marks=marks, id=f"{'-'.join(map(str, rule.values()))}-{shape}-{cores}"
            )


@pytest.mark.heavy
@pytest.mark.parametrize(("rule", "shape", "cores"), list(pair_rules_with_pods()))
def test_every_rule_updates_parts_like_whole_arrays(rule, shape, cores):
    compare_updates(rule, shape, cores)


@pytest.mark.heavy
def test_learning_rates_per_group_are_the_same_for_parts():
    compare_updates(RULES[0], "2x2", 1, **RATES)


def compare_updates(rule, shape, cores, **rates):
    fields = rule | {"clip_norm": 3.0, "weight_decay": 0.1, "trust": 0.5}
    recipe = recipes.override_recipe(
        recipes.load_recipe("digits"), {f"optimizer.{k}": v for k, v in fields.items()} | rates
    )
    with jax.enable_x64(True):
        mesh = pod.make_pod(jax.devices(), shape, cores).mesh()
        params, gradients = sample_tree(SHAPES, 0), [sample_tree(SHAPES, step, (mesh.size,)) for step in (1, 2, 3)]
        updated, state, layout = update_parts(recipe, mesh, params, gradients)
        optimizer = optimizers.make_optimizer(recipe, optax.linear_schedule(0.1, 0.2, 3), **ENDS)
        expected, expected_state, update = params, optimizer.init(params), jax.jit(optimizer.update)
        for gradient in gradients:
            updates, expected_state = update(jax.tree.map(lambda g: g.sum(0), gradient), expected_state, expected)
            expected = jax.tree.map(np.add, expected, updates)
        assert_close = partial(np.testing.assert_allclose, rtol=0, atol=ROUNDING)
        jax.tree.map(assert_close, updated, expected)
        jax.tree.map(assert_close, layout.gather(state), expected_state)
        assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (updated, params)), strict=True)) > 0.01


def test_partitioning_a_state_and_gathering_it_changes_nothing():
    mesh = pod.make_pod(jax.devices(), "2x3", 2).mesh()
    optimizer = optax.sgd(0.1, 0.9)
    params = jax.tree.map(jnp.float32, sample_tree(SHAPES, 0))
    layout = StateLayout(SHARDED, mesh, optimizer, params)
    state = jax.tree.map(lambda x: np.asarray(x) + 1, optimizer.init(params))
    parts = layout.place(state)
    jax.tree.map(np.testing.assert_array_equal, layout.gather(parts), state)
    jax.tree.map(np.testing.assert_array_equal, layout.scatter(layout.gather(parts)), parts)
    for described, placed in zip(*map(jax.tree.leaves, (layout.describe(state), parts)), strict=True):
        assert (described.shape, described.dtype, described.sharding) == (placed.shape, placed.dtype, placed.sharding)


@pytest.mark.heavy
@pytest.mark.parametrize("payload", PAYLOADS)
def test_scatter_and_gather_give_the_sum(payload):
    mesh = pod.make_pod(jax.devices(), "2x3", 2).mesh()
    x = np.random.default_rng(0).integers(-3, 4, (12, 12, 5)).astype(np.float32)

    def body(x):
        return collectives.gather_parts(collectives.scatter_sum(x[0], payload)[:5])[None]

    call = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(ALL_AXES), out_specs=P(ALL_AXES), check_vma=False))
    np.testing.assert_array_equal(call(x), np.tile(x.sum(0), (12, 1, 1)))


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw", "muon"])
def test_optimizer_bytes_shrink_with_the_number_of_devices(name):
    recipe, nbytes = make_recipe(**{"optimizer.name": name}), {}
    for shape in ("1x1", "1x2", "2x4"):
        prepared = setup.prepare(recipe, pod.make_pod(jax.devices(), shape), Options(summation="sharded"))
        leaves = jax.tree.leaves(prepared.init_state().optimizer)
        nbytes[shape] = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        assert prepared.plan.memory.optimizer <= nbytes[shape] < prepared.plan.memory.optimizer + 32 * len(leaves)
    assert nbytes["1x2"] < 0.51 * nbytes["1x1"]
    assert nbytes["2x4"] < 0.14 * nbytes["1x1"]


@pytest.fixture(scope="module")
def torus_run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("torus") / "run", "torus")


def train(folder, summation, shape="2x2", until=None, recipe=None, **options):
    torus, options = pod.make_pod(jax.devices(), shape), Options(summation=summation, **options)
    loop.train(
        recipe or make_recipe(), pod=torus, options=options, folder=folder, until=until, console=Console(quiet=True)
    )
    return folder


def read_losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("sharded", "torus"), ("torus", "sharded"), ("sharded", "sharded")])
def test_run_resumes_with_another_summation(torus_run, tmp_path, first, second):
    train(tmp_path, first, until=StopCondition("accuracy", 0.0), micro_batches=2)
    assert len(read_losses(tmp_path)) == 12
    train(tmp_path, second, shape="2x4" if second == "sharded" else "2x2")
    assert len(read_losses(tmp_path)) == len(read_losses(torus_run)) == 23
    np.testing.assert_allclose(read_losses(tmp_path), read_losses(torus_run), rtol=1e-3)


@pytest.mark.slow
def test_a_run_by_muon_resumes_with_another_summation_on_another_pod(tmp_path):
    recipe = make_recipe(**{"optimizer.name": "muon", "optimizer.trust": 0.1, "schedule.peak": 0.2})
    train(tmp_path / "alone", "xla", "1x1", recipe=recipe)
    until = StopCondition("accuracy", 0.0)
    for first, second in ((("xla", "1x1"), ("sharded", "2x4")), (("sharded", "2x4"), ("torus", "2x2"))):
        folder = tmp_path / f"{first[0]}-{second[0]}"
        train(folder, *first, until=until, recipe=recipe)
        train(folder, *second, recipe=recipe)
        np.testing.assert_allclose(read_losses(folder), read_losses(tmp_path / "alone"), rtol=2e-3)


@pytest.mark.heavy
def test_non_finite_update_changes_no_part(tmp_path):
    """With weights that are NaN, nothing changes but the step counter."""
    prepared = setup.prepare(make_recipe(), pod.make_pod(jax.devices(), "2x2"), Options(summation="sharded"))
    state = prepared.init_state()
    nan_params = jax.tree.map(lambda p: p * np.nan, state.params)
    call = compilation.compile_train_step(prepared)
    batch = prepared.plan.batch_shape
    before = jax.device_get(state.optimizer)
    images, labels = np.zeros((*batch, 8, 8, 3), np.uint8), np.zeros(batch, np.int32)
    arrays = jax.device_put((images, labels), pod.make_batch_sharding(prepared.mesh, axis=2))
    state, metrics = call(state._replace(params=nan_params), *arrays, np.int32(1))
    assert float(metrics.skipped[0]) == 1
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.optimizer), before)


@pytest.mark.heavy
def test_replicas_are_compared_and_parts_are_not():
    prepared = setup.prepare(make_recipe(), pod.make_pod(jax.devices(), "2x2"), Options(summation="sharded"))
    state = prepared.init_state()
    check = ReplicaCheck(prepared.mesh, every=1)
    momentum = jax.tree.map(lambda x: x + jnp.arange(x.size).reshape(x.shape), state.optimizer)
    check.check(1, state._replace(optimizer=momentum))
    bias = state.params["layers"][2]["bias"]
    copies = [jax.device_put(np.asarray(s.data) + (s.device.id == 3), s.device) for s in bias.addressable_shards]
    state.params["layers"][2]["bias"] = jax.make_array_from_single_device_arrays(bias.shape, bias.sharding, copies)
    with pytest.raises(ReplicaMismatchError):
        check.check(2, state)
