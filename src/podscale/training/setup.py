"""Make programs: a recipe on a pod, ready to compile, train and evaluate.

`resolve` is the one place where recipe, pod, data set and options become a plan. Before the first compilation there are
also: opening the data set, initial weights, and caching images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from podscale import plan as plans
from podscale import pod as pods
from podscale.config.options import Options, check_options
from podscale.data import cache, decode, loader, prefetch
from podscale.data.balance import check_order
from podscale.data.files import Progress
from podscale.data.index.dataset import NO_IMAGES, Index, Splits, check_classes, open_index
from podscale.data.order import check_lanes
from podscale.errors import UserError
from podscale.forecast.choice import Choice, choose_summation
from podscale.forecast.compute import list_recipe_matrices
from podscale.forecast.orthogonalization import choose_group, count_update_bytes
from podscale.models import registry
from podscale.models.functional import FunctionalModel, make_functional
from podscale.optim import schedules
from podscale.plan import Counts, Plan
from podscale.pod import Pod
from podscale.processes import group
from podscale.recipe import Data, Recipe, check_any_size
from podscale.runs.startup import clock as start_clock
from podscale.training import initial_weights
from podscale.training.device_input import resident
from podscale.training.initial_weights import InitialWeights
from podscale.training.memory import estimate_memory
from podscale.training.program import Program, Weights
from podscale.training.update_rule import make_update_rule

FIT_IMAGES = 5000  # training images that a model's `fit_parameters` gets at most


def prepare(
    recipe: Recipe,
    pod: Pod,
    options: Options = Options(),
    model: nnx.Module | None = None,
    progress: Progress | None = None,
) -> Program:
    """Open the data set and return the program, with randomly initialized weights.

    Args:
        recipe: what to train.
        pod: the devices to train on.
        options: how to run it.
        model: a flax.nnx module instead of the recipe's own.
        progress: called while the data set is indexed.
    """
    check_options(options)
    data = open_index(recipe.data, progress, group.share_bytes)
    check_classes(data, recipe.data)
    start_clock.mark("index")
    digests = {"recipe": recipe.digest(), "data": data.digest()}
    group.check_same(digests, "give all processes the same command, and all hosts the same data")
    counts = Counts(len(data.train), len(data.val), len(data.classes))
    check_order(recipe, data.train.labels)
    return resolve(recipe, pod, counts, options, model, data)


def resolve(
    recipe: Recipe,
    pod: Pod,
    counts: Counts,
    options: Options = Options(),
    model: nnx.Module | None = None,
    data: Splits = NO_IMAGES,
) -> Program:
    """Decide everything that recipe and options leave open, and return the program with its plan.

    Works from counts alone: the images need not exist, and a model may be abstract. All processes must call it: it may
    time messages between them.
    """
    check_options(options)
    model = model or registry.build_model(recipe.model, counts.classes, recipe.data.image_size, recipe.train.seed)
    _check_sizes(recipe, counts.classes)
    net, params, stats = make_functional(model, recipe.model.freeze)
    is_remat = options.remat == "on" or getattr(model, "remat", False)
    net = use_remat(model, recipe) if options.remat == "on" else net
    parameters = sum(leaf.size for leaf in jax.tree.leaves(net.split(params)[0]))
    options = resident.resolve_cache(options, recipe, pod, data) if len(data.train) else options
    choice = choose_summation(options, pod, parameters)
    matrices = list_recipe_matrices(recipe, net, params)
    choice = choice._replace(options=choose_group(choice.options, pod, matrices, recipe.optimizer.newton_schulz))
    times = schedules.count_times(recipe, recipe.steps(counts.train), counts.train / recipe.batch.size)
    rule = make_update_rule(recipe, net, choice.options, times)

    def make_plan(net: FunctionalModel) -> Plan:
        memory = estimate_memory(recipe, net, params, stats, rule.optimizer)
        memory = replace(memory, update=count_update_bytes(choice.options, pod, matrices))
        return plans.make_plan(recipe, pod, counts, choice.options, memory)

    plan = make_plan(net)
    if options.remat == "auto" and not plan.fits_memory and getattr(model, "remat", True) is False:
        net, is_remat = use_remat(model, recipe), True
        plan = make_plan(net)
    plan = plans.set_remat(plan, is_on=bool(is_remat))
    plan = replace(plan, kernels=net.select_kernels(plan.kernels))
    weights = Weights(*jax.device_get((params, stats)))
    return Program(plan, net, rule.optimizer, rule.schedule, weights, choice, data)


def _check_sizes(recipe: Recipe, classes: int) -> None:
    """Refuse training images that do not fit the recipe's model."""
    check_any_size(recipe, ("vit",))
    if recipe.model.name not in registry.list_models():
        return
    for size in recipe.data.train_sizes:
        try:
            _describe_model(recipe.override({"data.image_size": size}), classes)
        except UserError as error:
            raise UserError(f"data.train_sizes {size}: {error}") from None


