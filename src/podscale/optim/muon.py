"""Muon: convolution kernels move along orthogonal matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Muon moves the kernel of every convolution, as a matrix, along the orthogonal matrix O nearest to its momentum, so that
all directions of the kernel learn at the same rate. Here the step is a fraction of the kernel's own norm, as in LARS,
with η `trust` and β weight decay:

    w ← w − lr·(η‖w‖/‖O‖·O + βw)

With `renormalize`, the way its author trains small networks in seconds:

    w ← √outputs/‖w‖·w − lr·η·O

A kernel then keeps its norm, and moves less along directions that the Newton-Schulz iterations have not brought to full
length. All other parameters learn by SGD.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podscale.optim.norms import compute_norm
from podscale.optim.sgd import make_sgd
from podscale.recipe import Optimizer


def make_muon(settings: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Return Muon for the kernels of convolutions and SGD for all other parameters."""
    orthogonalize = _batch_by_shape(
        optax.contrib.scale_by_muon(
            ns_steps=settings.newton_schulz,
            beta=settings.momentum,
            nesterov=settings.nesterov,
            weight_dimension_numbers=_describe_as_matrices,
        )
    )
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


def _label_convolutions(params: Any) -> Any:
    return jax.tree.map(lambda w: w.ndim == 4, params)


# --- orthogonalization -----------------------------------------------------------------------------------------------


def _describe_as_matrices(params: Any) -> Any:
    """Describe stacks [kernel, height, width, inputs, outputs] as matrices [height·width·inputs, outputs]."""
    return jax.tree.map(lambda w: optax.contrib.MuonDimensionNumbers((1, 2, 3), 4), params)


def _batch_by_shape(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `rule` to one stack of arrays per shape: several small matrices at once keep a GPU busier."""

    def stack(tree: Any) -> dict[str, jax.Array]:
        by_shape: dict[str, list[jax.Array]] = {}
        for leaf in jax.tree.leaves(tree):
            by_shape.setdefault(_format_shape(leaf), []).append(leaf)
        return {name: jnp.stack(leaves) for name, leaves in by_shape.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        stacks, state = rule.update(stack(updates), state)
        rows = {name: iter(arrays) for name, arrays in stacks.items()}
        return jax.tree.map(lambda leaf: next(rows[_format_shape(leaf)]), updates), state

    return optax.GradientTransformation(lambda params: rule.init(stack(params)), update)


def _format_shape(array: jax.Array) -> str:
    """Return a shape as a key of the optimizer's state, such as "3x3x64x64"; checkpoints hold these keys."""
    return "x".join(map(str, array.shape))


# --- length of the step ----------------------------------------------------------------------------------------------


def _scale_to_weight_norm(settings: Optimizer) -> optax.GradientTransformation:
    """Replace u by η‖w‖/‖u‖·u."""

    def update(updates: Any, params: Any) -> Any:
        def scale(u: jax.Array, w: jax.Array) -> jax.Array:
            return u * (settings.trust * compute_norm(w) / jnp.maximum(compute_norm(u), 1e-12)).astype(u.dtype)

        return jax.tree.map(scale, updates, params)

    return optax.stateless(update)


def _renormalize() -> optax.GradientTransformation:
    """Replace u by the update that leads from w to √outputs/‖w‖·w + u."""

    def update(updates: Any, params: Any) -> Any:
        def add_correction(u: jax.Array, w: jax.Array) -> jax.Array:
            return u + w * (math.sqrt(w.shape[-1]) / jnp.maximum(compute_norm(w), 1e-12) - 1).astype(w.dtype)

        return jax.tree.map(add_correction, updates, params)

    return optax.stateless(update)
