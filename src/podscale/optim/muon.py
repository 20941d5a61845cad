"""Muon: kernels move along orthogonal matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Muon moves the kernel of every convolution, and of every dense layer but the head, as a matrix, along the orthogonal
matrix O nearest to its momentum, so that all directions of the kernel learn at the same rate. Here the step is a
fraction of the kernel's own norm, as in LARS, with η `trust` and β weight decay:

    w ← w − lr·(η‖w‖/‖O‖·O + βw)

With `renormalize`, the way its author trains small networks in seconds:

    w ← √outputs/‖w‖·w − lr·η·O

A kernel then keeps its norm, and moves less along directions that the Newton-Schulz iterations have not brought to full
length. All other parameters learn by SGD.

The kernels of a bfloat16 model are orthogonalized together (`newton_schulz.py`), those of other models shape by shape
(optax). Both have the same state, so that checkpoints of either are the same. Where devices share that work
(`parallel/shared_matrices.py`), each orthogonalizes its kernels one by one, in the same way.
"""

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, tree_map_with_path
from jaxtyping import Array, Float, PyTree

from podscale.optim.muon_matrices import Matrices, Stacks, count_blocks, describe_stacks, is_joint
from podscale.optim.newton_schulz import orthogonalize_jointly
from podscale.optim.norms import Norms, compute_norms
from podscale.optim.sgd import make_sgd
from podscale.parallel.shared_matrices import SharedMap
from podscale.recipe import Optimizer

Kernel: TypeAlias = Float[Array, "*inputs outputs"]


class Sharing(NamedTuple):
    """How devices share the orthogonalization.

    Args:
        shapes: of all parameters, by name; a device may hold only a part of each array.
        map: computes a function of every matrix, each on one device.
    """

    shapes: dict[str, tuple[int, ...]]
    map: SharedMap


def make_muon(
    settings: Optimizer,
    learning_rate: optax.ScalarOrSchedule,
    precision: str = "float32",
    *,
    head: str = "",
    norms: Norms | None = None,
    sharing: Sharing | None = None,
) -> optax.GradientTransformation:
    """Return Muon for the kernels of convolutions and dense layers, and SGD for all other parameters.

    Args:
        settings: the recipe's section `optimizer`.
        learning_rate: a number, or a function of the step.
        precision: the model's; kernels of a bfloat16 model are orthogonalized together.
        head: path of the last layer, which SGD updates; if it is not known, SGD updates all dense layers.
        norms: the norms of whole arrays, from the part of each that a device holds; None: devices hold whole arrays.
        sharing: how devices share the work; None: every device orthogonalizes every kernel.
    """
    matrices = Matrices(head, sharing.shapes if sharing and norms else None)
    orthogonalize = _scale_by_muon(settings, precision, matrices, sharing)
    rate = optax.scale_by_learning_rate(learning_rate)
    if settings.renormalize:
        kernels = optax.chain(orthogonalize, optax.scale(settings.trust), rate, _renormalize(matrices, norms))
    else:
        kernels = optax.chain(
            orthogonalize,
            _scale_to_weight_norm(settings, norms),
            optax.add_decayed_weights(settings.weight_decay),
            rate,
        )
    return optax.partition({True: kernels, False: make_fallback(settings, learning_rate)}, matrices.label)


def make_fallback(settings: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Return the SGD of parameters that Muon does not update, with a momentum of its own if the recipe has one."""
    return make_sgd(replace(settings, momentum=settings.rest_momentum or settings.momentum), learning_rate)


# --- orthogonalization -----------------------------------------------------------------------------------------------


def _scale_by_muon(
    settings: Optimizer, precision: str, matrices: Matrices, sharing: Sharing | None
) -> optax.GradientTransformation:
    """Return the transformation from gradients of kernels to orthogonal matrices along their momentum.

    Its state is optax's, with the momentum of all kernels of one shape as one stack.
    """
    steps = settings.newton_schulz
    empty = optax.contrib.scale_by_muon(ns_steps=steps)

    def update(gradients: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        momentum, state = _update_momentum(settings, matrices.stack(gradients), state)
        joint = is_joint(momentum, precision)
        if sharing:
            kinds = describe_stacks({name: len(stack) for name, stack in momentum.items()}, steps, precision)
            results = sharing.map(partial(_orthogonalize_matrix, steps, joint), momentum, kinds)
        else:
            results = (_orthogonalize_jointly if joint else _orthogonalize_by_shape)(momentum, steps)
        return matrices.unstack(results, gradients), state

    return optax.GradientTransformation(lambda params: empty.init(matrices.stack(params)), update)


def _update_momentum(settings: Optimizer, gradients: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Return the momentum to move along, and the new state: what optax's Muon computes before it orthogonalizes."""
    beta, count = settings.momentum, optax.safe_increment(state.count)
    mean = optax.tree.update_moment(gradients, state.mu, beta, 1)
    state = state._replace(count=count, mu=mean)
    if not settings.nesterov:
        return optax.tree.bias_correction(mean, beta, count), state
    ahead = optax.tree.bias_correction(mean, beta, optax.safe_increment(count))
    now = optax.tree.bias_correction(gradients, beta, count)
    return jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now), state


