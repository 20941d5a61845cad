"""Updates of each device's own part of the weights: the same as those of all weights on all devices."""

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
from podscale.config.stop_condition import Until
from podscale.optim import optimizers
from podscale.parallel import collectives, sharded
from podscale.parallel import summation as summations
from podscale.pod import ALL_AXES
from podscale.runs.folder import Run
from podscale.training import compilation, loop, setup
from podscale.training.replicas import ReplicaCheck, ReplicaMismatchError

RULES = [{"name": "lars", "form": form} for form in ("mlperf", "scaled", "optax")] + [
    {"name": "sgd"},
    {"name": "adamw"},
]
RATES = {"schedule.bias_peak": 3, "schedule.head_peak": 2, "schedule.stem_epochs": 20}
ENDS = {"stem": "conv", "head": "head"}
SHAPES = {"conv": {"kernel": (3, 3, 2, 5), "bias": (5,)}, "scale": (1,), "head": {"kernel": (7, 3)}}
PODS = [("2x2", 1), ("2x3", 2), ("1x4", 1)]
ROUNDING = 1e-12


def draw(shapes, seed, copies=()):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.standard_normal((*copies, *s)), shapes, is_leaf=lambda s: isinstance(s, tuple))


def small(**changes):
    settings = {"model.width": 8, "train.epochs": 2, "train.eval_epochs": 1, "optimizer.average": 0.9}
    return recipes.override(recipes.load("digits"), settings | changes)


def on_parts(rule, mesh, params, gradients):
    """The parameters after an update for each of the gradients [step, device, ...], and the optimizer's state."""
    optimizer = optimizers.make_optimizer(rule, optax.linear_schedule(0.1, 0.2, 3), sharded.norms, **ENDS)
    cutter = sharded.Cutter(mesh, optimizer, params)

    def body(params, state, gradient):
        own = sharded.own(params)
        parts = sharded.scatter(jax.tree.map(lambda g: g[0], gradient), "float32", bucket_bytes=600)
        updates, state = optimizer.update(parts, state, own)
        return sharded.gather(optax.apply_updates(own, updates), params, bucket_bytes=600), state

    held = sharded.specs(optimizer, params)
    step = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P(), held, P(ALL_AXES)), out_specs=(P(), held), check_vma=False)
    )
    state = cutter.parts(optimizer.init(params))
    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params, state, cutter


@pytest.mark.parametrize(("shape", "cores"), PODS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("form", rule["name"]))
def test_every_rule_updates_parts_as_it_updates_the_whole(rule, shape, cores):
    compare_updates(rule, shape, cores)


def test_rates_of_their_own_are_the_same_for_parts():
    compare_updates(RULES[0], "2x2", 1, **RATES)


def compare_updates(rule, shape, cores, **rates):
    fields = rule | {"clip_norm": 3.0, "weight_decay": 0.1, "trust": 0.5}
    recipe = recipes.override(recipes.load("digits"), {f"optimizer.{k}": v for k, v in fields.items()} | rates)
    with jax.enable_x64(True):
        mesh = pod.of(jax.devices(), shape, cores).mesh()
        params, gradients = draw(SHAPES, 0), [draw(SHAPES, step, (mesh.size,)) for step in (1, 2, 3)]
        found, state, cutter = on_parts(recipe, mesh, params, gradients)
        optimizer = optimizers.make_optimizer(recipe, optax.linear_schedule(0.1, 0.2, 3), **ENDS)
        expected, held = params, optimizer.init(params)
        for gradient in gradients:
            updates, held = optimizer.update(jax.tree.map(lambda g: g.sum(0), gradient), held, expected)
            expected = optax.apply_updates(expected, updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING), found, expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING), cutter.whole(state), held)
        assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (found, params)), strict=True)) > 0.01


def test_parts_come_back_as_they_went_with_nothing_lost():
    mesh = pod.of(jax.devices(), "2x3", 2).mesh()
    optimizer = optax.sgd(0.1, 0.9)
    params = jax.tree.map(jnp.float32, draw(SHAPES, 0))
    cutter = sharded.Cutter(mesh, optimizer, params)
    state = jax.tree.map(lambda x: np.asarray(x) + 1, optimizer.init(params))
    parts = cutter.parts(state)
    jax.tree.map(np.testing.assert_array_equal, cutter.whole(parts), state)
    again = cutter.from_whole(cutter.whole(parts))
    jax.tree.map(np.testing.assert_array_equal, again, parts)


