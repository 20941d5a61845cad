"""The train step and the evaluation step: one shard_mapped, jitted, buffer-donating function each.

A call runs several updates so that the host stays off the critical path. Inside, every device works on its own images;
it meets the others in batch norm (its tile) and in the summation of gradients (the pod), and nowhere else.
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
from podscale.models.functional import Functional, Tree
from podscale.optim import optimizers
from podscale.optim.norms import global_norm, whole_norm, whole_norms
from podscale.parallel import batch_norm, sharded
from podscale.parallel.summation import sum_tree
from podscale.plan import Plan
from podscale.pod import ALL_AXES, BATCH_AXES, batch_sharding
from podscale.recipe import Recipe
from podscale.training.device_input import augment, resident

OPTIMIZER = "optimizer"  # the scope that a profile of the step finds the update by


class State(NamedTuple):
    """All that training changes; the same on every device at every step."""

    step: jax.Array
    params: Tree
    stats: Tree
    optimizer: Any
    average: Tree  # {"params", "stats"} averaged over steps, or {} where the recipe has no average


class Metrics(NamedTuple):
    """Per update, over the global batch."""

    loss: jax.Array
    accuracy: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array  # 1 where loss or gradient was no number, and nothing but the step counter moved


class Tally(NamedTuple):
    """What evaluation counts; whole numbers, so that no example is lost or weighed twice."""

    examples: jax.Array
    correct: jax.Array
    correct_top5: jax.Array
    loss: jax.Array  # summed over examples


def initial_state(recipe: Recipe, params: Tree, stats: Tree, optimizer: optax.GradientTransformation) -> State:
    """Before the first update."""
    average = {"params": params, "stats": stats} if recipe.optimizer.average else {}
    state = State(jnp.zeros((), jnp.int32), params, stats, optimizer.init(params), average)
    return jax.tree.map(jnp.array, state)  # own copies: the step donates its state, and the average aliases it


# --- training ----------------------------------------------------------------------------------------------------


def train_call(
    net: Functional, plan: Plan, optimizer: optax.GradientTransformation, schedule: optax.Schedule, mesh: Mesh
) -> Any:
    """Compiles to: (state, images [S, M, B/M, h, w, 3], labels [S, M, B/M], count) -> state and metrics [S].

    Only the first `count` of the S updates are done; the metrics of the others are zero. Where the pictures live on the
    devices, `images` are picks [S, M, B/M, 4] of a fifth argument: all of them, uint8 [samples, height, width, 3].
    """
    update = partial(_update, net, plan, optimizer, schedule)

    def call(
        state: State, images: jax.Array, labels: jax.Array, count: jax.Array, *pictures: jax.Array
    ) -> tuple[State, Metrics]:
        def of_step(i: Any) -> jax.Array:
            return resident.taken(pictures[0], images[i], plan.recipe.data.image_size) if plan.resident else images[i]

        if plan.steps_per_call == 1:
            state, metrics = update(state, of_step(0), labels[0])
            return state, jax.tree.map(lambda m: m[None], metrics)

        def body(i: jax.Array, carry: tuple[State, Metrics]) -> tuple[State, Metrics]:
            state, seen = carry
            state, metrics = update(state, of_step(i), labels[i])
            return state, jax.tree.map(lambda all_, m: all_.at[i].set(m), seen, metrics)

        nothing = jnp.zeros(plan.steps_per_call, jnp.promote_types(_dtype(state), jnp.float32))
        empty = Metrics(*[nothing] * len(Metrics._fields))
        return lax.fori_loop(0, count, body, (state, empty))

    data, held = P(None, None, BATCH_AXES), _held(net, plan, optimizer)
    mapped = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(held, data, data, P(), *[P()] * plan.resident),
        out_specs=(held, P()),
        axis_names=set(ALL_AXES),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


def call_arguments(plan: Plan, mesh: Mesh) -> tuple[Any, ...]:
    """What a train call takes besides the state, as shapes."""
    everywhere, cut = NamedSharding(mesh, P()), batch_sharding(mesh, axis=2)
    size, shape = plan.recipe.data.image_size, plan.batch_shape
    labels = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=cut)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    if not plan.resident:
        return jax.ShapeDtypeStruct((*shape, size, size, 3), jnp.uint8, sharding=cut), labels, count
    picks = jax.ShapeDtypeStruct((*shape, PICK_NUMBERS), jnp.int32, sharding=cut)
    pictures = jax.ShapeDtypeStruct((plan.counts.train, size, size, 3), jnp.uint8, sharding=everywhere)
    return picks, labels, count, pictures


def learner(net: Functional, plan: Plan, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The plan's optimizer: of whole arrays, or of a device's own parts of them."""
    norms = sharded.norms if plan.summation == sharded.NAME else whole_norms
    return net.learner(optimizers.make_optimizer(plan.recipe, schedule, norms, stem=net.stem, head=net.head))


