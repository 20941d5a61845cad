"""Job: a recipe on a pod, ready to train or to evaluate. All that comes before the first compilation, and the last."""

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
from podscale.data.index.dataset import NO_PICTURES, Index, Splits, open_index
from podscale.data.order import Order
from podscale.forecast import choice
from podscale.forecast.choice import Choice
from podscale.models import registry
from podscale.models.functional import Functional, functional
from podscale.optim import optimizers, schedules
from podscale.parallel import placement, sharded
from podscale.plan import Counts, Plan
from podscale.pod import Pod
from podscale.processes import group
from podscale.recipe import Recipe
from podscale.training import initial_weights
from podscale.training import step as steps
from podscale.training.device_input import resident
from podscale.training.initial_weights import Beginning
from podscale.training.memory import estimate_memory
from podscale.training.step import State

FITTED_TO = 5000  # training pictures that a model may look at before training


class Job(NamedTuple):
    """Everything that training and evaluation need."""

    recipe: Recipe
    plan: Plan
    mesh: Mesh
    data: Splits
    net: Functional
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    state: State
    choice: Choice  # of the summation, where it was left open


def prepare(
    recipe: Recipe,
    pod: Pod,
    options: Options = Options(),
    model: nnx.Module | None = None,
    progress: Progress | None = None,
) -> Job:
    """Index, model, plan and initial state; `model` replaces the recipe's own; `progress` is told of the index."""
    data = open_index(recipe.data, progress)
    counts = Counts(len(data.train), len(data.val), len(data.classes))
    Order(counts.train, recipe.data.lanes, recipe.batch.size, recipe.train.seed)  # refuses impossible lanes
    return assemble(recipe, pod, counts, options, model, data)


def assemble(
    recipe: Recipe,
    pod: Pod,
    counts: Counts,
    options: Options = Options(),
    model: nnx.Module | None = None,
    data: Splits = NO_PICTURES,
) -> Job:
    """The same for so many pictures, which need not be at hand."""
    model = model or registry.build(recipe.model, counts.classes, recipe.data.image_size, recipe.train.seed)
    net, params, stats = functional(model, recipe.model.freeze)
    schedule = schedules.make_schedule(recipe, recipe.steps(counts.train), counts.train / recipe.batch.size)
    rule = net.learner(optimizers.make_optimizer(recipe, schedule, stem=net.stem, head=net.head))
    needs = estimate_memory(recipe, net, params, stats, rule)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(net.split(params)[0]))
    chosen = choice.settled(resident.settled(options, recipe, pod, data), pod, parameters)
    plan = plans.make_plan(recipe, pod, counts, chosen.options, needs)
    mesh, optimizer = pod.mesh(plan.tile), steps.learner(net, plan, schedule)
    state = steps.initial_state(recipe, params, stats, optimizer)
    return _placed(Job(recipe, plan, mesh, data, net, optimizer, schedule, state, chosen))


