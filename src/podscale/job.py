"""Job: a recipe on a pod, ready to train or to evaluate. All that comes before the first compilation, and the last."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from numpy.typing import NDArray

from podscale import models, optim, peers, sharded, weights
from podscale import plan as plans
from podscale import pod as pods
from podscale import step as steps
from podscale.data import ahead, cache, decode, loader, resident
from podscale.data.files import Progress
from podscale.data.index import NO_PICTURES, Index, Splits, open_index
from podscale.data.order import Order
from podscale.forecast import choice
from podscale.forecast.choice import Choice
from podscale.memory import footprint
from podscale.models.functional import Functional, functional
from podscale.options import Options
from podscale.plan import Counts, Plan
from podscale.pod import Pod
from podscale.recipe import Recipe
from podscale.run import Run
from podscale.step import State
from podscale.weights import Beginning

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
    model = model or models.build(recipe.model, counts.classes, recipe.data.image_size, recipe.train.seed)
    net, params, stats = functional(model, recipe.model.freeze)
    schedule = optim.schedule(recipe, recipe.steps(counts.train), counts.train / recipe.batch.size)
    rule = net.learner(optim.optimizer(recipe, schedule, stem=net.stem, head=net.head))
    needs = footprint(recipe, net, params, stats, rule)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(net.split(params)[0]))
    chosen = choice.settled(resident.settled(options, recipe, pod, data), pod, parameters)
    plan = plans.make(recipe, pod, counts, chosen.options, needs)
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
    params = pods.first_arrays(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return _placed(job._replace(state=steps.initial_state(job.recipe, params, stats, job.optimizer)))


def begun(job: Job) -> tuple[Job, Beginning]:
    """The same job with the weights that its recipe begins from, and what became of them."""
    params, stats = jax.device_get((job.state.params, job.state.stats))
    found = weights.begin(job.recipe.model.init, job.net, params, stats)
    state = steps.initial_state(job.recipe, found.params, found.stats, job.optimizer)
    return _placed(job._replace(state=state)), found


def _placed(job: Job) -> Job:
    """The job with its state on the devices: the same on all of them, or the optimizer's in parts."""
    state = jax.tree.map(np.asarray, job.state)
    if job.plan.summation != sharded.NAME:
        return job._replace(state=pods.replicated(state, job.mesh))
    rest = pods.replicated(state._replace(optimizer=()), job.mesh)
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
    limit = int(allowed) // pods.processes_here()
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


def compiled_step(job: Job, run: Run | None = None, options: dict[str, Any] | None = None) -> Any:
    """The train call, compiled ahead of its first use, so that its time is booked as what it is."""
    pictures = [resident.placed(job.data.train, job.mesh)] if job.plan.resident else []
    call = steps.train_call(job.net, job.plan, job.optimizer, job.schedule, job.mesh)
    batch = steps.call_arguments(job.plan, job.mesh)[:3]
    program = compiled(call.lower(job.state, *batch, *pictures), job.plan, run, options)
    return _warmed(job, lambda *batch: program(*batch, *pictures), *batch) if pictures else program


def _warmed(job: Job, call: Callable[..., Any], picks: Any, labels: Any, _: Any) -> Callable[..., Any]:
    """The call, after it was used on zeros: what a device loads at first use is no part of training."""
    jax.block_until_ready(call(*_zeros((job.state, picks, labels)), np.int32(1)))
    return call


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), like)


def compiled(lowered: Any, plan: Plan, run: Run | None, options: dict[str, Any] | None = None) -> Any:
    """The program. If the plan is to be deterministic and runs on GPUs, the very one that the run began with.

    GPU programs differ from one compilation to the next in the algorithms that happened to be fastest when they were
    tried. So they are kept in the run, where the next session finds them, and algorithms whose sums come out in another
    order each time are not tried at all.
    """
    if plan.deterministic and jax.default_backend() == "gpu":
        wanted = {"xla_gpu_exclude_nondeterministic_ops": True} | (options or {})
        with programs_kept_in(run.programs) if run else nullcontext():
            program = lowered.compile(wanted)
    else:
        program = lowered.compile(steps.compiler_options(plan) | (options or {}) or None)
    peers.meet()  # some compile longer than others
    return program


@contextmanager
def programs_kept_in(folder: Path) -> Iterator[None]:
    """What is compiled meanwhile is looked up in this folder, and kept there."""
    wanted = {"jax_compilation_cache_dir": str(folder.absolute()), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in wanted}
    _set_cache(wanted)
    try:
        yield
    finally:
        _set_cache(before)


def _set_cache(settings: dict[str, Any]) -> None:
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)


def train_batches(job: Job, calls: list[range], left_out: Sequence[range] = ()) -> ahead.Batches:
    """The job's training data for these calls, prepared in the background, but for batches that are left out."""
    sharding = pods.batch_sharding(job.mesh, axis=2)
    return loader.train_batches(job.data.train, job.plan, calls, sharding, left_out=left_out)


def compiled_evaluation(job: Job, run: Run | None = None) -> tuple[Any, tuple[Any, ...]]:
    """The evaluation of so many pictures as the plan has for it at a time, and arrays like what it takes."""
    size, count = job.recipe.data.image_size, job.plan.eval_images * job.plan.pod.size
    sharding = pods.batch_sharding(job.mesh)
    images = jax.ShapeDtypeStruct((count, size, size, 3), np.uint8, sharding=sharding)
    labels = jax.ShapeDtypeStruct((count,), np.int32, sharding=sharding)
    nothing = pods.replicated(steps.empty_tally(), job.mesh)
    like = job.state.params, job.state.stats, images, labels, nothing
    return compiled(steps.eval_call(job.net, job.plan, job.mesh).lower(*like), job.plan, run), like


class Evaluator:
    """Exact evaluation on all devices: every example counts once, whatever the host and device count."""

    def __init__(self, job: Job, run: Run | None = None) -> None:
        self._job = job
        self.unreadable: list[str] = []  # pictures that the last evaluation could not read, in words
        self.answers = np.zeros((0, 3), np.float32)  # of the last evaluation; see steps.eval_call
        self._call, like = compiled_evaluation(job, run)
        self._held: list[ahead.Batch] = []  # where the pictures live on the devices: all of them, batch by batch
        if job.plan.resident:
            with self._loaded() as batches:
                self._held = list(batches)
            jax.block_until_ready(self._call(*_zeros(like)))  # as in `_warmed`

    def __call__(self, state: State) -> dict[str, float]:
        """Accuracy, top-5 accuracy and mean loss over all validation examples, by the averaged weights if there are."""
        job, numbers = self._job, state.average or {"params": state.params, "stats": state.stats}
        tally, answers = pods.replicated(steps.empty_tally(), job.mesh), []
        with self._loaded() if not self._held else nullcontext(self._held) as batches:
            for batch in batches:
                tally, given = self._call(numbers["params"], numbers["stats"], batch.images, batch.labels, tally)
                answers.append(given)
            self.unreadable = batches.bad.news() if isinstance(batches, ahead.Batches) else []
        found = jax.device_get(tally)
        self.answers = np.concatenate([pods.whole(given) for given in answers])[: len(job.data.val)]
        count = int(found.examples)
        return {
            "accuracy": int(found.correct) / count,
            "accuracy_top5": int(found.correct_top5) / count,
            "loss": float(found.loss) / count,
            "examples": count,
        }

    def _loaded(self) -> ahead.Batches:
        job = self._job
        return loader.eval_batches(job.data.val, job.recipe, pods.batch_sharding(job.mesh), job.plan.eval_images)
