"""LARS."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from podscale.optim.norms import Norms
from podscale.optim.parameter_groups import make_mask, mask_skipped
from podscale.recipe import Optimizer


def make_lars(wanted: Optimizer, learning_rate: optax.ScalarOrSchedule, norms: Norms) -> optax.GradientTransformation:
    match wanted.form:
        case "mlperf":
            return optax.chain(
                _scale_gradient_by_trust(wanted, norms),
                optax.scale_by_learning_rate(learning_rate),
                optax.trace(wanted.momentum),
            )
        case "scaled":
            return optax.chain(_scale_momentum_by_trust(wanted, norms), optax.scale_by_learning_rate(learning_rate))
        case "optax":
            # optax.lars, part by part, with norms that may be of more than what is here.
            return optax.chain(
                optax.add_decayed_weights(wanted.weight_decay, make_mask(wanted)),
                optax.masked(_scale_update_by_trust(wanted, norms), make_mask(wanted)),
                optax.scale_by_learning_rate(learning_rate),
                optax.trace(wanted.momentum),
            )


def _scale_gradient_by_trust(wanted: Optimizer, norms: Norms) -> optax.GradientTransformation:
    """g becomes trust·(g + βw)."""

    def update(gradients: Any, params: Any) -> Any:
        def one(adapt: bool, g: jax.Array, w: jax.Array, g_norm: jax.Array, w_norm: jax.Array) -> jax.Array:
            return (g + wanted.weight_decay * w) * _trust_ratio(wanted, g_norm, w_norm).astype(g.dtype) if adapt else g

        return jax.tree.map(one, mask_skipped(params, wanted.skip), gradients, params, *norms((gradients, params)))

    return optax.stateless(update)


def _scale_update_by_trust(wanted: Optimizer, norms: Norms) -> optax.GradientTransformation:
    """u becomes trust·u, with η‖w‖/(‖u‖ + ε) for trust."""

    def update(updates: Any, params: Any) -> Any:
        def one(u: jax.Array, u_norm: jax.Array, w_norm: jax.Array) -> jax.Array:
            nothing = (u_norm == 0) | (w_norm == 0)
            trust = wanted.trust * w_norm / jnp.where(nothing, 1, u_norm + wanted.epsilon)
            return u * jnp.where(nothing, 1, trust).astype(u.dtype)

        return jax.tree.map(one, updates, *norms((updates, params)))

    return optax.stateless(update)


def _scale_momentum_by_trust(wanted: Optimizer, norms: Norms) -> optax.GradientTransformation:
    """g becomes trust·m, with m ← μm + g; the trust ratio is that of g."""
    momentum = optax.trace(wanted.momentum)

    def update(gradients: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
        def one(adapt: bool, m: jax.Array, g_norm: jax.Array, w_norm: jax.Array) -> jax.Array:
            return m * _trust_ratio(wanted, g_norm, w_norm).astype(m.dtype) if adapt else m

        moved, state = momentum.update(gradients, state, params)
        return jax.tree.map(one, mask_skipped(params, wanted.skip), moved, *norms((gradients, params))), state

    return optax.GradientTransformation(momentum.init, update)


def _trust_ratio(wanted: Optimizer, g_norm: jax.Array, w_norm: jax.Array) -> jax.Array:
    """The trust ratio; 1 where a norm is 0, or such a parameter would never move."""
    nothing = (g_norm == 0) | (w_norm == 0)
    denominator = jnp.where(nothing, 1, g_norm + wanted.weight_decay * w_norm + wanted.epsilon)
    return jnp.where(nothing, 1, wanted.trust * w_norm / denominator)
