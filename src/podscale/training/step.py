"""The train step and the evaluation step: one shard_mapped, jitted, buffer-donating function each.

A call runs several updates so that the host stays off the critical path. Inside, every device works on its own images;
it communicates with others only in batch norm (its tile) and in the summation of gradients (the pod).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree, UInt8

from podscale.kernels.layer_spec import HOPPER
from podscale.models.functional import FunctionalModel, Tree
from podscale.optim.norms import compute_global_norm, compute_joined_global_norm
from podscale.optim.parameter_groups import count_stem_updates
from podscale.parallel import batch_norm
from podscale.parallel.state_layout import StateLayout
from podscale.plan import Plan
from podscale.pod import ALL_AXES, BATCH_AXES, make_batch_sharding
from podscale.recipe import Recipe, find_largest_size
from podscale.training import views
from podscale.training.cpu_options import make_cpu_options
from podscale.training.device_input import augment
from podscale.training.losses import compute_losses
from podscale.training.update_rule import Scalars, UpdateRule

# Text, truth values and numbers; what JAX declares leaves out the numbers.
CompilerOptions: TypeAlias = dict[str, Any]

# What XLA puts into CUDA graphs: its default, and convolutions and loops.
GRAPHED_OPERATIONS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONVOLUTION,CONDITIONAL,WHILE"
GRAPHED_MODELS = ("cifarnet",)  # models that were faster with it where images live on the device
STEPS_TO_TUNE = 30_000  # from so many on, a faster step earns back the time that trying more kernels takes
OPTIMIZER = "optimizer"  # the named scope by which a profile of the step finds the update
Images = UInt8[Array, "micro_batches images height width 3"]  # of one device and update
Labels = Int[Array, "micro_batches images"]
Truth = Int[Array, "examples"]  # labels of what is evaluated
Logits = Float[Array, "examples classes"]
Predictions = Float[Array, "examples 3"]


class State(NamedTuple):
    """Everything that training changes; the same on every device at every step."""

    step: Int[Array, ""]
    params: Tree
    stats: Tree
    optimizer: optax.OptState
    average: Tree  # {"params", "stats"} averaged over steps, or {} if the recipe has no average


class Metrics(NamedTuple):
    """Metrics of one update, over the global batch."""

    loss: Float[Array, "*steps"]
    accuracy: Float[Array, "*steps"]
    grad_norm: Float[Array, "*steps"]
    learning_rate: Float[Array, "*steps"]
    skipped: Float[Array, "*steps"]  # 1 if loss or gradient was not finite, and only the step counter changed


class EvalCounts(NamedTuple):
    """What evaluation counts; whole numbers, so that no example is lost or counted twice."""

    examples: Int[Array, ""]
    correct: Int[Array, ""]
    correct_top5: Int[Array, ""]
    loss: Float[Array, ""]  # summed over examples


def init_state(recipe: Recipe, params: Tree, stats: Tree, optimizer: optax.GradientTransformation) -> State:
    """Return the state before the first update."""
    average = {"params": params, "stats": stats} if recipe.optimizer.average else {}
    state = State(jnp.zeros((), jnp.int32), params, stats, optimizer.init(params), average)
    return jax.tree.map(jnp.array, state)  # copies: the step donates its state, and the average aliases it


# --- training ----------------------------------------------------------------------------------------------------


def make_train_call(
    net: FunctionalModel,
    plan: Plan,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    mesh: Mesh,
    *,
    bind: Callable[[Scalars], UpdateRule] | None = None,
) -> jax.stages.Wrapped:
    """Return the jitted call: (state, batch [S, M, B/M, ...], labels [S, M, B/M], count, *residents) -> state, metrics.

    S is `plan.steps_per_call`, M `plan.micro_batches` and B the global batch. Only the first `count` of the S updates
    are done; the metrics [S] of the others are zero. What the batch holds of each image, and which arrays stay on the
    devices as `residents`, is `plan.input`'s to say.

    With `bind` the last argument is `Scalars`, from which `bind` makes the update rule instead.
    """
    size, constant_rule = plan.recipe.data.image_size, UpdateRule(plan.recipe, optimizer, schedule)

    def call(state: State, batch: Array, labels: Array, count: Array, *more: PyTree) -> tuple[State, Metrics]:
        residents, rule = (more[:-1], bind(more[-1])) if bind else (more, constant_rule)
        step = TrainStep(net.use_kernels(plan.kernels), plan, rule)

        def get_batch(i: int | Array) -> tuple[Array, Array]:
            return plan.input.get_images(batch[i], residents, size), labels[i]

        if plan.steps_per_call == 1:
            return _update_once(plan, step.update, state, *get_batch(0))
        return _update_often(plan, step.update, state, get_batch, count)

    layout = StateLayout(plan.summation, mesh, optimizer, net.get_param_shapes())
    everywhere, data = P(), P(None, None, BATCH_AXES)
    state_specs = (everywhere, everywhere, everywhere, layout.specs, everywhere)
    whole = [everywhere for _ in plan.input.describe_residents(size, plan.counts.train)] + [everywhere] * bool(bind)
    mapped = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(State._make(state_specs), data, data, everywhere, *whole),
        out_specs=(State._make(state_specs), everywhere),
        axis_names=set(ALL_AXES),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


@runtime_checkable
class _Update(Protocol):
    def __call__(self, state: State, images: Array, labels: Array, *, trains_stem: bool) -> tuple[State, Metrics]: ...


def _update_once(plan: Plan, update: _Update, state: State, images: Array, labels: Array) -> tuple[State, Metrics]:
    """Do one update; updates after the stem's last one need no gradient of the first layer."""
    stem_updates = count_stem_updates(plan.recipe, plan.steps)
    branches = [partial(update, trains_stem=trains_stem) for trains_stem in (True, False)]
    if stem_updates == plan.steps:
        state, metrics = branches[0](state, images, labels)
    else:
        state, metrics = lax.cond(state.step < stem_updates, *branches, state, images, labels)
    return state, jax.tree.map(lambda m: m[None], metrics)