def use_remat(model: nnx.Module, recipe: Recipe) -> FunctionalModel:
    """Return a model as functions that compute each layer again in the backward pass; the model stays as it is.

    Raises:
        UserError: it is none of the networks that can.
    """
    if not hasattr(model, "remat"):
        raise UserError(f"plan.remat on: a {type(model).__name__} cannot compute its layers again; leave it out")
    rematerialized = make_functional(model, recipe.model.freeze)[0].build_abstract_module()
    rematerialized.remat = True
    return make_functional(rematerialized, recipe.model.freeze)[0]


def describe_program(plan: Plan) -> Program:
    """Return the program of a plan with abstract weights: all that it takes to lower its calls."""
    recipe = plan.recipe
    model = _describe_model(recipe, plan.counts.classes)
    net, params, stats = make_functional(model, recipe.model.freeze)
    net = use_remat(model, recipe) if plan.options.remat == "on" else net
    times = schedules.count_times(recipe, plan.steps, plan.steps_per_epoch)
    rule = make_update_rule(recipe, net, plan.options, times)
    return Program(plan, net, rule.optimizer, rule.schedule, Weights(params, stats), Choice(plan.options, {}, ""))


def _describe_model(recipe: Recipe, classes: int) -> nnx.Module:
    """Return the recipe's model with shapes instead of arrays."""
    model: nnx.Module = nnx.eval_shape(lambda: registry.build_model(recipe.model, classes, recipe.data.image_size))
    return model


def plan_recipe(recipe: Recipe, pod: Pod, options: Options) -> Plan:
    """Return the plan of a recipe on a pod, without the model's arrays.

    All processes of a pod that is present must call it: it may time messages between their machines.

    Args:
        recipe: what to train. The data set need not be on this machine if the recipe gives its counts
            (`data.train_samples`, `data.val_samples` and `data.classes`).
        pod: the devices to plan for; they need not be in this machine.
        options: how to run it.

    Returns:
        The plan: steps, batches, spans, memory, summation.

    Raises:
        UserError: the recipe does not fit the pod or the data set; the message says what does.

    Examples:
        >>> import podscale
        >>> recipe = podscale.load_recipe("digits")
        >>> plan = podscale.make_plan(recipe, podscale.parse_pod("cpu:2x2"), podscale.Options())
        >>> plan.pod.size, plan.counts.train, plan.micro_batches
        (4, 1437, 1)
    """
    splits = open_uncounted(recipe.data)
    return plan_counts(recipe, pod, options, count_samples(recipe.data, splits))


def open_uncounted(data: Data) -> Splits | None:
    """Return the indexes of a data set, unless the recipe gives all its counts."""
    return None if data.train_samples and data.val_samples and data.classes else open_index(data)


def count_samples(data: Data, splits: Splits | None) -> Counts:
    """Return the counts of a data set: of its indexes, or as the recipe gives them."""
    if splits is None:
        return Counts(data.train_samples, data.val_samples, data.classes)
    return Counts(len(splits.train), len(splits.val), len(splits.classes))


def plan_counts(recipe: Recipe, pod: Pod, options: Options, counts: Counts) -> Plan:
    """Return the plan of a recipe on a pod for a data set of these counts; see `plan_recipe`."""
    check_lanes(counts.train, recipe.data.lanes, recipe.batch.size)
    return resolve(recipe, pod, counts, options, _describe_model(recipe, counts.classes)).plan


# --- initial weights -----------------------------------------------------------------------------------------------


def initialize(program: Program) -> tuple[Program, InitialWeights | None]:
    """Return the program with the weights that a run from scratch starts from, and where they come from, if not random.

    A model's `fit_parameters` runs only where its result is used: not if initial weights replace all parameters.
    """
    if not program.plan.recipe.model.init:
        return fit_model(program), None
    initialized, weights = load_initial_weights(program)
    if weights.reinitialized and has_fit(program):
        return load_initial_weights(fit_model(program))
    return initialized, weights


def has_fit(program: Program) -> bool:
    """Return whether the model has a `fit_parameters`, by its graph alone: no array is read.

    Raises:
        UserError: it has a method `fit` instead, which once changed the model in place.
    """
    model = program.net.build_abstract_module()
    if hasattr(model, "fit_parameters"):
        return True
    if callable(getattr(model, "fit", None)):
        raise UserError(
            f"{type(model).__name__}.fit is no longer called; rename it to fit_parameters and let it return the "
            "parameters that it changes, such as {'head.bias': array}"
        )
    return False