def fitted(job: Job) -> Job:
    """The same job, its model fitted to training pictures, where it has a `fit`; the first process's word holds.

    The pictures are spread evenly over the data set, and are seen as evaluation would see them.
    """
    params, stats = jax.device_get((job.state.params, job.state.stats))
    model = job.net.model(*jax.tree.map(jnp.asarray, (params, stats)))
    if not hasattr(model, "fit"):
        return job
    count = len(job.data.train)
    chosen = np.arange(min(count, FITTED_TO)) * count // min(count, FITTED_TO)
    pictures = loader.eval_pictures(job.data.train, chosen.tolist(), job.recipe)
    mean, std = (np.asarray(value, np.float32) for value in (job.recipe.data.mean, job.recipe.data.std))
    model.fit((pictures / np.float32(255) - mean) / std)
    params = group.broadcast_arrays(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return _placed(job._replace(state=steps.initial_state(job.recipe, params, stats, job.optimizer)))


def begun(job: Job) -> tuple[Job, Beginning]:
    """The same job with the weights that its recipe begins from, and what became of them."""
    params, stats = jax.device_get((job.state.params, job.state.stats))
    found = initial_weights.begin(job.recipe.model.init, job.net, params, stats)
    state = steps.initial_state(job.recipe, found.params, found.stats, job.optimizer)
    return _placed(job._replace(state=state)), found


def _placed(job: Job) -> Job:
    """The job with its state on the devices: the same on all of them, or the optimizer's in parts."""
    state = jax.tree.map(np.asarray, job.state)
    if job.plan.summation != sharded.NAME:
        return job._replace(state=placement.replicate(state, job.mesh))
    rest = placement.replicate(state._replace(optimizer=()), job.mesh)
    return job._replace(state=rest._replace(optimizer=_cutter(job).parts(state.optimizer)))


def _cutter(job: Job) -> sharded.Cutter:
    return sharded.Cutter(job.mesh, job.optimizer, job.net.shapes())


def saveable(job: Job, state: State) -> State:
    """The state as checkpoints hold it, whatever the summation."""
    if job.plan.summation != sharded.NAME:
        return state
    return state._replace(optimizer=_cutter(job).whole(state.optimizer))


def restored(job: Job, restore: Callable[[Any], Any]) -> State:
    """The state that `restore` reads, given arrays like what it shall give."""
    if job.plan.summation != sharded.NAME:
        return restore(job.state)
    cutter = _cutter(job)
    state = restore(job.state._replace(optimizer=cutter.like_whole(job.state.optimizer)))
    return state._replace(optimizer=cutter.from_whole(state.optimizer))


def cached(job: Job, options: Options) -> Job:
    """The same job, with the pictures of this process kept in memory as far as the options and the memory allow."""
    if job.data.train.files is None:
        return job
    allowed = options.cache_gib * 2**30 if options.cache_gib else cache.FREE_SHARE * cache.free_bytes()
    limit = int(allowed) // group.count_local_processes()
    own = loader.train_samples(job.plan, pods.batch_sharding(job.mesh, axis=2))
    train = _kept(job.data.train, own, options.cache, limit, job.recipe.train.epochs)
    limit -= train.cache.memory.size if train.cache else 0
    own = loader.eval_samples(len(job.data.val), pods.batch_sharding(job.mesh), job.plan.eval_images)
    val = _kept(job.data.val, own, options.cache, limit, len(job.plan.eval_steps()))
    return job._replace(data=replace(job.data, train=train, val=val))


def _kept(index: Index, samples: NDArray[np.int64], wanted: str, limit: int, passes: float) -> Index:
    encoded, decoded = (cache.room(lengths[samples]) for lengths in (index.encoded_bytes(), index.decoded_bytes()))
    kind = cache.choose(wanted, encoded, decoded, limit, passes)
    return index.cached(kind, samples) if kind else index


def input_facts(job: Job) -> dict[str, Any]:
    """How this process comes by its pixels, none of which changes them: decoder, and what is kept in memory."""
    kept = {split: getattr(job.data, split).cache for split in ("train", "val")}
    return {
        "decoder": decode.decoder() if job.data.train.files is not None else "none",
        "cache": {
            split: "device" if job.plan.resident else found.kind if found else "none" for split, found in kept.items()
        },
        "cache_bytes": sum(found.memory.size for found in kept.values() if found),
    }


def train_batches(job: Job, calls: list[range], left_out: Sequence[range] = ()) -> prefetch.Batches:
    """The job's training data for these calls, prepared in the background, but for batches that are left out."""
    sharding = pods.batch_sharding(job.mesh, axis=2)
    return loader.train_batches(job.data.train, job.plan, calls, sharding, left_out=left_out)


def plan_recipe(recipe: Recipe, pod: Pod, options: Options) -> Plan:
    """The plan for a pod that need not be here; the data need not be here either if the recipe gives its counts."""
    data = recipe.data
    if data.train_samples and data.val_samples and data.classes:
        counts = Counts(data.train_samples, data.val_samples, data.classes)
    else:
        found = open_index(data)
        counts = Counts(len(found.train), len(found.val), len(found.classes))
    Order(counts.train, data.lanes, recipe.batch.size, recipe.train.seed)  # refuses impossible lanes
    model = nnx.eval_shape(lambda: registry.build(recipe.model, counts.classes, data.image_size))
    net, params, stats = functional(model, recipe.model.freeze)
    optimizer = net.learner(
        optimizers.make_optimizer(recipe, schedules.make_schedule(recipe, 1, 1.0), stem=net.stem, head=net.head)
    )
    return plans.make_plan(recipe, pod, counts, options, estimate_memory(recipe, net, params, stats, optimizer))