def _held(net: Functional, plan: Plan, optimizer: optax.GradientTransformation) -> Any:
    """How the state lies on the devices: the same on all, or the optimizer's cut over them."""
    if plan.summation != sharded.NAME:
        return P()
    everywhere: Any = P()
    return State(everywhere, everywhere, everywhere, sharded.specs(optimizer, net.shapes()), everywhere)


def compiler_options(plan: Plan) -> dict[str, Any]:
    """What the compiler must be told so that the program does what the plan says.

    The TPU compiler makes one sum of all buckets, which then cannot start before the backward pass has ended, unless
    told how large a sum may become.
    """
    if not plan.pod.devices or plan.pod.devices[0].platform != "tpu" or not plan.bucket_bytes:
        return {}
    return {"xla_jf_crs_combiner_threshold_in_bytes": plan.bucket_bytes}


def _update(
    net: Functional,
    plan: Plan,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    state: State,
    images: jax.Array,
    labels: jax.Array,
) -> tuple[State, Metrics]:
    """One update from this device's images [M, m, h, w, 3]."""
    recipe = plan.recipe
    local = _local_sums(net, plan, state, images, labels)
    if plan.summation == sharded.NAME:
        params, opt_state, grad_norm, moments, seen = _sharded_update(net, plan, optimizer, state, local)
    else:
        grads, moments, seen = _pod_sums(plan, local)
        with jax.named_scope(OPTIMIZER):
            updates, opt_state = optimizer.update(grads, state.optimizer, state.params)
            params = net.moved(state.params, updates)
            grad_norm = whole_norm(grads)
    stats = batch_norm.running_update(state.stats, moments, recipe.train.stats_momentum) if state.stats else {}
    average = _averaged(recipe.optimizer.average, state.average, {"params": params, "stats": stats})
    sound = jnp.isfinite(seen["loss"]) & jnp.isfinite(grad_norm)  # the same on every device: both are sums over the pod
    metrics = Metrics(
        loss=seen["loss"],
        accuracy=seen["correct"] / recipe.batch.size,
        grad_norm=grad_norm,
        learning_rate=schedule(state.step),
        skipped=(~sound).astype(seen["loss"].dtype),
    )
    new = State(state.step + 1, params, stats, opt_state, average)
    old = state._replace(step=state.step + 1)
    return jax.tree.map(lambda n, o: jnp.where(sound, n, o), new, old), metrics


def _local_sums(net: Functional, plan: Plan, state: State, images: jax.Array, labels: jax.Array) -> tuple[Tree, ...]:
    """Gradients, moments and counts summed over this device's micro-batches, as shares of the global batch's means."""
    recipe, micro_batches = plan.recipe, plan.micro_batches
    positions = plan.positions(lax.axis_index(BATCH_AXES))
    share_of_moments = 1 / (micro_batches * plan.pod.size)
    learnt, still = net.split(state.params)

    def loss_of(learnt: Tree, images: jax.Array, labels: jax.Array, positions: jax.Array) -> tuple[jax.Array, Any]:
        params = net.joined(learnt, still)
        inputs, targets = augment.prepare(recipe, images, labels, state.step, positions, plan.counts.classes)
        logits, moments = net.train(params, state.stats, inputs, plan.groups, plan.kernels)
        losses = optax.softmax_cross_entropy(logits, targets.astype(logits.dtype))
        correct = (logits.argmax(-1) == labels).sum().astype(losses.dtype)
        loss = losses.sum() / recipe.batch.size
        return loss, (jax.tree.map(lambda m: m * share_of_moments, moments), {"loss": loss, "correct": correct})

    def one(micro: tuple[jax.Array, ...]) -> tuple[Tree, ...]:
        grads, (moments, seen) = jax.grad(loss_of, has_aux=True)(learnt, *micro)
        return grads, moments, seen

    if micro_batches == 1:
        return one((images[0], labels[0], positions[0]))

    def add(sums: tuple[Tree, ...], micro: tuple[jax.Array, ...]) -> tuple[tuple[Tree, ...], None]:
        return jax.tree.map(jnp.add, sums, one(micro)), None

    shapes = jax.eval_shape(one, (images[0], labels[0], positions[0]))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    # A loop around convolutions is many times slower on CPU than the same code laid out flat.
    return lax.scan(add, zeros, (images, labels, positions), unroll=plan.pod.kind == "cpu")[0]


