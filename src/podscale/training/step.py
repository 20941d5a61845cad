"""The train step and the evaluation step: one shard_mapped, jitted, buffer-donating function each.

A call runs several updates so that the host stays off the critical path. Inside, every device works on its own images;
it communicates with others only in batch norm (its tile) and in the summation of gradients (the pod).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podscale.data.picks import PICK_NUMBERS
from podscale.models.functional import FunctionalModel, Tree
from podscale.optim import optimizers
from podscale.optim.norms import (
    compute_global_norm,
    compute_joined_global_norm,
    compute_norm,
    compute_norm_unflattened,
    compute_norms,
)
from podscale.optim.parameter_groups import count_stem_updates
from podscale.parallel import batch_norm, sharded
from podscale.parallel.summation import sum_tree
from podscale.plan import Plan
from podscale.pod import ALL_AXES, BATCH_AXES, make_batch_sharding
from podscale.recipe import Recipe
from podscale.training import views
from podscale.training.device_input import augment, resident

# What XLA puts into CUDA graphs: its default, and convolutions and loops.
GRAPHED_OPERATIONS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONVOLUTION,CONDITIONAL,WHILE"
GRAPHED_MODELS = ("cifarnet",)  # models that were faster with it
OPTIMIZER = "optimizer"  # the named scope by which a profile of the step finds the update


class State(NamedTuple):
    """Everything that training changes; the same on every device at every step."""

    step: jax.Array
    params: Tree
    stats: Tree
    optimizer: Any
    average: Tree  # {"params", "stats"} averaged over steps, or {} if the recipe has no average


class Metrics(NamedTuple):
    """Metrics of one update, over the global batch."""

    loss: jax.Array
    accuracy: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array  # 1 if loss or gradient was not finite, and only the step counter changed


class EvalCounts(NamedTuple):
    """What evaluation counts; whole numbers, so that no example is lost or counted twice."""

    examples: jax.Array
    correct: jax.Array
    correct_top5: jax.Array
    loss: jax.Array  # summed over examples


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
    takes_seed: bool = False,
) -> Any:
    """Return the jitted call: (state, images [S, M, B/M, h, w, 3], labels [S, M, B/M], count) -> state, metrics [S].

    S is `plan.steps_per_call`, M `plan.micro_batches` and B the global batch. Only the first `count` of the S updates
    are done; the metrics of the others are zero. If the images live on the devices, `images` are picks [S, M, B/M, 4],
    and a fifth argument holds all images, uint8 [samples, height, width, 3].

    With `takes_seed` the last argument is the seed, a uint32, which replaces the recipe's.
    """
    update = partial(_update, net, plan, optimizer, schedule)
    stem_updates = count_stem_updates(plan.recipe, plan.steps)  # later ones need no gradient of the first layer

    def call(
        state: State, images: jax.Array, labels: jax.Array, count: jax.Array, *more: jax.Array
    ) -> tuple[State, Metrics]:
        seed = more[-1] if takes_seed else None

        def get_images(i: Any) -> jax.Array:
            if not plan.resident:
                return images[i]
            return resident.crop_picks(more[0], images[i], plan.recipe.data.image_size)

        if plan.steps_per_call == 1:
            branches = [partial(update, seed=seed, trains_stem=trains_stem) for trains_stem in (True, False)]
            arguments = state, get_images(0), labels[0]
            if stem_updates == plan.steps:
                state, metrics = branches[0](*arguments)
            else:
                state, metrics = lax.cond(state.step < stem_updates, *branches, *arguments)
            return state, jax.tree.map(lambda m: m[None], metrics)

        def body(trains_stem: bool, i: jax.Array, carry: tuple[State, Metrics]) -> tuple[State, Metrics]:
            state, history = carry
            state, metrics = update(state, get_images(i), labels[i], seed=seed, trains_stem=trains_stem)
            return state, jax.tree.map(lambda values, m: values.at[i].set(m), history, metrics)

        zeros = jnp.zeros(plan.steps_per_call, jnp.promote_types(_get_dtype(state), jnp.float32))
        carry = state, Metrics(*[zeros] * len(Metrics._fields))
        if stem_updates == plan.steps:
            return lax.fori_loop(0, count, partial(body, True), carry)
        turn = jnp.clip(stem_updates - state.step, 0, count)
        return lax.fori_loop(turn, count, partial(body, False), lax.fori_loop(0, turn, partial(body, True), carry))

    data, state_specs = P(None, None, BATCH_AXES), _make_state_specs(net, plan, optimizer)
    mapped = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(state_specs, data, data, P(), *[P()] * (plan.resident + takes_seed)),
        out_specs=(state_specs, P()),
        axis_names=set(ALL_AXES),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


def describe_call_arguments(plan: Plan, mesh: Mesh) -> tuple[Any, ...]:
    """Return the arguments of a train call after the state, as shapes."""
    everywhere, split = NamedSharding(mesh, P()), make_batch_sharding(mesh, axis=2)
    size, shape = plan.recipe.data.image_size, plan.batch_shape
    labels = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    if not plan.resident:
        return jax.ShapeDtypeStruct((*shape, size, size, 3), jnp.uint8, sharding=split), labels, count
    picks = jax.ShapeDtypeStruct((*shape, PICK_NUMBERS), jnp.int32, sharding=split)
    all_images = jax.ShapeDtypeStruct((plan.counts.train, size, size, 3), jnp.uint8, sharding=everywhere)
    return picks, labels, count, all_images


def make_plan_optimizer(net: FunctionalModel, plan: Plan, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return the plan's optimizer: of whole arrays, or of the device's parts of them."""
    norms = sharded.compute_norms if plan.summation == sharded.NAME else compute_norms
    return net.wrap_optimizer(optimizers.make_optimizer(plan.recipe, schedule, norms, stem=net.stem, head=net.head))


