"""Setup: a recipe on a pod, ready to compile, train and evaluate.

Everything that happens before the first compilation: open the data set, build the model, make the plan, place the
initial state on the devices, cache images. The state's way into a checkpoint and back is here too, because it depends
on how the state is placed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from podscale import plan as plans
from podscale import pod as pods
from podscale.config.options import Options
from podscale.data import cache, decode, loader, prefetch
from podscale.data.files import Progress
from podscale.data.index.dataset import NO_IMAGES, Index, Splits, open_index
from podscale.data.order import check_lanes
from podscale.errors import UserError
from podscale.forecast import choice
from podscale.forecast.choice import Choice
from podscale.models import registry
from podscale.models.functional import FunctionalModel, make_functional
from podscale.optim import optimizers, schedules
from podscale.parallel import placement
from podscale.parallel.state_layout import StateLayout
from podscale.plan import Counts, Plan
from podscale.pod import Pod
from podscale.processes import group
from podscale.recipe import Recipe
from podscale.runs.startup import clock as start_clock
from podscale.training import initial_weights
from podscale.training import step as steps
from podscale.training.device_input import resident
from podscale.training.initial_weights import InitialWeights
from podscale.training.memory import estimate_memory
from podscale.training.step import State

FIT_IMAGES = 5000  # training images that a model's `fit_parameters` gets at most


class Setup(NamedTuple):
    """Everything that training and evaluation need."""

    recipe: Recipe
    plan: Plan
    mesh: Mesh
    data: Splits
    net: FunctionalModel
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    state: State
    choice: Choice  # of the summation, where the options leave it open


def prepare(
    recipe: Recipe,
    pod: Pod,
    options: Options = Options(),
    model: nnx.Module | None = None,
    progress: Progress | None = None,
) -> Setup:
    """Open the data set and return the setup with a randomly initialized state.

    Args:
        recipe: what to train.
        pod: the devices to train on.
        options: how to run it.
        model: a flax.nnx module instead of the recipe's own.
        progress: called while the data set is indexed.
    """
    data = open_index(recipe.data, progress)
    start_clock.mark("index")
    counts = Counts(len(data.train), len(data.val), len(data.classes))
    check_lanes(counts.train, recipe.data.lanes, recipe.batch.size)
    return assemble(recipe, pod, counts, options, model, data)


def assemble(
    recipe: Recipe,
    pod: Pod,
    counts: Counts,
    options: Options = Options(),
    model: nnx.Module | None = None,
    data: Splits = NO_IMAGES,
) -> Setup:
    """Return the setup for these counts. Works from counts alone; the images need not exist."""
    model = model or registry.build_model(recipe.model, counts.classes, recipe.data.image_size, recipe.train.seed)
    net, params, stats = make_functional(model, recipe.model.freeze)
    schedule = schedules.make_schedule(recipe, recipe.steps(counts.train), counts.train / recipe.batch.size)
    rule = net.wrap_optimizer(optimizers.make_optimizer(recipe, schedule, stem=net.stem, head=net.head))
    memory = estimate_memory(recipe, net, params, stats, rule)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(net.split(params)[0]))
    summation = choice.choose_summation(resident.resolve_cache(options, recipe, pod, data), pod, parameters)
    plan = plans.make_plan(recipe, pod, counts, summation.options, memory)
    mesh, optimizer = pod.mesh(plan.tile), steps.make_plan_optimizer(net, plan, schedule)
    state = steps.init_state(recipe, params, stats, optimizer)
    return _place_on_devices(Setup(recipe, plan, mesh, data, net, optimizer, schedule, state, summation))


def plan_recipe(recipe: Recipe, pod: Pod, options: Options) -> Plan:
    """Return the plan of a recipe on a pod, without building the model or using a device.

    Args:
        recipe: what to train. The data set need not be on this machine if the recipe gives its counts
            (`data.train_samples`, `data.val_samples` and `data.classes`).
        pod: the devices to plan for; they need not be in this machine.
        options: how to run it.

    Returns:
        The plan: steps, batches, spans, memory, summation.

    Raises:
        UserError: the recipe does not fit the pod or the data set; the message says what does.

    Example:
        >>> import podscale
        >>> recipe = podscale.load_recipe("digits")
        >>> plan = podscale.make_plan(recipe, podscale.named_pod("cpu:2x2"), podscale.Options())
        >>> plan.pod.size, plan.counts.train, plan.micro_batches
        (4, 1437, 1)
    """
    data = recipe.data
    if data.train_samples and data.val_samples and data.classes:
        counts = Counts(data.train_samples, data.val_samples, data.classes)
    else:
        splits = open_index(data)
        counts = Counts(len(splits.train), len(splits.val), len(splits.classes))
    check_lanes(counts.train, data.lanes, recipe.batch.size)
    model = nnx.eval_shape(lambda: registry.build_model(recipe.model, counts.classes, data.image_size))
    net, params, stats = make_functional(model, recipe.model.freeze)
    optimizer = net.wrap_optimizer(
        optimizers.make_optimizer(recipe, schedules.make_schedule(recipe, 1, 1.0), stem=net.stem, head=net.head)
    )
    return plans.make_plan(recipe, pod, counts, options, estimate_memory(recipe, net, params, stats, optimizer))


# --- the initial state ---------------------------------------------------------------------------------------------


def initialize(setup: Setup) -> tuple[Setup, InitialWeights | None]:
    """Return the setup with the state that a run from scratch starts from, and the weights that it starts from, if any.

    A model's `fit_parameters` runs only where it leaves a trace: not if initial weights replace all parameters.
    """
    if not setup.recipe.model.init:
        return fit_model(setup), None
    initialized, weights = load_initial_weights(setup)
    if weights.reinitialized and has_fit(setup):
        return load_initial_weights(fit_model(setup))
    return initialized, weights


def has_fit(setup: Setup) -> bool:
    """Return whether the model has a `fit_parameters`, by its graph alone: no array is read.

    Raises:
        UserError: it has a method `fit` instead, which once changed the model in place.
    """
    model = setup.net.build_abstract_module()
    if hasattr(model, "fit_parameters"):
        return True
    if callable(getattr(model, "fit", None)):
        raise UserError(
            f"{type(model).__name__}.fit is no longer called; rename it to fit_parameters and let it return the "
            "parameters that it changes, such as {'head.bias': array}"
        )
    return False


def fit_model(setup: Setup) -> Setup:
    """Return the setup with its model fitted to training images; unchanged if the model has no `fit_parameters`."""
    if not has_fit(setup):
        return setup
    params, stats = jax.device_get((setup.state.params, setup.state.stats))
    params = setup.net.replace_parameters(params, fit_parameters(setup))
    return _place_on_devices(setup._replace(state=steps.init_state(setup.recipe, params, stats, setup.optimizer)))


def fit_parameters(setup: Setup, resident_images: jax.Array | None = None) -> dict[str, NDArray[Any]]:
    """Return the parameters that the model's `fit_parameters` computes from training images, by name.

    The images are spread evenly over the data set and cropped as in evaluation. All processes use the parameters that
    the main process computes.

    Args:
        setup: its model has a `fit_parameters`.
        resident_images: all training images, uint8, if they live on the devices and need no crop; else they are loaded.
    """
    recipe, index = setup.recipe, setup.data.train
    count = min(len(index), FIT_IMAGES)
    samples = np.arange(count) * len(index) // count
    mean, std = (np.asarray(value, np.float32) for value in (recipe.data.mean, recipe.data.std))
    if resident_images is None:
        images = loader.load_eval_images(index, samples.tolist(), recipe)
        inputs = (images / np.float32(255) - mean) / std
    else:
        inputs = _normalize_samples(resident_images, samples, mean, std)
    fitted = setup.net.build_abstract_module().fit_parameters(inputs)
    return group.broadcast_arrays({name: np.asarray(array) for name, array in fitted.items()})


@jax.jit
def _normalize_samples(images: jax.Array, samples: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
    return (images[samples] / jnp.float32(255) - mean) / std


def load_initial_weights(setup: Setup) -> tuple[Setup, InitialWeights]:
    """Return the setup with the weights of `model.init`, and a description of them."""
    params, stats = jax.device_get((setup.state.params, setup.state.stats))
    weights = initial_weights.initialize_from(setup.recipe.model.init, setup.net, params, stats)
    state = steps.init_state(setup.recipe, weights.params, weights.stats, setup.optimizer)
    return _place_on_devices(setup._replace(state=state)), weights


def _place_on_devices(setup: Setup) -> Setup:
    """Place the state on the devices: replicated, or with the optimizer's state partitioned over them."""
    state = jax.tree.map(np.asarray, setup.state)
    replicated = placement.replicate(state._replace(optimizer=()), setup.mesh)
    return setup._replace(state=replicated._replace(optimizer=_make_layout(setup).place(state.optimizer)))


