"""From a recipe to an update: learning-rate schedules and optimizers, as optax transformations.

LARS (You, Gitman, Ginsburg 2017, arXiv 1708.03888, section 4) gives every layer a learning rate of its own, in
proportion to ‖w‖/‖g‖, the *trust ratio*. Its published forms differ in where the trust ratio, the weight decay and
the learning rate meet the momentum; with g the gradient, w the weights, β weight decay, μ momentum, η `trust`:

    mlperf   v ← μv + lr·trust·(g + βw)    w ← w − v             trust = η‖w‖ / (‖g‖ + β‖w‖ + ε)
    scaled   m ← μm + g                    w ← w − lr·trust·m    the same trust; β occurs nowhere else
    optax    v ← μv + lr·trust·(g + βw)    w ← w − v             trust = η‖w‖ / (‖g + βw‖ + ε)

`mlperf` is algorithm 1 of the paper and the form of MLPerf's reference; `scaled` is that of TensorFlow's first
implementation. But for weight decay they agree while learning rate and trust ratio stand still: in `mlperf` the
momentum remembers the rates it was made with, in `scaled` a new rate acts on all of it at once. The trust ratio is 1
where ‖w‖ or ‖g‖ is 0 (`optax`: where ‖w‖ or ‖g + βw‖ is 0).

Parameters whose last name is in `optimizer.skip` (biases and batch-norm scales) have neither weight decay nor trust
ratio: the plain learning rate, with momentum.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) moves every convolution's kernel, as a matrix, along the
nearest orthogonal matrix to its momentum, so that all of its directions learn at the same rate. Here the step is a
share of the kernel's own norm, as in LARS: w ← w − lr·(η‖w‖/‖O‖·O + βw). All else learns by SGD. With `renormalize`,
as its author trains small networks in seconds, w ← √outputs/‖w‖·w − lr·η·O: a kernel keeps its norm, and moves less
along directions that Newton and Schulz's steps have not brought to full length.

Biases, the head and the first layer may have learning rates of their own (`schedule.bias_peak` and so on).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, keystr, tree_map_with_path

from podscale.errors import UserError
from podscale.fields import add_choice
from podscale.recipe import Optimizer, Recipe

# --- schedules ---------------------------------------------------------------------------------------------------


def schedule(recipe: Recipe, steps: int, steps_per_epoch: float) -> optax.Schedule:
    """The learning rate as a function of the step: linear warm-up from 0 to the peak, then decay.

    The peak grows with the batch if `schedule.scale_batch` is set: the linear scaling rule with gradual warm-up of
    Goyal et al. 2017 (arXiv 1706.02677), sections 2.1 and 2.2. Polynomial and cosine decay reach `schedule.end` at
    `steps`.

    >>> from podscale.recipe import Recipe, override
    >>> rate = schedule(override(Recipe(), {"schedule.peak": 4, "schedule.warmup_epochs": 2}), 50, steps_per_epoch=5)
    >>> [round(float(rate(step)), 4) for step in (0, 5, 10, 30, 50)]
    [0.0, 2.0, 4.0, 1.0001, 0.0001]
    """
    wanted = recipe.schedule
    peak = wanted.peak * (recipe.batch.size / wanted.scale_batch if wanted.scale_batch else 1)
    warmup = wanted.warmup_epochs * steps_per_epoch
    milestones = jnp.asarray([epoch * steps_per_epoch for epoch in wanted.milestones], float)

    def decayed(step: jax.Array) -> jax.Array:
        left = 1 - jnp.clip((step - warmup) / max(steps - warmup, 1), 0, 1)
        match wanted.decay:
            case "polynomial":
                return wanted.end + (peak - wanted.end) * left**wanted.power
            case "cosine":
                return wanted.end + (peak - wanted.end) * (1 - jnp.cos(math.pi * left)) / 2
            case "step":
                return peak * wanted.factor ** jnp.sum(step >= milestones, dtype=float)
            case "constant":
                return jnp.full_like(step, peak)

    def rate(step: Any) -> jax.Array:
        step = jnp.asarray(step, float)  # float32, or float64 in JAX's 64-bit mode
        return jnp.where(step < warmup, peak * step / max(warmup, 1), decayed(step))

    return rate


Norms = Callable[[Any], Any]  # a tree of arrays -> the tree of their norms


def whole_norms(tree: Any) -> Any:
    """The norm of every array, in float32 or wider."""
    return jax.tree.map(_norm, tree)


# --- optimizers --------------------------------------------------------------------------------------------------


def optimizer(
    recipe: Recipe,
    learning_rate: optax.ScalarOrSchedule,
    norms: Norms = whole_norms,
    *,
    stem: str = "",
    head: str = "",
) -> optax.GradientTransformation:
    """The recipe's update rule. Its state is a tree of arrays; momentum has the shape and dtype of its parameter.

    `norms` replaces the one thing that an update rule here does with an array as a whole. `stem` and `head` are where
    the model's first and last layers stand among the parameters, such as `layers.0`.
    """
    wanted, rates = recipe.optimizer, _rates(recipe, learning_rate, stem, head)
    rules = {kind: _rule(wanted, kind, rate, norms) for kind, rate in rates.items()}
    rule = rules[REST] if len(rules) == 1 else optax.partition(rules, partial(_kinds, wanted, set(rules), stem, head))
    return optax.chain(_clipped(wanted.clip_norm, norms), rule) if wanted.clip_norm else rule


def _rule(wanted: Optimizer, kind: str, rate: optax.ScalarOrSchedule, norms: Norms) -> optax.GradientTransformation:
    """The update rule for parameters of one kind."""
    match wanted.name:
        case "lars":
            return _lars(wanted, rate, norms)
        case "sgd":
            return _sgd(wanted, rate)
        case "adamw":
            return _adamw(wanted, rate)
        case "muon" if norms is whole_norms:
            return _muon(wanted, rate) if kind.startswith(REST) else _left_by_muon(wanted, rate)
        case name:
            if norms is not whole_norms:
                raise UserError(f"plan.summation sharded gives every device a part of each array; {name} may need all")
            return RULES[name](wanted, rate)


# --- kinds of parameters with learning rates of their own ---

REST, BIAS, HEAD, OF_STEM = "rest", "bias", "head", " of the stem"


def _rates(
    recipe: Recipe, learning_rate: optax.ScalarOrSchedule, stem: str, head: str
) -> dict[str, optax.ScalarOrSchedule]:
    """The learning rate of each kind of parameters that has one."""
    wanted, rates = recipe.schedule, {REST: learning_rate}
    for kind, peak in ((BIAS, wanted.bias_peak), (HEAD, wanted.head_peak)):
        if peak:
            rates[kind] = _times(learning_rate, peak / wanted.peak)
    for field, place in (("stem_epochs", stem), ("head_peak", head)):
        if getattr(wanted, field) and not place:
            raise UserError(f"schedule.{field} needs a model with a list of `layers`, or a `stem` and a `head`")
    if wanted.stem_epochs:
        sooner = max(1.0, recipe.train.epochs / wanted.stem_epochs)
        rates |= {kind + OF_STEM: _sooner(rate, sooner) for kind, rate in rates.items()}
    return rates


def _kinds(wanted: Optimizer, known: set[str], stem: str, head: str, params: Any) -> Any:
    """A tree like `params`: of which kind each is."""

    def kind(path: tuple[Any, ...], _: Any) -> str:
        name = keystr(path, simple=True, separator=".")
        of_stem = OF_STEM if name.startswith(f"{stem}.") and REST + OF_STEM in known else ""
        if _last_name(path) in wanted.skip and BIAS in known:
            return BIAS + of_stem
        return (HEAD if name.startswith(f"{head}.") and HEAD in known else REST) + of_stem

    return tree_map_with_path(kind, params)


def _times(rate: optax.ScalarOrSchedule, factor: float) -> optax.ScalarOrSchedule:
    return (lambda step: factor * rate(step)) if callable(rate) else factor * rate


def _sooner(rate: optax.ScalarOrSchedule, factor: float) -> optax.ScalarOrSchedule:
    """The same rates, so many times earlier; what comes after the last is the last."""
    return (lambda step: rate(factor * jnp.asarray(step, float))) if callable(rate) else rate


def global_norm(tree: Any, norms: Norms = whole_norms) -> jax.Array:
    """The norm of all arrays of a tree together."""
    return jnp.linalg.norm(jnp.stack(jax.tree.leaves(norms(tree))))


def whole_norm(tree: Any) -> jax.Array:
    """The same of whole arrays. The small ones are joined first, which spares a GPU a hundred tiny kernels."""
    leaves = jax.tree.leaves(tree)
    small = [leaf.ravel() for leaf in leaves if leaf.ndim < 2]
    return global_norm([leaf for leaf in leaves if leaf.ndim > 1] + ([jnp.concatenate(small)] if small else []))


def _clipped(most: float, norms: Norms) -> optax.GradientTransformation:
    """Gradients scaled down where their norm, all together, is more than `most` (Pascanu et al. 2012, 1211.5063)."""

    def update(gradients: Any, params: Any) -> Any:
        scale = most / jnp.maximum(global_norm(gradients, norms), most)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)

    return optax.stateless(update)


OWN = ("lars", "sgd", "adamw", "muon")
Rule = Callable[[Optimizer, optax.ScalarOrSchedule], optax.GradientTransformation]


def register(name: str) -> Callable[[Rule], Rule]:
    """Makes the decorated rule available to recipes under `name`: from the recipe's section and the learning rate, a
    transformation whose state is a tree of arrays."""

    def add(rule: Rule) -> Rule:
        if name in RULES or name in OWN:
            raise UserError(f"there is already an optimizer {name!r}; choose another name")
        RULES[name] = rule
        add_choice("optimizer.name", name)
        return rule

    return add


def adapted(params: Any, skip: tuple[str, ...]) -> Any:
    """A tree like `params`: False where the parameter's last name is in `skip`, else True.

    >>> adapted({"conv": {"kernel": 1.0, "bias": 2.0}}, skip=("bias", "scale"))
    {'conv': {'bias': False, 'kernel': True}}
    """
    return tree_map_with_path(lambda path, _: _last_name(path) not in skip, params)


def _last_name(path: tuple[Any, ...]) -> str:
    if path and path[-1] == GetAttrKey("value"):  # the array inside a flax Variable; its name is the one before
        path = path[:-1]
    return keystr(path[-1:], simple=True)


def _mask(wanted: Optimizer) -> Callable[[Any], Any]:
    return lambda params: adapted(params, wanted.skip)


def _sgd(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(wanted.weight_decay, _mask(wanted)),
        optax.sgd(learning_rate, wanted.momentum, wanted.nesterov),
    )


def _adamw(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    return optax.adamw(
        learning_rate,
        b1=wanted.momentum,
        b2=wanted.second_moment,
        eps=wanted.epsilon or 1e-8,  # with 0, a parameter that has had no gradient yet would become 0/0
        weight_decay=wanted.weight_decay,
        mask=_mask(wanted),
        nesterov=wanted.nesterov,
    )


def _muon(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    along = _alike_at_once(
        optax.contrib.scale_by_muon(
            ns_steps=wanted.newton_schulz,
            beta=wanted.momentum,
            nesterov=wanted.nesterov,
            weight_dimension_numbers=_as_matrices,
        )
    )
    rate = optax.scale_by_learning_rate(learning_rate)
    if wanted.renormalize:
        kernels = optax.chain(along, optax.scale(wanted.trust), rate, _renormalized())
    else:
        kernels = optax.chain(along, _shares_of_weights(wanted), optax.add_decayed_weights(wanted.weight_decay), rate)
    return optax.partition({True: kernels, False: _left_by_muon(wanted, learning_rate)}, _convolutions)


def _left_by_muon(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    return _sgd(replace(wanted, momentum=wanted.rest_momentum or wanted.momentum), learning_rate)


def _convolutions(params: Any) -> Any:
    return jax.tree.map(lambda w: w.ndim == 4, params)


def _as_matrices(params: Any) -> Any:
    """Stacks of kernels [kernel, height, width, inputs, outputs] as matrices [height·width·inputs, outputs]."""
    return jax.tree.map(lambda w: optax.contrib.MuonDimensionNumbers((1, 2, 3), 4), params)


def _alike_at_once(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The rule, told of one stack for each shape of arrays: a few small matrices at once keep a GPU busier."""

    def stacked(tree: Any) -> dict[str, jax.Array]:
        alike: dict[str, list[jax.Array]] = {}
        for leaf in jax.tree.leaves(tree):
            alike.setdefault(_shape_name(leaf), []).append(leaf)
        return {name: jnp.stack(leaves) for name, leaves in alike.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        stacks, state = rule.update(stacked(updates), state)
        rows = {name: iter(stack) for name, stack in stacks.items()}
        return jax.tree.map(lambda leaf: next(rows[_shape_name(leaf)]), updates), state

    return optax.GradientTransformation(lambda params: rule.init(stacked(params)), update)


def _shape_name(array: jax.Array) -> str:
    return "x".join(map(str, array.shape))


def _shares_of_weights(wanted: Optimizer) -> optax.GradientTransformation:
    """u becomes η‖w‖/‖u‖·u."""

    def update(updates: Any, params: Any) -> Any:
        def one(u: jax.Array, w: jax.Array) -> jax.Array:
            return u * (wanted.trust * _norm(w) / jnp.maximum(_norm(u), 1e-12)).astype(u.dtype)

        return jax.tree.map(one, updates, params)

    return optax.stateless(update)


def _renormalized() -> optax.GradientTransformation:
    """u becomes what leads from w to √outputs/‖w‖·w + u."""

    def update(updates: Any, params: Any) -> Any:
        def one(u: jax.Array, w: jax.Array) -> jax.Array:
            return u + w * (math.sqrt(w.shape[-1]) / jnp.maximum(_norm(w), 1e-12) - 1).astype(w.dtype)

        return jax.tree.map(one, updates, params)

    return optax.stateless(update)


def _lars(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule, norms: Norms) -> optax.GradientTransformation:
    match wanted.form:
        case "mlperf":
            return optax.chain(
                _trusted_gradient(wanted, norms),
                optax.scale_by_learning_rate(learning_rate),
                optax.trace(wanted.momentum),
            )
        case "scaled":
            return optax.chain(_trusted_momentum(wanted, norms), optax.scale_by_learning_rate(learning_rate))
        case "optax":
            # optax.lars, part by part, with norms that may be of more than what is here.
            return optax.chain(
                optax.add_decayed_weights(wanted.weight_decay, _mask(wanted)),
                optax.masked(_trusted_update(wanted, norms), _mask(wanted)),
                optax.scale_by_learning_rate(learning_rate),
                optax.trace(wanted.momentum),
            )


def _trusted_gradient(wanted: Optimizer, norms: Norms) -> optax.GradientTransformation:
    """g becomes trust·(g + βw)."""

    def update(gradients: Any, params: Any) -> Any:
        def one(adapt: bool, g: jax.Array, w: jax.Array, g_norm: jax.Array, w_norm: jax.Array) -> jax.Array:
            return (g + wanted.weight_decay * w) * _trust(wanted, g_norm, w_norm).astype(g.dtype) if adapt else g

        return jax.tree.map(one, adapted(params, wanted.skip), gradients, params, *norms((gradients, params)))

    return optax.stateless(update)


def _trusted_update(wanted: Optimizer, norms: Norms) -> optax.GradientTransformation:
    """u becomes trust·u, with η‖w‖/(‖u‖ + ε) for trust."""

    def update(updates: Any, params: Any) -> Any:
        def one(u: jax.Array, u_norm: jax.Array, w_norm: jax.Array) -> jax.Array:
            nothing = (u_norm == 0) | (w_norm == 0)
            trust = wanted.trust * w_norm / jnp.where(nothing, 1, u_norm + wanted.epsilon)
            return u * jnp.where(nothing, 1, trust).astype(u.dtype)

        return jax.tree.map(one, updates, *norms((updates, params)))

    return optax.stateless(update)


def _trusted_momentum(wanted: Optimizer, norms: Norms) -> optax.GradientTransformation:
    """g becomes trust·m, with m ← μm + g; the trust ratio is that of g."""
    momentum = optax.trace(wanted.momentum)

    def update(gradients: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
        def one(adapt: bool, m: jax.Array, g_norm: jax.Array, w_norm: jax.Array) -> jax.Array:
            return m * _trust(wanted, g_norm, w_norm).astype(m.dtype) if adapt else m

        moved, state = momentum.update(gradients, state, params)
        return jax.tree.map(one, adapted(params, wanted.skip), moved, *norms((gradients, params))), state

    return optax.GradientTransformation(momentum.init, update)


def _trust(wanted: Optimizer, g_norm: jax.Array, w_norm: jax.Array) -> jax.Array:
    """The trust ratio; 1 where a norm is 0, or such a parameter would never move."""
    nothing = (g_norm == 0) | (w_norm == 0)
    denominator = jnp.where(nothing, 1, g_norm + wanted.weight_decay * w_norm + wanted.epsilon)
    return jnp.where(nothing, 1, wanted.trust * w_norm / denominator)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x.astype(jnp.promote_types(x.dtype, jnp.float32)).ravel())


RULES: dict[str, Rule] = {}  # those that were registered