def _make_state_specs(net: FunctionalModel, plan: Plan, optimizer: optax.GradientTransformation) -> Any:
    """Return how the state lies on the devices: replicated, or with the optimizer's state partitioned."""
    if plan.summation != sharded.NAME:
        return P()
    everywhere: Any = P()
    return State(everywhere, everywhere, everywhere, sharded.make_specs(optimizer, net.get_param_shapes()), everywhere)


def make_compiler_options(plan: Plan) -> dict[str, Any]:
    """Return the compiler options that the plan needs.

    Without a limit on the size of a sum, the TPU compiler merges all buckets into one sum, which cannot start before
    the backward pass has ended.

    Where images live on one GPU and updates are short, the whole loop of a call becomes one CUDA graph, convolutions
    included.
    """
    platform = plan.pod.devices[0].platform if plan.pod.devices else ""
    if platform == "gpu" and plan.resident and plan.pod.size == 1 and plan.recipe.model.name in GRAPHED_MODELS:
        return {"xla_gpu_enable_command_buffer": GRAPHED_OPERATIONS}
    if platform == "tpu" and plan.bucket_bytes:
        return {"xla_jf_crs_combiner_threshold_in_bytes": plan.bucket_bytes}
    return {}


def _update(
    net: FunctionalModel,
    plan: Plan,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    state: State,
    images: jax.Array,
    labels: jax.Array,
    *,
    seed: jax.Array | None,
    trains_stem: bool,
) -> tuple[State, Metrics]:
    """Do one update with this device's images [M, m, h, w, 3]; the first layer has no gradient unless `trains_stem`."""
    recipe = plan.recipe
    local = _sum_micro_batches(net, plan, state, images, labels, seed, trains_stem)
    if plan.summation == sharded.NAME:
        params, opt_state, grad_norm, moments, counts = _apply_sharded_update(net, plan, optimizer, state, local)
    else:
        grads, moments, counts = _sum_over_pod(plan, local)
        with jax.named_scope(OPTIMIZER):
            updates, opt_state = optimizer.update(grads, state.optimizer, state.params)
            params = net.apply_updates(state.params, updates)
            norm = compute_norm_unflattened if recipe.optimizer.renormalize else compute_norm
            grad_norm = compute_joined_global_norm(grads, norm)
    stats = (
        batch_norm.update_running_statistics(state.stats, moments, recipe.train.stats_momentum) if state.stats else {}
    )
    average = _update_average(recipe.optimizer.average, state.average, {"params": params, "stats": stats})
    # The same on every device: both are sums over the pod.
    finite = jnp.isfinite(counts["loss"]) & jnp.isfinite(grad_norm)
    metrics = Metrics(
        loss=counts["loss"],
        accuracy=counts["correct"] / recipe.batch.size,
        grad_norm=grad_norm,
        learning_rate=schedule(state.step),
        skipped=(~finite).astype(counts["loss"].dtype),
    )
    new = State(state.step + 1, params, stats, opt_state, average)
    old = state._replace(step=state.step + 1)
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old), metrics