# --- checkpoints ---------------------------------------------------------------------------------------------------


def to_checkpoint(setup: Setup, state: State) -> State:
    """Return the state as checkpoints store it: whole arrays, whatever the summation."""
    return state._replace(optimizer=_make_layout(setup).gather(state.optimizer))


def restore_state(setup: Setup, restore: Callable[[Any], Any]) -> State:
    """Return the state that `restore` reads, placed as the plan needs it.

    `restore` takes abstract arrays of the same shapes.
    """
    layout = _make_layout(setup)
    state = restore(setup.state._replace(optimizer=layout.describe_whole(setup.state.optimizer)))
    return state._replace(optimizer=layout.scatter(state.optimizer))


def _make_layout(setup: Setup) -> StateLayout:
    return StateLayout(setup.plan.summation, setup.mesh, setup.optimizer, setup.net.get_param_shapes())


# --- input ---------------------------------------------------------------------------------------------------------


def load_train_batches(setup: Setup, calls: list[range], skipped: Sequence[range] = ()) -> prefetch.Batches:
    """Return the training batches of these calls, loaded in the background; `skipped` batches are left out."""
    sharding = pods.make_batch_sharding(setup.mesh, axis=2)
    return loader.load_train_batches(setup.data.train, setup.plan, calls, sharding, skip=skipped)


