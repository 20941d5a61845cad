"""Learning-rate schedules: linear warm-up from 0 to the peak, then decay.

The peak may grow with the batch: the linear scaling rule with gradual warm-up of Goyal et al. 2017 (arXiv 1706.02677),
sections 2.1 and 2.2.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from podscale.recipe import Recipe


class Times(NamedTuple):
    """When a schedule changes, in updates: numbers, or arguments of a compiled program."""

    warmup: ArrayLike  # until the peak is reached
    ramp: ArrayLike  # the same, at least 1
    decay: ArrayLike  # from there to the end, at least 1
    milestones: ArrayLike  # of step decay
    period: ArrayLike  # of exponential decay


def count_times(recipe: Recipe, steps: int, steps_per_epoch: float) -> Times:
    """Return when the recipe's schedule changes, in a training of `steps` updates."""
    settings = recipe.schedule
    warmup = settings.warmup_epochs * steps_per_epoch
    milestones = np.array([epoch * steps_per_epoch for epoch in settings.milestones])
    return Times(warmup, max(warmup, 1), max(steps - warmup, 1), milestones, settings.decay_epochs * steps_per_epoch)


def make_schedule(recipe: Recipe, steps: int, steps_per_epoch: float) -> optax.Schedule:
    """Return the learning rate as a function of the step.

    Args:
        recipe: its section `schedule` says peak, warm-up and decay; with `schedule.scale_batch` the peak grows with the
            batch.
        steps: updates of the whole training; polynomial and cosine decay reach `schedule.end` there.
        steps_per_epoch: updates of an epoch, which need not be a whole number.

    Examples:
        >>> from podscale.recipe import Recipe, override_recipe
        >>> recipe = override_recipe(Recipe(), {"schedule.peak": 4, "schedule.warmup_epochs": 2})
        >>> rate = make_schedule(recipe, 50, steps_per_epoch=5)
        >>> [round(float(rate(step)), 4) for step in (0, 5, 10, 30, 50)]
        [0.0, 2.0, 4.0, 1.0001, 0.0001]
    """
    return make_timed_schedule(recipe, count_times(recipe, steps, steps_per_epoch))


def make_timed_schedule(recipe: Recipe, times: Times) -> optax.Schedule:
    """Return the learning rate as a function of the step; see `make_schedule`.

    Args:
        recipe: its rates may be arguments of a compiled program, as the times may.
        times: when the schedule changes.
    """
    settings = recipe.schedule
    peak = settings.peak * (recipe.batch.size / settings.scale_batch if settings.scale_batch else 1)
    milestones = jnp.asarray(times.milestones, float)

    def decay(step: Float[Array, ""]) -> Float[Array, ""]:
        remaining = 1 - jnp.clip((step - times.warmup) / times.decay, 0, 1)
        match settings.decay:
            case "polynomial":
                return settings.end + (peak - settings.end) * remaining**settings.power
            case "cosine":
                return settings.end + (peak - settings.end) * (1 - jnp.cos(math.pi * remaining)) / 2
            case "step":
                return peak * settings.factor ** jnp.sum(step >= milestones, dtype=float)
            case "exponential":
                return peak * settings.factor ** jnp.floor(step / times.period)
            case "constant":
                return jnp.full_like(step, peak)

    def schedule(step: ArrayLike) -> Float[Array, ""]:
        now = jnp.asarray(step, float)  # float32, or float64 in JAX's 64-bit mode
        return jnp.where(now < times.warmup, peak * now / times.ramp, decay(now))

    return schedule