def _orthogonalize_matrix(steps: int, joint: bool, name: str, kernel: Kernel) -> Kernel:
    """Return one kernel of a stack, orthogonalized as all of them would be together."""
    function = _orthogonalize_jointly if joint else _orthogonalize_by_shape
    return function({name: kernel[None]}, steps)[name][0]


def _orthogonalize_by_shape(stacks: Stacks, steps: int) -> Stacks:
    """Return orthogonal matrices for kernels [kernel, ..., outputs], a stack at a time, by optax."""
    split = {name: _split_outputs(name, stack) for name, stack in stacks.items()}
    rule = optax.contrib.scale_by_muon(  # with no memory: a momentum that was computed before
        ns_steps=steps, beta=0.0, nesterov=False, weight_dimension_numbers=partial(jax.tree.map, _describe_as_matrices)
    )
    results = rule.update(split, rule.init(split))[0]
    return {name: results[name].reshape(stack.shape) for name, stack in stacks.items()}


def _orthogonalize_jointly(stacks: Stacks, steps: int) -> Stacks:
    """Return the same for kernels of a bfloat16 model, all shapes at once, by `newton_schulz.py`."""
    results = orthogonalize_jointly([_list_matrices(name, stack) for name, stack in stacks.items()], steps)
    return {
        name: _join_outputs(name, result).reshape(stack.shape)
        for (name, stack), result in zip(stacks.items(), results, strict=True)
    }


def _list_matrices(name: str, stack: Float[Array, "kernels *inputs outputs"]) -> Float[Array, "matrices rows columns"]:
    """Return a stack's kernels as matrices; those of one kernel, side by side, become consecutive ones."""
    blocks = count_blocks(name)
    if blocks == 1:
        return stack.reshape(len(stack), -1, stack.shape[-1])
    split = jnp.moveaxis(_split_outputs(name, stack), -2, 1)
    return split.reshape(-1, *split.shape[2:])


def _join_outputs(name: str, matrices: Float[Array, "matrices rows columns"]) -> Float[Array, "..."]:
    """Return matrices with those of one kernel side by side, the inverse of `_list_matrices`."""
    blocks = count_blocks(name)
    return matrices if blocks == 1 else jnp.moveaxis(matrices.reshape(-1, blocks, *matrices.shape[1:]), 1, -2)


def _split_outputs(name: str, stack: Float[Array, "kernels *inputs outputs"]) -> Float[Array, "..."]:
    """Return a stack whose kernels hold several matrices side by side as [kernel, ..., matrix, outputs]."""
    blocks = count_blocks(name)
    return stack if blocks == 1 else stack.reshape(*stack.shape[:-1], blocks, -1)


def _describe_as_matrices(stack: Float[Array, "..."]) -> optax.contrib.MuonDimensionNumbers:
    """Describe [kernel, height, width, inputs, outputs] or [kernel, inputs, (matrix,) outputs] as matrices."""
    reduction = (1, 2, 3) if stack.ndim == 5 else (1,)
    return optax.contrib.MuonDimensionNumbers(reduction, stack.ndim - 1)


# --- length of the step ----------------------------------------------------------------------------------------------


def _scale_to_weight_norm(settings: Optimizer, norms: Norms | None) -> optax.GradientTransformation:
    """Replace u by η‖w‖/‖u‖·u."""

    def update(updates: PyTree, params: PyTree) -> PyTree:
        def scale(u: Kernel, u_norm: Float[Array, ""], w_norm: Float[Array, ""]) -> Kernel:
            return u * (settings.trust * w_norm / jnp.maximum(u_norm, 1e-12)).astype(u.dtype)

        of_all = norms or compute_norms
        return jax.tree.map(scale, updates, *of_all((updates, params)))

    return optax.stateless(update)


def _renormalize(matrices: Matrices, norms: Norms | None) -> optax.GradientTransformation:
    """Replace u by the update that leads from w to √outputs/‖w‖·w + u."""

    def update(updates: PyTree, params: PyTree) -> PyTree:
        def add_correction(path: KeyPath, u: Kernel, w: Kernel, w_norm: Float[Array, ""]) -> Kernel:
            outputs = matrices.get_outputs(path, w)
            return u + w * (math.sqrt(outputs) / jnp.maximum(w_norm, 1e-12) - 1).astype(w.dtype)

        of_all = norms or compute_norms
        return tree_map_with_path(add_correction, updates, params, of_all(params))

    return optax.stateless(update)