def cache_images(setup: Setup, options: Options) -> Setup:
    """Return the setup with this process's images cached in memory, as far as the options and the memory allow."""
    if setup.data.train.files is None:
        return setup
    allowed = (
        options.cache_gib * 2**30 if options.cache_gib else cache.DEFAULT_MEMORY_SHARE * cache.measure_free_memory()
    )
    limit = int(allowed) // group.count_local_processes()
    samples = loader.list_train_samples(setup.plan, pods.make_batch_sharding(setup.mesh, axis=2))
    train = _cache_split(setup.data.train, samples, options.cache, limit, setup.recipe.train.epochs)
    limit -= train.cache.memory.size if train.cache else 0
    samples = loader.list_eval_samples(
        len(setup.data.val), pods.make_batch_sharding(setup.mesh), setup.plan.eval_images
    )
    val = _cache_split(setup.data.val, samples, options.cache, limit, len(setup.plan.eval_steps()))
    return setup._replace(data=replace(setup.data, train=train, val=val))


def _cache_split(index: Index, samples: NDArray[np.int64], option: str, limit: int, passes: float) -> Index:
    encoded = cache.compute_cache_bytes(index.count_encoded_bytes()[samples])
    decoded = cache.compute_cache_bytes(index.count_decoded_bytes()[samples])
    kind = cache.choose_kind(option, encoded, decoded, limit, passes)
    return index.with_cache(kind, samples) if kind else index


def describe_input(setup: Setup) -> dict[str, Any]:
    """Return where this process's pixels come from: decoder and cache. Neither changes a pixel."""
    caches = {split: getattr(setup.data, split).cache for split in ("train", "val")}
    return {
        "decoder": decode.select_decoder() if setup.data.train.files is not None else "none",
        "cache": {
            split: setup.plan.input.name if setup.plan.input.is_resident else images.kind if images else "none"
            for split, images in caches.items()
        },
        "cache_bytes": sum(images.memory.size for images in caches.values() if images),
    }