def _update_often(
    plan: Plan, update: _Update, state: State, get_batch: Callable[[Array], tuple[Array, Array]], count: Array
) -> tuple[State, Metrics]:
    """Do `count` updates in a loop: those that train the stem, then the others."""

    def body(trains_stem: bool, i: Array, carry: tuple[State, Metrics]) -> tuple[State, Metrics]:
        state, history = carry
        state, metrics = update(state, *get_batch(i), trains_stem=trains_stem)
        return state, jax.tree.map(lambda values, m: values.at[i].set(m), history, metrics)

    zeros = jnp.zeros(plan.steps_per_call, jnp.promote_types(_get_dtype(state), jnp.float32))
    carry = state, Metrics(*[zeros] * len(Metrics._fields))
    stem_updates = count_stem_updates(plan.recipe, plan.steps)
    if stem_updates == plan.steps:
        return lax.fori_loop(0, count, partial(body, True), carry)
    turn = jnp.clip(stem_updates - state.step, 0, count)
    return lax.fori_loop(turn, count, partial(body, False), lax.fori_loop(0, turn, partial(body, True), carry))


def describe_call_arguments(plan: Plan, mesh: Mesh, size: int = 0) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the arguments of a train call after the state, as shapes, for images of this size; 0: the largest."""
    everywhere, split = NamedSharding(mesh, P()), make_batch_sharding(mesh, axis=2)
    image_shape, dtype = plan.input.describe_batch(size or find_largest_size(plan.recipe))
    residents = plan.input.describe_residents(plan.recipe.data.image_size, plan.counts.train)
    return (
        jax.ShapeDtypeStruct((*plan.batch_shape, *image_shape), dtype, sharding=split),
        jax.ShapeDtypeStruct(plan.batch_shape, jnp.int32, sharding=split),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
        *(jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in residents),
    )


def make_compiler_options(plan: Plan) -> CompilerOptions:
    """Return the compiler options that the plan needs.

    Without a limit on the size of a sum, the TPU compiler merges all buckets into one sum, which cannot start before
    the backward pass has ended.
    """
    platform = plan.pod.devices[0].platform if plan.pod.devices else ""
    if platform == "gpu":
        return _make_gpu_options(plan)
    if platform == "cpu":
        return make_cpu_options()
    if platform == "tpu" and plan.transfer.bucket_bytes:
        return {"xla_jf_crs_combiner_threshold_in_bytes": plan.transfer.bucket_bytes}
    return {}


def _make_gpu_options(plan: Plan) -> CompilerOptions:
    """Return what shortens compilation, and what shortens updates.

    XLA tries dozens of Triton kernels for every matrix product, and compares the results of all that it tries. Without
    both, compiling takes a third less time. Only the many products of optimizers such as Muon are slower for it, by a
    few percent of a small step, which counts in long trainings.

    On one GPU the whole loop of a call becomes one CUDA graph, convolutions included, for models that were faster so.
    """
    has_short_updates = plan.input.is_resident and plan.recipe.model.name in GRAPHED_MODELS
    options: CompilerOptions = {"xla_gpu_autotune_level": "2"}
    is_fused = plan.kernels is not None and plan.kernels.fuse_layers
    if not has_short_updates and (is_fused or plan.steps < STEPS_TO_TUNE):
        options["xla_gpu_enable_triton_gemm"] = False
    if plan.pod.size == 1 and (has_short_updates or plan.kernels == HOPPER):
        options["xla_gpu_enable_command_buffer"] = GRAPHED_OPERATIONS
    return options


@dataclass(frozen=True)
class TrainStep:
    """One update, as a function of a state and a batch, inside `shard_map`."""

    net: FunctionalModel
    plan: Plan
    rule: UpdateRule

    def update(self, state: State, images: Images, labels: Labels, *, trains_stem: bool) -> tuple[State, Metrics]:
        """Do one update with this device's images; the first layer has no gradient unless `trains_stem`."""
        recipe = self.rule.recipe
        grads, moments, counts = self.sum_micro_batches(state, images, labels, trains_stem)
        params, opt_state, grad_norm, (moments, counts) = self.apply_gradients(state, grads, (moments, counts))
        stats = (
            batch_norm.update_running_statistics(state.stats, moments, recipe.train.stats_momentum)
            if state.stats
            else {}
        )
        average = _update_average(recipe.optimizer.average, state.average, {"params": params, "stats": stats})
        # The same on every device: both are sums over the pod.
        finite = jnp.isfinite(counts["loss"]) & jnp.isfinite(grad_norm)
        metrics = Metrics(
            loss=counts["loss"],
            accuracy=counts["correct"] / recipe.batch.size,
            grad_norm=grad_norm,
            learning_rate=self.rule.schedule(state.step),
            skipped=(~finite).astype(counts["loss"].dtype),
        )
        new = State(state.step + 1, params, stats, opt_state, average)
        old = state._replace(step=state.step + 1)
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old), metrics

    def apply_gradients(self, state: State, grads: Tree, small: Tree) -> tuple[Tree, optax.OptState, Array, Tree]:
        """Sum over the pod and update: gradients in buckets, last layers first; small arrays unrounded.

        Returns:
            Parameters, optimizer state, norm of the gradients, and the sums of the small arrays.
        """
        summation, transfer, net = self.plan.summation, self.plan.transfer, self.net
        sums, small = summation.sum_gradients(grads, transfer), summation.sum_small(small)
        trainable, frozen = net.split(state.params)
        own = summation.select(trainable)
        with jax.named_scope(OPTIMIZER):
            updates, opt_state = self.rule.optimizer.update(sums, state.optimizer, net.join(own, frozen))
            trainable = summation.gather(optax.apply_updates(own, updates), trainable, transfer)
            grad_norm = self.compute_gradient_norm(sums)
        return net.join(trainable, frozen), opt_state, grad_norm, small

    def compute_gradient_norm(self, sums: Tree) -> Float[Array, ""]:
        """Return the norm of all gradients together."""
        if self.plan.summation.norms is not None:
            return compute_global_norm(sums, self.plan.summation.norms)
        return compute_joined_global_norm(sums)

    def sum_micro_batches(
        self, state: State, images: Images, labels: Labels, trains_stem: bool
    ) -> tuple[Tree, Tree, Tree]:
        """Sum gradients, moments and counts over this device's micro-batches.

        Each is the device's share of the global batch's mean.
        """
        positions = self.plan.positions(lax.axis_index(BATCH_AXES))
        trainable, frozen = self.net.split(state.params)

        def compute_loss(trainable: Tree, *micro_batch: Array) -> tuple[Array, tuple[Tree, Tree]]:
            trained = trainable if trains_stem else self.net.stop_stem_gradient(trainable)
            return self.compute_loss(state, self.net.join(trained, frozen), micro_batch)

        def differentiate(micro_batch: tuple[Array, ...]) -> tuple[Tree, Tree, Tree]:
            grads, (moments, counts) = jax.grad(compute_loss, has_aux=True)(trainable, *micro_batch)
            return grads, moments, counts

        if self.plan.micro_batches == 1:
            return differentiate((images[0], labels[0], positions[0]))

        def add(sums: Tree, micro_batch: tuple[Array, ...]) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, sums, differentiate(micro_batch)), None

        shapes = jax.eval_shape(differentiate, (images[0], labels[0], positions[0]))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        # A loop around convolutions is many times slower on CPU than the same code unrolled.
        return lax.scan(add, zeros, (images, labels, positions), unroll=self.plan.pod.kind == "cpu")[0]

    def compute_loss(
        self, state: State, params: Tree, micro_batch: tuple[Array, ...]
    ) -> tuple[Float[Array, ""], tuple[Tree, Tree]]:
        """Return the loss of a micro-batch (images, labels, positions), and its moments and counts."""
        plan, recipe, (images, labels, positions) = self.plan, self.rule.recipe, micro_batch
        inputs, targets = augment.prepare_batch(recipe, images, labels, state.step, positions, plan.counts.classes)
        keys = augment.make_layer_keys(recipe, state.step, positions) if self.net.is_random else None
        logits, moments = self.net.train(params, state.stats, inputs, plan.groups, keys)
        losses = compute_losses(recipe.train, logits, targets)
        correct = (logits.argmax(-1) == labels).sum().astype(losses.dtype)
        loss, share = losses.sum() / recipe.batch.size, 1 / (plan.micro_batches * plan.pod.size)
        return loss, (jax.tree.map(lambda m: m * share, moments), {"loss": loss, "correct": correct})


