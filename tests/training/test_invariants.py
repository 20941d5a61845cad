"""The same recipe gives the same training on every pod: 1 to 8 devices, with and without micro-batches.

The curve of every pod is compared with a plain one-device loop that shares only the model, the data order and the
optimizer with the product: no mesh, no collectives, no micro-batches, no scanned calls, one pass of autodiff.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data import crop, loader
from podscale.data.index.dataset import open_index
from podscale.data.order import Order, crop_boxes
from podscale.models import registry
from podscale.models.functional import functional
from podscale.optim import optimizers, schedules
from podscale.parallel import batch_norm
from podscale.parallel.batch_norm import Groups
from podscale.pod import batch_sharding
from podscale.training import evaluate, setup, step
from podscale.training.device_input import augment

STEPS = 20
PODS = [  # shape, micro-batches, steps per call, summation
    ("1x1", 1, 1, "xla"),
    ("1x1", 4, 1, "xla"),
    ("1x2", 1, 1, "xla"),
    ("2x1", 2, 1, "ring"),
    ("2x2", 1, 1, "torus"),
    ("2x2", 2, 4, "xla"),
    ("2x4", 1, 1, "torus4"),
    ("2x4", 2, 1, "torus"),
    ("2x2", 2, 4, "sharded"),
    ("2x4", 1, 1, "sharded"),
]


def small(precision="float32", **changes):
    """A tiny network with everything random switched on, so that each key is exercised."""
    settings = {
        "model.width": 8,
        "model.precision": precision,
        "batch.size": 64,
        "batch.span": 16,
        "train.epochs": (STEPS - 0.5) * 64 / 1437,
        "optimizer.average": 0.9,
        "augment.mixup": 0.2,
        "augment.erase": 0.5,
        "augment.flip": True,
        "schedule.warmup_epochs": 0.2,
        "schedule.peak": 0.5,
        "optimizer.trust": 0.3,
    }
    return recipes.override(recipes.load("digits"), settings | changes)


def on_pod(recipe, shape, micro_batches=1, steps_per_call=1, summation="xla", payload="float32"):
    """Losses of all steps, and the state at the end, on a pod."""
    options = Options(micro_batches=micro_batches, steps_per_call=steps_per_call, summation=summation, payload=payload)
    job = setup.prepare(recipe, pod.of(jax.devices(), shape), options)
    call = step.train_call(job.net, job.plan, job.optimizer, job.schedule, job.mesh)
    state, losses = job.state, []
    with loader.train_batches(job.data.train, job.plan, job.plan.calls(), batch_sharding(job.mesh, axis=2)) as batches:
        for batch in batches:
            state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
            losses += list(np.asarray(metrics.loss)[: batch.count])
    return np.array(losses), jax.device_get(state)


def plainly(recipe):
    """The same by the plain loop."""
    data, size = open_index(recipe.data), recipe.data.image_size
    order = Order(len(data.train), recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    net, params, stats = functional(registry.build(recipe.model, 10, size, recipe.train.seed))
    schedule = schedules.make_schedule(recipe, STEPS, len(data.train) / recipe.batch.size)
    optimizer = optimizers.make_optimizer(recipe, schedule)
    opt_state, average, losses = optimizer.init(params), params, []
    positions = np.arange(recipe.batch.size)

    def loss_of(params, stats, images, labels, at):
        inputs, targets = augment.prepare(recipe, images, labels, at, positions, 10)
        logits, moments = net.train(params, stats, inputs, Groups(recipe.batch.span))
        return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean(), moments

    gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    for at in range(STEPS):
        samples, passes = order.at(at, positions)
        boxes, flips = crop_boxes(recipe.augment, recipe.train.seed, passes, samples, data.train.sizes[samples], size)
        images = np.empty((len(samples), size, size, 3), np.uint8)
        crop.crop_batch(data.train, samples, boxes, flips, size, images)
        (loss, moments), grads = gradient(params, stats, images, data.train.labels[samples], jnp.int32(at))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        stats = batch_norm.running_update(stats, moments, recipe.train.stats_momentum)
        average = jax.tree.map(lambda a, p: 0.9 * a + (1 - 0.9) * p, average, params)
        losses.append(float(loss))
    return np.array(losses), params, stats, average


@pytest.fixture(scope="module")
def plain_float32():
    return plainly(small())


@pytest.fixture(scope="module")
def plain_float64():
    with jax.enable_x64(True):
        return plainly(small("float64"))


def assert_same(tree, reference, tolerance):
    for path, ours in jax.tree.leaves_with_path(tree):
        theirs = np.asarray(dict(jax.tree.leaves_with_path(reference))[path])
        scale = max(np.abs(theirs).max(), 1e-3)
        assert np.abs(np.asarray(ours) - theirs).max() <= tolerance * scale, jax.tree_util.keystr(path)


QUICK_IN_FLOAT32 = [("1x1", 1, 1, "xla"), ("2x2", 1, 1, "torus"), ("1x2", 1, 1, "xla")]  # float64 has them all


@pytest.mark.parametrize(
    ("shape", "micro_batches", "steps_per_call", "summation"),
    [pytest.param(*pod, marks=[] if pod in QUICK_IN_FLOAT32 else [pytest.mark.slow]) for pod in PODS],
)
def test_every_pod_follows_the_same_curve_in_float32(plain_float32, shape, micro_batches, steps_per_call, summation):
    losses, _ = on_pod(small(), shape, micro_batches, steps_per_call, summation)
    np.testing.assert_allclose(losses, plain_float32[0], rtol=1e-4)


@pytest.mark.parametrize(("shape", "micro_batches", "steps_per_call", "summation"), PODS)
def test_every_pod_is_the_same_to_the_last_digits_in_float64(
    plain_float64, shape, micro_batches, steps_per_call, summation
):
    with jax.enable_x64(True):
        losses, state = on_pod(small("float64"), shape, micro_batches, steps_per_call, summation)
        np.testing.assert_allclose(losses, plain_float64[0], rtol=1e-9)
        for ours, theirs in zip((state.params, state.stats, state.average["params"]), plain_float64[1:], strict=True):
            assert_same(ours, theirs, 1e-9)


def test_twenty_steps_move_the_weights_far_enough_for_agreement_to_mean_something(plain_float32):
    _, start, _ = functional(registry.build(small().model, 10, 8, small().train.seed))
    for path, moved in jax.tree.leaves_with_path(plain_float32[1]):
        first = dict(jax.tree.leaves_with_path(start))[path]
        if first.ndim > 1:
            assert jnp.linalg.norm((moved - first).ravel()) > 0.1 * jnp.linalg.norm(first.ravel())


def test_a_bfloat16_payload_stays_close_and_is_not_the_same(plain_float32):
    losses, _ = on_pod(small(), "2x2", summation="torus", payload="bfloat16")
    np.testing.assert_allclose(losses, plain_float32[0], rtol=2e-2)
    assert np.abs(losses / plain_float32[0] - 1).max() > 1e-6


def test_replicas_hold_the_same_bits_after_training():
    job = setup.prepare(small(), pod.of(jax.devices(), "2x2"), Options(summation="torus", payload="bfloat16"))
    call, state = step.train_call(job.net, job.plan, job.optimizer, job.schedule, job.mesh), job.state
    with loader.train_batches(job.data.train, job.plan, job.plan.calls(), batch_sharding(job.mesh, axis=2)) as batches:
        for batch in batches:
            state, _ = call(state, batch.images, batch.labels, np.int32(batch.count))
    for leaf in jax.tree.leaves(state):
        first, *others = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(others) == 3
        assert all(other == first for other in others)


@pytest.mark.parametrize("shape", ["1x1", "1x2", "2x2", "2x4", "3x3", "4x4"])
def test_every_evaluation_example_counts_once_on_every_pod(shape):
    """360 examples over device counts that do and do not divide them; all counts are whole numbers."""
    size = 72 if shape == "3x3" else 64
    recipe = small(**{"batch.size": size, "batch.span": 8 if size == 72 else 16})
    job = setup.prepare(recipe, pod.of(jax.devices(), shape), Options(eval_images=7))
    found = evaluate.Evaluator(job)(job.state)
    pixels = loader.eval_pictures(job.data.val, range(len(job.data.val)), recipe)
    logits = job.net.evaluate(
        *jax.device_get((job.state.params, job.state.stats)), augment.normalize(recipe, jnp.asarray(pixels))
    )
    expected = int((np.asarray(logits).argmax(-1) == job.data.val.labels).sum())
    ranks = (np.asarray(logits) > np.take_along_axis(np.asarray(logits), job.data.val.labels[:, None], 1)).sum(-1)
    assert found["examples"] == 360
    assert round(found["accuracy"] * 360) == expected
    assert round(found["accuracy_top5"] * 360) == int((ranks < 5).sum())
    losses = -np.asarray(jax.nn.log_softmax(logits))[np.arange(360), job.data.val.labels]
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)