def fit_model(program: Program) -> Program:
    """Return the program with its model fitted to training images; unchanged if the model has no `fit_parameters`."""
    if not has_fit(program):
        return program
    params = program.net.replace_parameters(program.weights.params, fit_parameters(program))
    return replace(program, weights=Weights(params, program.weights.stats))


def fit_parameters(program: Program, resident_images: jax.Array | None = None) -> dict[str, np.ndarray]:
    """Return the parameters that the model's `fit_parameters` computes from training images, by name.

    The images are spread evenly over the data set and cropped as in evaluation. All processes use the parameters that
    the main process computes.

    Args:
        program: its model has a `fit_parameters`.
        resident_images: all training images, uint8, if they live on the devices and need no crop; else they are loaded.
    """
    recipe, index = program.plan.recipe, program.data.train
    count = min(len(index), FIT_IMAGES)
    samples = np.arange(count) * len(index) // count
    mean, std = (np.asarray(value, np.float32) for value in (recipe.data.mean, recipe.data.std))
    if resident_images is None:
        images = loader.load_eval_images(index, samples.tolist(), recipe)
        inputs = (images / np.float32(255) - mean) / std
    else:
        inputs = _normalize_samples(resident_images, samples, mean, std)
    parameters = program.net.build_abstract_module().fit_parameters(inputs)
    return group.broadcast_arrays({name: np.asarray(array) for name, array in parameters.items()})


@jax.jit
def _normalize_samples(images: jax.Array, samples: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
    return (images[samples] / jnp.float32(255) - mean) / std


def load_initial_weights(program: Program) -> tuple[Program, InitialWeights]:
    """Return the program with the weights of `model.init`, and a description of them."""
    source, classes = program.plan.recipe.model.init, tuple(program.data.classes)
    weights = initial_weights.initialize_from(source, program.net, *program.weights, classes)
    return replace(program, weights=Weights(weights.params, weights.stats)), weights


# --- input ---------------------------------------------------------------------------------------------------------


def load_train_batches(program: Program, calls: list[range], skipped: Sequence[range] = ()) -> prefetch.Batches:
    """Return the training batches of these calls, loaded in the background; `skipped` batches are left out."""
    sharding = pods.make_batch_sharding(program.mesh, axis=2)
    return loader.load_train_batches(program.data.train, program.plan, calls, sharding, skip=skipped)


def cache_images(program: Program) -> Program:
    """Return the program with this process's images cached in memory, as far as the options and the memory allow."""
    data, plan, options = program.data, program.plan, program.plan.options
    if data.train.files is None:
        return program
    allowed = (
        options.cache_gib * 2**30 if options.cache_gib else cache.DEFAULT_MEMORY_SHARE * cache.measure_free_memory()
    )
    limit = int(allowed) // group.count_local_processes()
    sharding = pods.make_batch_sharding(program.mesh, axis=2)
    train = _cache_split(
        data.train,
        lambda: loader.iterate_train_samples(plan, sharding),
        options.cache,
        limit,
        plan.recipe.train.epochs,
    )
    limit -= train.cache.memory.size if train.cache else 0
    samples = loader.list_eval_samples(len(data.val), pods.make_batch_sharding(program.mesh), plan.eval_images)
    val = _cache_split(data.val, lambda: iter([samples]), options.cache, limit, len(plan.eval_steps()))
    return replace(program, data=replace(data, train=train, val=val))


def _cache_split(
    index: Index, iterate: Callable[[], Iterator[NDArray[np.int64]]], option: str, limit: int, passes: float
) -> Index:
    """Return the index with a cache of the samples that `iterate` yields in parts, if it fits."""
    encoded = decoded = 0
    for samples in iterate():
        encoded += cache.compute_cache_bytes(index.count_encoded_bytes(samples))
        decoded += cache.compute_cache_bytes(index.count_decoded_bytes(samples))
    kind = cache.choose_kind(option, encoded, decoded, limit, passes)
    return index.with_cache(kind, np.concatenate(list(iterate()))) if kind else index


def describe_input(program: Program) -> dict[str, object]:
    """Return where this process's pixels come from: decoder and cache. Neither changes a pixel."""
    kind, caches = program.plan.input, {split: getattr(program.data, split).cache for split in ("train", "val")}
    return {
        "decoder": decode.select_decoder() if program.data.train.files is not None else "none",
        "cache": {
            split: kind.name if kind.is_resident else images.kind if images else "none"
            for split, images in caches.items()
        },
        "cache_bytes": sum(images.memory.size for images in caches.values() if images),
    }