def _update_average(decay: float, average: Tree, new: Tree) -> Tree:
    if not average:
        return average
    return jax.tree.map(lambda a, n: decay * a + (1 - decay) * n, average, new)


def _get_dtype(state: State) -> jnp.dtype:
    return jax.tree.leaves(state.params)[0].dtype


# --- evaluation --------------------------------------------------------------------------------------------------


def make_eval_call(net: FunctionalModel, plan: Plan, mesh: Mesh) -> Any:
    """Return the jitted call: (params, stats, images, labels, counts) -> counts, predictions.

    Labels of -1 are padding; others below 0 are examples whose image cannot be read: they count as wrong. Predictions
    are, of each example, the predicted class (-1 if there is none), its probability, and that of the true class.
    """

    net = net.use_kernels(plan.kernels)

    def call(
        params: Tree, stats: Tree, images: UInt8[Array, "examples height width 3"], labels: Truth, counts: EvalCounts
    ) -> tuple[EvalCounts, Predictions]:
        logits = views.evaluate_views(net, plan.recipe, params, stats, images)
        counts = jax.tree.map(jnp.add, counts, lax.psum(_count_correct(logits, labels), ALL_AXES))
        return counts, _predict_classes(logits, labels)

    data = P(BATCH_AXES)
    mapped = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(P(), P(), data, data, P()),
        out_specs=(P(), data),
        axis_names=set(ALL_AXES),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=4)


