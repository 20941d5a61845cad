"""Muon: convolution kernels move along orthogonal matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Muon moves the kernel of every convolution, as a matrix, along the orthogonal matrix O nearest to its momentum, so that
all directions of the kernel learn at the same rate. Here the step is a fraction of the kernel's own norm, as in LARS,
with η `trust` and β weight decay:

    w ← w − lr·(η‖w‖/‖O‖·O + βw)

With `renormalize`, the way its author trains small networks in seconds:

    w ← √outputs/‖w‖·w − lr·η·O

A kernel then keeps its norm, and moves less along directions that the Newton-Schulz iterations have not brought to full
length. All other parameters learn by SGD.

The small kernels of a bfloat16 model are orthogonalized together (`newton_schulz.py`), those of other models shape by
shape (optax). Both have the same state, so that checkpoints of either are the same.
"""

import math
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from podscale.optim.newton_schulz import can_orthogonalize_jointly, orthogonalize_jointly
from podscale.optim.norms import compute_norm, compute_norm_unflattened
from podscale.optim.sgd import make_sgd
from podscale.recipe import Optimizer

Kernel: TypeAlias = Float[Array, "height width inputs outputs"]
Stacks: TypeAlias = dict[str, Float[Array, "_kernels _height _width _inputs _outputs"]]  # by shape


def make_muon(
    settings: Optimizer, learning_rate: optax.ScalarOrSchedule, precision: str = "float32"
) -> optax.GradientTransformation:
    """Return Muon for the kernels of convolutions and SGD for all other parameters.

    Args:
        settings: the recipe's section `optimizer`.
        learning_rate: a number, or a function of the step.
        precision: the model's; small kernels of a bfloat16 model are orthogonalized together.
    """
    orthogonalize = _scale_by_muon(settings, precision)
    rate = optax.scale_by_learning_rate(learning_rate)
    if settings.renormalize:
        kernels = optax.chain(orthogonalize, optax.scale(settings.trust), rate, _renormalize())
    else:
        kernels = optax.chain(
            orthogonalize, _scale_to_weight_norm(settings), optax.add_decayed_weights(settings.weight_decay), rate
        )
    return optax.partition({True: kernels, False: make_fallback(settings, learning_rate)}, _label_convolutions)


def make_fallback(settings: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Return the SGD of parameters that Muon does not update, with a momentum of its own if the recipe has one."""
    return make_sgd(replace(settings, momentum=settings.rest_momentum or settings.momentum), learning_rate)


def _label_convolutions(params: PyTree) -> PyTree:
    return jax.tree.map(lambda w: w.ndim == 4, params)


# --- orthogonalization -----------------------------------------------------------------------------------------------


def _scale_by_muon(settings: Optimizer, precision: str) -> optax.GradientTransformation:
    """Return the transformation from gradients of kernels to orthogonal matrices along their momentum.

    Its state is optax's, with the momentum of all kernels of one shape as one stack.
    """
    rule = optax.contrib.scale_by_muon(
        ns_steps=settings.newton_schulz,
        beta=settings.momentum,
        nesterov=settings.nesterov,
        weight_dimension_numbers=_describe_as_matrices,
    )

    def update(gradients: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        shapes = [leaf.shape for leaf in jax.tree.leaves(gradients)]
        if can_orthogonalize_jointly(shapes, precision):
            momentum, state = _update_momentum(settings, _stack_by_shape(gradients), state)
            kernels, structure = jax.tree.flatten(_unstack(momentum, gradients))
            return jax.tree.unflatten(structure, orthogonalize_jointly(kernels, settings.newton_schulz)), state
        stacks, state = rule.update(_stack_by_shape(gradients), state)
        return _unstack(stacks, gradients), state

    return optax.GradientTransformation(lambda params: rule.init(_stack_by_shape(params)), update)


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


def _describe_as_matrices(params: PyTree) -> PyTree:
    """Describe stacks [kernel, height, width, inputs, outputs] as matrices [height·width·inputs, outputs]."""
    return jax.tree.map(lambda w: optax.contrib.MuonDimensionNumbers((1, 2, 3), 4), params)


def _stack_by_shape(tree: PyTree) -> Stacks:
    """Return one stack of arrays per shape: several small matrices at once keep a GPU busier."""
    by_shape: dict[str, list[Float[Array, "*shape"]]] = {}
    for leaf in jax.tree.leaves(tree):
        by_shape.setdefault(_format_shape(leaf), []).append(leaf)
    return {name: jnp.stack(leaves) for name, leaves in by_shape.items()}


def _unstack(stacks: Stacks, like: PyTree) -> PyTree:
    """Return the arrays of stacks as a tree like the one that `_stack_by_shape` stacked."""
    rows = {name: iter(arrays) for name, arrays in stacks.items()}
    return jax.tree.map(lambda leaf: next(rows[_format_shape(leaf)]), like)


def _format_shape(array: Float[Array, "..."]) -> str:
    """Return a shape as a key of the optimizer's state, such as "3x3x64x64"; checkpoints hold these keys."""
    return "x".join(map(str, array.shape))


# --- length of the step ----------------------------------------------------------------------------------------------


def _scale_to_weight_norm(settings: Optimizer) -> optax.GradientTransformation:
    """Replace u by η‖w‖/‖u‖·u."""

    def update(updates: PyTree, params: PyTree) -> PyTree:
        def scale(u: Kernel, w: Kernel) -> Kernel:
            return u * (settings.trust * compute_norm(w) / jnp.maximum(compute_norm(u), 1e-12)).astype(u.dtype)

        return jax.tree.map(scale, updates, params)

    return optax.stateless(update)


def _renormalize() -> optax.GradientTransformation:
    """Replace u by the update that leads from w to √outputs/‖w‖·w + u."""

    def update(updates: PyTree, params: PyTree) -> PyTree:
        def add_correction(u: Kernel, w: Kernel) -> Kernel:
            return u + w * (math.sqrt(w.shape[-1]) / jnp.maximum(compute_norm_unflattened(w), 1e-12) - 1).astype(
                w.dtype
            )

        return jax.tree.map(add_correction, updates, params)

    return optax.stateless(update)
