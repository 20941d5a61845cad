"""Muon."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podscale.optim.norms import norm
from podscale.optim.sgd import make_sgd
from podscale.recipe import Optimizer


def make_muon(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    along = _batch_by_shape(
        optax.contrib.scale_by_muon(
            ns_steps=wanted.newton_schulz,
            beta=wanted.momentum,
            nesterov=wanted.nesterov,
            weight_dimension_numbers=_as_matrices,
        )
    )
    rate = optax.scale_by_learning_rate(learning_rate)
    if wanted.renormalize:
        kernels = optax.chain(along, optax.scale(wanted.trust), rate, _renormalize())
    else:
        kernels = optax.chain(
            along, _scale_to_weight_norm(wanted), optax.add_decayed_weights(wanted.weight_decay), rate
        )
    return optax.partition({True: kernels, False: make_fallback(wanted, learning_rate)}, _is_convolution)


def make_fallback(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    return make_sgd(replace(wanted, momentum=wanted.rest_momentum or wanted.momentum), learning_rate)


def _is_convolution(params: Any) -> Any:
    return jax.tree.map(lambda w: w.ndim == 4, params)


def _as_matrices(params: Any) -> Any:
    """Stacks of kernels [kernel, height, width, inputs, outputs] as matrices [height·width·inputs, outputs]."""
    return jax.tree.map(lambda w: optax.contrib.MuonDimensionNumbers((1, 2, 3), 4), params)


def _batch_by_shape(rule: optax.GradientTransformation) -> optax.GradientTransformation:
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


def _scale_to_weight_norm(wanted: Optimizer) -> optax.GradientTransformation:
    """u becomes η‖w‖/‖u‖·u."""

    def update(updates: Any, params: Any) -> Any:
        def one(u: jax.Array, w: jax.Array) -> jax.Array:
            return u * (wanted.trust * norm(w) / jnp.maximum(norm(u), 1e-12)).astype(u.dtype)

        return jax.tree.map(one, updates, params)

    return optax.stateless(update)


def _renormalize() -> optax.GradientTransformation:
    """u becomes what leads from w to √outputs/‖w‖·w + u."""

    def update(updates: Any, params: Any) -> Any:
        def one(u: jax.Array, w: jax.Array) -> jax.Array:
            return u + w * (math.sqrt(w.shape[-1]) / jnp.maximum(norm(w), 1e-12) - 1).astype(w.dtype)

        return jax.tree.map(one, updates, params)

    return optax.stateless(update)
