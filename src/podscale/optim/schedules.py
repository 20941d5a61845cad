"""Learning-rate schedules."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podscale.recipe import Recipe

# --- schedules ---------------------------------------------------------------------------------------------------


def make_schedule(recipe: Recipe, steps: int, steps_per_epoch: float) -> optax.Schedule:
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