def _sum_micro_batches(
    net: FunctionalModel,
    plan: Plan,
    state: State,
    images: jax.Array,
    labels: jax.Array,
    seed: jax.Array | None,
    trains_stem: bool,
) -> tuple[Tree, ...]:
    """Sum gradients, moments and counts over this device's micro-batches.

    Each is the device's share of the global batch's mean.
    """
    recipe, micro_batches = plan.recipe, plan.micro_batches
    positions = plan.positions(lax.axis_index(BATCH_AXES))
    share_of_moments = 1 / (micro_batches * plan.pod.size)
    trainable, frozen = net.split(state.params)

    def compute_loss(
        trainable: Tree, images: jax.Array, labels: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Any]:
        params = net.join(trainable if trains_stem else net.stop_stem_gradient(trainable), frozen)
        classes = plan.counts.classes
        inputs, targets = augment.prepare_batch(recipe, images, labels, state.step, positions, classes, seed)
        logits, moments = net.train(params, state.stats, inputs, plan.groups, plan.kernels)
        losses = optax.softmax_cross_entropy(logits, targets.astype(logits.dtype))
        correct = (logits.argmax(-1) == labels).sum().astype(losses.dtype)
        loss = losses.sum() / recipe.batch.size
        return loss, (jax.tree.map(lambda m: m * share_of_moments, moments), {"loss": loss, "correct": correct})

    def differentiate(micro_batch: tuple[jax.Array, ...]) -> tuple[Tree, ...]:
        grads, (moments, counts) = jax.grad(compute_loss, has_aux=True)(trainable, *micro_batch)
        return grads, moments, counts

    if micro_batches == 1:
        return differentiate((images[0], labels[0], positions[0]))

    def add(sums: tuple[Tree, ...], micro_batch: tuple[jax.Array, ...]) -> tuple[tuple[Tree, ...], None]:
        return jax.tree.map(jnp.add, sums, differentiate(micro_batch)), None

    shapes = jax.eval_shape(differentiate, (images[0], labels[0], positions[0]))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    # A loop around convolutions is many times slower on CPU than the same code unrolled.
    return lax.scan(add, zeros, (images, labels, positions), unroll=plan.pod.kind == "cpu")[0]


def _sum_over_pod(plan: Plan, local: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Sum over the pod: gradients in buckets, last layers first; moments and counts, which are small, in float32."""
    grads, moments, counts = local
    grads = sum_tree(grads, strategy=plan.summation, payload=plan.payload, bucket_bytes=plan.bucket_bytes)
    moments, counts = sum_tree((moments, counts), strategy=plan.summation)
    return grads, moments, counts


def _apply_sharded_update(
    net: FunctionalModel, plan: Plan, optimizer: optax.GradientTransformation, state: State, local: tuple[Tree, ...]
) -> tuple[Tree, ...]:
    """Update each device's part of weights and optimizer state.

    Returns:
        Parameters, optimizer state, norm of the gradients, moments and counts.
    """
    grads, *small = local
    parts = sharded.scatter_gradients(grads, plan.payload, plan.bucket_bytes)
    moments, counts = sum_tree(tuple(small), strategy="torus")
    trainable, frozen = net.split(state.params)
    own_parts = sharded.select_parts(trainable)
    updates, opt_state = optimizer.update(parts, state.optimizer, net.join(own_parts, frozen))
    trainable = sharded.gather_parameters(optax.apply_updates(own_parts, updates), trainable, plan.bucket_bytes)
    grad_norm = compute_global_norm(parts, sharded.compute_norms)
    return net.join(trainable, frozen), opt_state, grad_norm, moments, counts


def _update_average(decay: float, average: Tree, new: Tree) -> Tree:
    if not average:
        return average
    return jax.tree.map(lambda a, n: decay * a + (1 - decay) * n, average, new)


def _get_dtype(state: State) -> Any:
    return jax.tree.leaves(state.params)[0].dtype


# --- evaluation --------------------------------------------------------------------------------------------------


def make_eval_call(net: FunctionalModel, plan: Plan, mesh: Mesh) -> Any:
    """Return the jitted call: (params, stats, images [E, h, w, 3], labels [E], counts) -> counts, predictions [E, 3].

    Labels of -1 are padding; others below 0 are examples whose image cannot be read: they count as wrong. Predictions
    are, of each example, the predicted class (-1 if there is none), its probability, and that of the true class.
    """

    def call(
        params: Tree, stats: Tree, images: jax.Array, labels: jax.Array, counts: EvalCounts
    ) -> tuple[EvalCounts, jax.Array]:
        logits = views.evaluate_views(net, plan.recipe, params, stats, images, plan.kernels)
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


def _count_correct(logits: jax.Array, labels: jax.Array) -> EvalCounts:
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


def _predict_classes(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return class, its probability and that of the true class, as `make_eval_call` says."""
    probabilities = jax.nn.softmax(logits.astype(jnp.float32))
    of_target = jnp.take_along_axis(probabilities, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
    has_prediction = (labels >= 0) & jnp.isfinite(of_target)
    classes = jnp.where(has_prediction, logits.argmax(-1), -1)
    return jnp.stack([classes.astype(jnp.float32), probabilities.max(-1), of_target], axis=1)


def make_predictor(net: FunctionalModel, recipe: Recipe) -> Any:
    """Return the jitted function: (params, stats, images uint8 [n, h, w, 3]) -> probabilities [n, classes]."""
    return jax.jit(lambda p, s, images: jax.nn.softmax(views.average_views(net, recipe, p, s, images)))