def zero_counts() -> EvalCounts:
    """Return the counts before the first batch."""
    return EvalCounts(*(jnp.zeros((), kind) for kind in (jnp.int32, jnp.int32, jnp.int32, jnp.float32)))


def _count_correct(logits: Logits, labels: Truth) -> EvalCounts:
    target = jnp.maximum(labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    readable, finite = labels >= 0, jnp.isfinite(losses)  # a diverged model is right about nothing
    counted = labels != -1
    of_target = jnp.take_along_axis(logits, target[:, None], axis=-1)
    ahead = (logits > of_target) | ((logits == of_target) & (jnp.arange(logits.shape[-1]) < target[:, None]))
    rank = ahead.sum(-1)  # ties go to the lower class, as in argmax
    return EvalCounts(
        examples=counted.sum(dtype=jnp.int32),
        correct=(readable & finite & (rank == 0)).sum(dtype=jnp.int32),
        correct_top5=(readable & finite & (rank < 5)).sum(dtype=jnp.int32),
        loss=jnp.where(readable, losses, 0).sum().astype(jnp.float32),
    )


def _predict_classes(logits: Logits, labels: Truth) -> Predictions:
    """Return class, its probability and that of the true class, as `make_eval_call` says."""
    probabilities = jax.nn.softmax(logits.astype(jnp.float32))
    of_target = jnp.take_along_axis(probabilities, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
    has_prediction = (labels >= 0) & jnp.isfinite(of_target)
    classes = jnp.where(has_prediction, logits.argmax(-1), -1)
    return jnp.stack([classes.astype(jnp.float32), probabilities.max(-1), of_target], axis=1)


def make_predictor(net: FunctionalModel, recipe: Recipe, options: CompilerOptions | None = None) -> Any:
    """Return the jitted function: (params, stats, images uint8 [n, h, w, 3]) -> probabilities [n, classes]."""
    average = partial(views.average_views, net, recipe)
    return jax.jit(lambda p, s, images: jax.nn.softmax(average(p, s, images)), compiler_options=options or None)
