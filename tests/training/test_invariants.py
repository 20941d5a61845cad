"""The same recipe gives the same training on every pod: 1 to 8 devices, with and without micro-batches.

The loss curve of every pod is compared with a one-device reference loop that shares only the model, the data order and
the optimizer with the product: no mesh, no collectives, no micro-batches, no scanned calls, one pass of autodiff.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data import crop, loader, randaugment
from podscale.data.balance import make_order
from podscale.data.index.dataset import open_index
from podscale.data.order import compute_crop_boxes
from podscale.models import registry
from podscale.models.functional import make_functional
from podscale.optim import optimizers, schedules
from podscale.parallel import batch_norm
from podscale.parallel.batch_norm import Groups
from podscale.pod import make_batch_sharding
from podscale.training import evaluate, views
from podscale.training.compilation import compile_train_step
from podscale.training.device_input import augment
from podscale.training.setup import prepare

STEPS = 20
SAMPLED_PODS = [  # shape, micro-batches, steps per call, summation: every value of each, in few combinations
    ("1x1", 2, 1, "xla"),  # micro-batches are unrolled on CPUs: four compile twice as long
    ("2x1", 1, 1, "ring"),
    ("2x2", 1, 1, "torus"),
    ("2x2", 2, 4, "sharded"),
    ("2x2*2", 1, 1, "torus"),
    ("2x4", 1, 1, "swing_latency:4096,swing"),
]
SLOW_PODS = [
    ("1x1", 1, 1, "xla"),
    ("1x1", 4, 1, "xla"),
    ("1x2", 1, 1, "xla"),
    ("2x1", 2, 1, "ring"),
    ("2x2", 2, 4, "xla"),
    ("2x4", 2, 1, "torus"),
    ("2x4", 1, 1, "sharded"),
    ("2x4", 1, 1, "torus4"),  # on 4x4, test_modern_models.py has it in every run
    ("1x2*2", 2, 4, "sharded"),
    ("2x2*2", 1, 1, "xla"),
    ("2x2*2", 1, 1, "swing"),
    ("1x8", 1, 4, "swing_latency"),
]


def make_small_recipe(precision="float32", **changes):
    """Return a recipe of a tiny network with random augmentation switched on, so that each key is exercised."""
    settings = {
        "model.name": "small_resnet",
        "model.width": 8,
        "model.precision": precision,
        "batch.size": 64,
        "batch.span": 16,
        "train.epochs": (STEPS - 0.5) * 64 / 1437,
        "optimizer.average": 0.9,
        "augment.mixup": 0.2,
        "augment.erase": 0.5,
        "augment.flip": True,
        "augment.brightness": 0.3,
        "augment.contrast": 0.3,
        "schedule.warmup_epochs": 0.2,
        "schedule.peak": 0.5,
        "optimizer.trust": 0.3,
    }
    return recipes.override_recipe(recipes.load_recipe("digits"), settings | changes)


def train_on_pod(recipe, shape, micro_batches=1, steps_per_call=1, summation="xla", *, cores=0, model=None, **more):
    """Train on a pod; return the losses of all steps and the last state, on its devices."""
    tiles = {"tile_summation": "swing_latency" if summation.startswith("swing_latency") else "xla"}
    counts = {"micro_batches": micro_batches, "steps_per_call": steps_per_call}
    options = Options(**counts, summation=summation, **tiles, **more)
    setup = prepare(recipe, pod.make_pod(jax.devices(), shape, cores), options, model)
    call = compile_train_step(setup)
    state, losses = setup.init_state(), []
    with loader.load_train_batches(
        setup.data.train, setup.plan, setup.plan.calls(), make_batch_sharding(setup.mesh, axis=2)
    ) as batches:
        for batch in batches:
            state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
            losses += list(np.asarray(metrics.loss)[: batch.count])
    return np.array(losses), state


def train_reference(recipe, steps=STEPS):
    """Do the same with the reference loop; return losses, parameters, statistics and averaged parameters."""
    data, size, settings = open_index(recipe.data), recipe.data.image_size, recipe.augment
    changes = [recipe.steps(len(data.train), epoch) for epoch in recipe.data.size_epochs]
    order = make_order(recipe, data.train.labels)
    net, params, stats = make_functional(registry.build_model(recipe.model, 10, size, recipe.train.seed))
    schedule = schedules.make_schedule(recipe, steps, len(data.train) / recipe.batch.size)
    optimizer = optimizers.make_optimizer(recipe, schedule, stem=net.stem, head=net.head)
    opt_state, average, losses = optimizer.init(params), params, []
    positions = np.arange(recipe.batch.size)

    def compute_loss(params, stats, images, labels, at):
        inputs, targets = augment.prepare_batch(recipe, images, labels, at, positions, 10)
        keys = augment.make_layer_keys(recipe, at, positions) if net.is_random else None
        logits, moments = net.train(params, stats, inputs, Groups(recipe.batch.span), keys=keys)
        weights = jnp.asarray(recipe.train.class_weights or [1.0] * 10)
        if recipe.train.loss == "binary":
            p = jax.nn.sigmoid(logits)
            return -(weights * (targets * jnp.log(p) + (1 - targets) * jnp.log(1 - p))).mean(), moments
        return -(weights * targets * jax.nn.log_softmax(logits)).sum(-1).mean(), moments

    @jax.jit
    def update(grads, opt_state, params, moments, stats, average):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        stats = batch_norm.update_running_statistics(stats, moments, recipe.train.stats_momentum)
        return opt_state, params, stats, jax.tree.map(lambda a, p: 0.9 * a + (1 - 0.9) * p, average, params)

    gradient = jax.jit(jax.value_and_grad(compute_loss, has_aux=True))
    for at in range(steps):
        if recipe.data.train_sizes:
            size = recipe.data.train_sizes[sum(at >= change for change in changes)]
        samples, passes = order.get_samples(at, positions)
        boxes, flips = compute_crop_boxes(
            recipe.augment, recipe.train.seed, passes, samples, data.train.sizes[samples], size
        )
        images = np.empty((len(samples), size, size, 3), np.uint8)
        crop.crop_batch(data.train, samples, boxes, flips, images)
        if settings.randaugment:
            randaugment.augment_batch(
                images, settings.randaugment, settings.magnitude, recipe.train.seed, passes, samples
            )
        (loss, moments), grads = gradient(params, stats, images, data.train.labels[samples], jnp.int32(at))
        opt_state, params, stats, average = update(grads, opt_state, params, moments, stats, average)
        losses.append(float(loss))
    return np.array(losses), params, stats, average


@pytest.fixture(scope="module")
def reference_float32():
    return train_reference(make_small_recipe(**{"model.name": "resnet8"}))


@pytest.fixture(scope="module")
def reference_float64():
    with jax.enable_x64(True):
        return train_reference(make_small_recipe("float64"))


def assert_close(tree, reference, tolerance):
    expected = dict(jax.tree.leaves_with_path(reference))
    for path, ours in jax.tree.leaves_with_path(tree):
        theirs = np.asarray(expected[path])
        scale = max(np.abs(theirs).max(), 1e-3)
        assert np.abs(np.asarray(ours) - theirs).max() <= tolerance * scale, jax.tree_util.keystr(path)


def parametrize_pods(*sampled):
    """Run these pods in `make test`, and all others in `make test-slow`."""
    others = [pod for pod in SAMPLED_PODS + SLOW_PODS if pod not in sampled]
    pods = [*sampled, *(pytest.param(*pod, marks=pytest.mark.slow) for pod in others)]
    return pytest.mark.parametrize(("shape", "micro_batches", "steps_per_call", "summation"), pods)


@pytest.mark.heavy
@parametrize_pods()  # float64 has them all, and is exact
def test_every_pod_has_the_same_loss_curve_in_float32(
    reference_float32, shape, micro_batches, steps_per_call, summation
):
    recipe = make_small_recipe(**{"model.name": "resnet8"})
    losses, _ = train_on_pod(recipe, shape, micro_batches, steps_per_call, summation)
    np.testing.assert_allclose(losses, reference_float32[0], rtol=1e-4)


@pytest.mark.heavy
@parametrize_pods(*SAMPLED_PODS)
def test_every_pod_agrees_to_the_last_digits_in_float64(
    reference_float64, shape, micro_batches, steps_per_call, summation
):
    with jax.enable_x64(True):
        losses, state = train_on_pod(make_small_recipe("float64"), shape, micro_batches, steps_per_call, summation)
        np.testing.assert_allclose(losses, reference_float64[0], rtol=1e-9)
        for ours, theirs in zip(
            (state.params, state.stats, state.average["params"]), reference_float64[1:], strict=True
        ):
            assert_close(ours, theirs, 1e-9)


@pytest.mark.heavy
def test_twenty_steps_change_the_weights_enough_to_make_agreement_meaningful(reference_float64):
    recipe = make_small_recipe("float64")
    with jax.enable_x64(True):
        _, start, _ = make_functional(registry.build_model(recipe.model, 10, 8, recipe.train.seed))
    for path, moved in jax.tree.leaves_with_path(reference_float64[1]):
        first = np.asarray(dict(jax.tree.leaves_with_path(start))[path])
        if first.ndim > 1:
            assert np.linalg.norm((np.asarray(moved) - first).ravel()) > 0.1 * np.linalg.norm(first.ravel())


@pytest.mark.heavy
def test_a_bfloat16_payload_is_close_but_not_identical_and_the_same_on_all_replicas(reference_float64):
    with jax.enable_x64(True):
        losses, state = train_on_pod(make_small_recipe("float64"), "2x2", summation="torus", payload="bfloat16")
    np.testing.assert_allclose(losses, reference_float64[0], rtol=2e-2)
    assert np.abs(losses / reference_float64[0] - 1).max() > 1e-6
    for leaf in jax.tree.leaves(state):
        first, *others = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(others) == 3
        assert all(other == first for other in others)


@pytest.mark.heavy
@pytest.mark.parametrize("shape", ["1x1", "1x2", "2x2", "2x4", "3x3", "4x4"])
def test_every_evaluation_example_counts_once_on_every_pod(shape):
    """360 examples over device counts that do and do not divide them; all counts are whole numbers."""
    size = 72 if shape == "3x3" else 64
    recipe = make_small_recipe(**{"batch.size": size, "batch.span": 8 if size == 72 else 16})
    setup = prepare(recipe, pod.make_pod(jax.devices(), shape), Options(eval_images=7))
    result = evaluate.Evaluator(setup)(setup.init_state())
    pixels = loader.load_eval_images(setup.data.val, range(len(setup.data.val)), recipe)
    logits = setup.net.evaluate(*setup.weights, augment.normalize(recipe, jnp.asarray(pixels)))
    expected = int((np.asarray(logits).argmax(-1) == setup.data.val.labels).sum())
    ranks = (np.asarray(logits) > np.take_along_axis(np.asarray(logits), setup.data.val.labels[:, None], 1)).sum(-1)
    assert result["examples"] == 360
    assert round(result["accuracy"] * 360) == expected
    assert round(result["accuracy_top5"] * 360) == int((ranks < 5).sum())
    losses = -np.asarray(jax.nn.log_softmax(logits))[np.arange(360), setup.data.val.labels]
    assert result["loss"] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("shape", ["1x1", "1x2", "2x2"])
def test_further_views_of_unsure_images_give_the_same_predictions_on_every_pod(shape):
    """The number of unsure images differs between devices, and so does that of the parts each evaluates."""
    threshold = 0.1012  # about the median confidence of the untrained network
    changes = {"data.eval_views": 6, "data.eval_confidence": threshold}
    recipe = make_small_recipe(**changes)
    setup = prepare(recipe, pod.make_pod(jax.devices(), shape), Options(eval_images=37))
    evaluator = evaluate.Evaluator(setup)
    evaluator(setup.init_state())
    images = jnp.asarray(loader.load_eval_images(setup.data.val, range(len(setup.data.val)), recipe))
    params, stats = setup.weights
    first = jax.nn.softmax(setup.net.evaluate(params, stats, augment.normalize(recipe, images))).max(-1)
    assert 0 < (first < threshold).sum() < len(images)
    expected = jax.nn.softmax(views.average_views(setup.net, recipe, params, stats, images))
    np.testing.assert_allclose(evaluator.predictions[:, 1], expected.max(-1), atol=1e-5)