@pytest.mark.parametrize("payload", summations.PAYLOADS)
def test_what_is_scattered_and_gathered_is_the_sum(payload):
    mesh = pod.of(jax.devices(), "2x3", 2).mesh()
    x = np.random.default_rng(0).integers(-3, 4, (12, 12, 5)).astype(np.float32)

    def body(x):
        return collectives.gather_parts(collectives.scatter_sum(x[0], payload)[:5])[None]

    both = jax.shard_map(body, mesh=mesh, in_specs=P(ALL_AXES), out_specs=P(ALL_AXES), check_vma=False)
    np.testing.assert_array_equal(both(x), np.tile(x.sum(0), (12, 1, 1)))


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_the_optimizers_bytes_fall_as_the_number_of_devices(name):
    recipe, held = small(**{"optimizer.name": name}), {}
    for shape in ("1x1", "1x2", "2x4"):
        found = setup.prepare(recipe, pod.of(jax.devices(), shape), Options(summation="sharded"))
        leaves = jax.tree.leaves(found.state.optimizer)
        held[shape] = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        assert found.plan.memory.optimizer <= held[shape] < found.plan.memory.optimizer + 32 * len(leaves)
    assert held["1x2"] < 0.51 * held["1x1"]
    assert held["2x4"] < 0.14 * held["1x1"]


@pytest.fixture(scope="module")
def by_torus(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("torus") / "run", "torus")


def trained(folder, summation, shape="2x2", until=None, **options):
    where, chosen = pod.of(jax.devices(), shape), Options(summation=summation, **options)
    loop.train(small(), pod=where, options=chosen, folder=folder, until=until, console=Console(quiet=True))
    return folder


def losses(folder):
    return [m["loss"] for m in Run.load(folder).metrics() if m["event"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("sharded", "torus"), ("torus", "sharded"), ("sharded", "sharded")])
def test_a_run_goes_on_with_another_summation(by_torus, tmp_path, first, then):
    trained(tmp_path, first, until=Until("accuracy", 0.0), micro_batches=2)
    assert len(losses(tmp_path)) == 12
    trained(tmp_path, then, shape="2x4" if then == "sharded" else "2x2")
    assert len(losses(tmp_path)) == len(losses(by_torus)) == 23
    np.testing.assert_allclose(losses(tmp_path), losses(by_torus), rtol=1e-3)


def test_a_bad_batch_moves_no_part(tmp_path):
    """A learning rate of infinity gives weights that are no numbers, and from then on nothing moves but the step."""
    found = setup.prepare(small(), pod.of(jax.devices(), "2x2"), Options(summation="sharded"))
    harmed = jax.tree.map(lambda p: p * np.nan, found.state.params)
    call = compilation.compile_train_step(found)
    batch = found.plan.batch_shape
    before = jax.device_get(found.state.optimizer)
    images, labels = np.zeros((*batch, 8, 8, 3), np.uint8), np.zeros(batch, np.int32)
    arrays = jax.device_put((images, labels), pod.batch_sharding(found.mesh, axis=2))
    state, metrics = call(found.state._replace(params=harmed), *arrays, np.int32(1))
    assert float(metrics.skipped[0]) == 1
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.optimizer), before)


def test_replicas_are_compared_and_parts_are_not():
    found = setup.prepare(small(), pod.of(jax.devices(), "2x2"), Options(summation="sharded"))
    replicas = ReplicaCheck(found.mesh, every=1)
    momentum = jax.tree.map(lambda x: x + jnp.arange(x.size).reshape(x.shape), found.state.optimizer)
    replicas.check(1, found.state._replace(optimizer=momentum))
    bias = found.state.params["layers"][4]["bias"]
    copies = [jax.device_put(np.asarray(s.data) + (s.device.id == 3), s.device) for s in bias.addressable_shards]
    found.state.params["layers"][4]["bias"] = jax.make_array_from_single_device_arrays(
        bias.shape, bias.sharding, copies
    )
    with pytest.raises(ReplicaMismatchError):
        replicas.check(2, found.state)
