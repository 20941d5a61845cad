"""LARS: layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv 1708.03888, section 4).

LARS gives every layer a learning rate of its own, in proportion to ‖w‖/‖g‖, the *trust ratio*. Its published forms
differ in where the trust ratio, the weight decay and the learning rate meet the momentum; with g the gradient, w the
weights, β weight decay, μ momentum, η `trust`:

    mlperf   v ← μv + lr·trust·(g + βw)    w ← w − v             trust = η‖w‖ / (‖g‖ + β‖w‖ + ε)
    scaled   m ← μm + g                    w ← w − lr·trust·m    the same trust; β occurs nowhere else
    optax    v ← μv + lr·trust·(g + βw)    w ← w − v             trust = η‖w‖ / (‖g + βw‖ + ε)

`mlperf` is algorithm 1 of the paper and the form of MLPerf's reference; `scaled` is that of TensorFlow's first
implementation. Apart from weight decay, the two agree while learning rate and trust ratio are constant: in `mlperf` the
momentum remembers the rates it was accumulated with, in `scaled` a new rate acts on all of it at once. The trust ratio
is 1 where ‖w‖ or ‖g‖ is 0 (`optax`: where ‖w‖ or ‖g + βw‖ is 0).

Parameters whose last name is in `optimizer.skip` (biases and batch-norm scales) have neither weight decay nor trust
ratio: they have the plain learning rate, with momentum.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from podscale.optim.norms import Norms
from podscale.optim.parameter_groups import make_mask, mask_skipped
from podscale.recipe import Optimizer

Weights: TypeAlias = Float[Array, "*shape"]
Norm: TypeAlias = Float[Array, ""]


def make_lars(settings: Optimizer, learning_rate: optax.ScalarOrSchedule, norms: Norms) -> optax.GradientTransformation:
    """Return LARS in the form `settings.form`; `norms` gives the norms of whole arrays."""
    match settings.form:
        case "mlperf":
            return optax.chain(
                _scale_gradient_by_trust(settings, norms),
                optax.scale_by_learning_rate(learning_rate),
                optax.trace(settings.momentum),
            )
        case "scaled":
            return optax.chain(_scale_momentum_by_trust(settings, norms), optax.scale_by_learning_rate(learning_rate))
        case "optax":
            # optax.lars, transformation by transformation, with norms of arrays of which only a part may be here.
            return optax.chain(
                optax.add_decayed_weights(settings.weight_decay, make_mask(settings)),
                optax.masked(_scale_update_by_trust(settings, norms), make_mask(settings)),
                optax.scale_by_learning_rate(learning_rate),
                optax.trace(settings.momentum),
            )


# --- mlperf ----------------------------------------------------------------------------------------------------------


def _scale_gradient_by_trust(settings: Optimizer, norms: Norms) -> optax.GradientTransformation:
    """Replace g by trust·(g + βw)."""

    def update(gradients: PyTree, params: PyTree) -> PyTree:
        def scale(adapt: bool, g: Weights, w: Weights, g_norm: Norm, w_norm: Norm) -> Weights:
            if not adapt:
                return g
            return (g + settings.weight_decay * w) * _compute_trust(settings, g_norm, w_norm).astype(g.dtype)

        return jax.tree.map(scale, mask_skipped(params, settings.skip), gradients, params, *norms((gradients, params)))

    return optax.stateless(update)


# --- scaled ----------------------------------------------------------------------------------------------------------


def _scale_momentum_by_trust(settings: Optimizer, norms: Norms) -> optax.GradientTransformation:
    """Replace g by trust·m, with m ← μm + g; the trust ratio is that of g."""
    momentum = optax.trace(settings.momentum)

    def update(gradients: PyTree, state: optax.OptState, params: PyTree = None) -> tuple[PyTree, optax.OptState]:
        def scale(adapt: bool, m: Weights, g_norm: Norm, w_norm: Norm) -> Weights:
            return m * _compute_trust(settings, g_norm, w_norm).astype(m.dtype) if adapt else m

        momenta, state = momentum.update(gradients, state, params)
        return jax.tree.map(scale, mask_skipped(params, settings.skip), momenta, *norms((gradients, params))), state

    return optax.GradientTransformation(momentum.init, update)


def _compute_trust(settings: Optimizer, g_norm: Norm, w_norm: Norm) -> Norm:
    """Return the trust ratio of `mlperf` and `scaled`; 1 where a norm is 0, or the parameter would never move."""
    is_zero = (g_norm == 0) | (w_norm == 0)
    denominator = jnp.where(is_zero, 1, g_norm + settings.weight_decay * w_norm + settings.epsilon)
    return jnp.where(is_zero, 1, settings.trust * w_norm / denominator)


# --- optax -----------------------------------------------------------------------------------------------------------


def _scale_update_by_trust(settings: Optimizer, norms: Norms) -> optax.GradientTransformation:
    """Replace u by trust·u, with trust = η‖w‖/(‖u‖ + ε)."""

    def update(updates: PyTree, params: PyTree) -> PyTree:
        def scale(u: Weights, u_norm: Norm, w_norm: Norm) -> Weights:
            is_zero = (u_norm == 0) | (w_norm == 0)
            trust = settings.trust * w_norm / jnp.where(is_zero, 1, u_norm + settings.epsilon)
            return u * jnp.where(is_zero, 1, trust).astype(u.dtype)

        return jax.tree.map(scale, updates, *norms((updates, params)))

    return optax.stateless(update)