def _pod_sums(plan: Plan, local: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """The same summed over the pod: gradients in buckets, last layers first; the small rest beside them in float32."""
    grads, moments, seen = local
    grads = sum_tree(grads, strategy=plan.summation, payload=plan.payload, bucket_bytes=plan.bucket_bytes)
    moments, seen = sum_tree((moments, seen), strategy=plan.summation)
    return grads, moments, seen


def _sharded_update(
    net: Functional, plan: Plan, optimizer: optax.GradientTransformation, state: State, local: tuple[Tree, ...]
) -> tuple[Tree, ...]:
    """New weights and optimizer state, each device's part by itself; the gradients' norm; moments and counts."""
    grads, *rest = local
    parts = sharded.scatter(grads, plan.payload, plan.bucket_bytes)
    moments, seen = sum_tree(tuple(rest), strategy="torus")
    learnt, still = net.split(state.params)
    own = sharded.own(learnt)
    updates, opt_state = optimizer.update(parts, state.optimizer, net.joined(own, still))
    learnt = sharded.gather(optax.apply_updates(own, updates), learnt, plan.bucket_bytes)
    return net.joined(learnt, still), opt_state, global_norm(parts, sharded.norms), moments, seen


def _averaged(decay: float, average: Tree, new: Tree) -> Tree:
    if not average:
        return average
    return jax.tree.map(lambda a, n: decay * a + (1 - decay) * n, average, new)


def _dtype(state: State) -> Any:
    return jax.tree.leaves(state.params)[0].dtype


# --- evaluation --------------------------------------------------------------------------------------------------


def eval_call(net: Functional, plan: Plan, mesh: Mesh) -> Any:
    """Compiles to: (params, stats, images [E, h, w, 3], labels [E], tally) -> tally, answers [E, 3].

    Labels of -1 are padding; others below 0 are examples whose picture cannot be read: they count, and as wrong.
    """

    def call(params: Tree, stats: Tree, images: jax.Array, labels: jax.Array, tally: Tally) -> tuple[Tally, jax.Array]:
        logits = _seen(net, plan.recipe, params, stats, images, plan.kernels)
        tally = jax.tree.map(jnp.add, tally, lax.psum(_tally(logits, labels), ALL_AXES))
        return tally, _answers(logits, labels)

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


def _seen(
    net: Functional, recipe: Recipe, params: Tree, stats: Tree, images: jax.Array, kernels: str = ""
) -> jax.Array:
    """Logits of pictures, averaged over the recipe's views of them."""
    views = augment.views(images, recipe.data.eval_views)
    answers = [net.evaluate(params, stats, augment.normalize(recipe, view), kernels) for _, view in views]
    if len(answers) == 1:
        return answers[0]
    return jnp.stack([share * answer for (share, _), answer in zip(views, answers, strict=True)]).sum(0)


def empty_tally() -> Tally:
    """Nothing counted yet."""
    return Tally(*(jnp.zeros((), kind) for kind in (jnp.int32, jnp.int32, jnp.int32, jnp.float32)))


def _tally(logits: jax.Array, labels: jax.Array) -> Tally:
    target = jnp.maximum(labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    real, right = labels >= 0, jnp.isfinite(losses)  # a diverged model is right about nothing
    counted = labels != -1
    own = jnp.take_along_axis(logits, target[:, None], axis=-1)
    ahead = (logits > own) | ((logits == own) & (jnp.arange(logits.shape[-1]) < target[:, None]))
    rank = ahead.sum(-1)  # ties go to the lower class, as in argmax
    return Tally(
        examples=counted.sum(dtype=jnp.int32),
        correct=(real & right & (rank == 0)).sum(dtype=jnp.int32),
        correct_top5=(real & right & (rank < 5)).sum(dtype=jnp.int32),
        loss=jnp.where(real, losses, 0).sum().astype(jnp.float32),
    )


def _answers(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Of each example the class chosen (-1 where there is none), its probability, and that of the right class."""
    wide = jax.nn.softmax(logits.astype(jnp.float32))
    own = jnp.take_along_axis(wide, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
    answered = (labels >= 0) & jnp.isfinite(own)
    chosen = jnp.where(answered, logits.argmax(-1), -1)
    return jnp.stack([chosen.astype(jnp.float32), wide.max(-1), own], axis=1)


def predictor(net: Functional, recipe: Recipe) -> Any:
    """Compiles to: (params, stats, images uint8 [n, h, w, 3]) -> probabilities [n, classes]."""
    return jax.jit(lambda p, s, images: jax.nn.softmax(_seen(net, recipe, p, s, images)))
