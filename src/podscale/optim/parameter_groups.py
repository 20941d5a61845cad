"""Groups of parameters: which have learning rates of their own, and which have no weight decay.

Biases, the head and the first layer may have learning rates of their own (`schedule.bias_peak`, `schedule.head_peak`,
`schedule.stem_epochs`). Parameters whose last name is in `optimizer.skip` have neither weight decay nor trust ratio.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, KeyPath, keystr, tree_map_with_path
from jaxtyping import PyTree

from podscale.errors import UserError
from podscale.recipe import Optimizer, Recipe, is_off

# --- learning rates --------------------------------------------------------------------------------------------------

# Names of groups. The optimizer's state, and with it every checkpoint, has them as keys.
DEFAULT, BIAS, HEAD, STEM_SUFFIX = "rest", "bias", "head", " of the stem"


def make_group_rates(
    recipe: Recipe, learning_rate: optax.ScalarOrSchedule, stem: str, head: str
) -> dict[str, optax.ScalarOrSchedule]:
    """Return the learning rate of each group of parameters that has its own.

    Raises:
        UserError: the recipe has a rate for the first or the last layer, and the model does not say which that is.
    """
    settings, rates = recipe.schedule, {DEFAULT: learning_rate}
    for group, peak in ((BIAS, settings.bias_peak), (HEAD, settings.head_peak)):
        if not is_off(peak):
            rates[group] = _scale_rate(learning_rate, peak / settings.peak)
    for field, layer in (("stem_epochs", stem), ("head_peak", head)):
        if not is_off(getattr(settings, field)) and not layer:
            raise UserError(f"schedule.{field} needs a model with a list of `layers`, or a `stem` and a `head`")
    if settings.stem_epochs:
        speedup = max(1.0, recipe.train.epochs / settings.stem_epochs)
        rates |= {group + STEM_SUFFIX: _compress_rate(rate, speedup) for group, rate in rates.items()}
    return rates


def count_stem_updates(recipe: Recipe, steps: int) -> int:
    """Return how many of `steps` updates need the gradient of the first layer.

    With `schedule.stem_epochs` and a decay to 0 the first layer has a rate of 0 after those epochs, and its gradient
    changes nothing; unless gradients are clipped by their norm, which it is a part of.

    >>> from podscale.recipe import Recipe, override_recipe
    >>> changes = {"schedule.stem_epochs": 2, "schedule.end": 0, "train.epochs": 8}
    >>> count_stem_updates(override_recipe(Recipe(), changes), 100), count_stem_updates(Recipe(), 100)
    (25, 100)
    """
    settings = recipe.schedule
    decays_to_zero = settings.end == 0 and settings.decay in ("polynomial", "cosine")
    if not settings.stem_epochs or not decays_to_zero or recipe.optimizer.clip_norm:
        return steps
    return min(steps, math.ceil(steps * settings.stem_epochs / recipe.train.epochs))


def label_groups(settings: Optimizer, groups: set[str], stem: str, head: str, params: PyTree) -> PyTree:
    """Return a tree like `params` that holds the group of each parameter, one of `groups`."""

    def label(path: KeyPath, _: object) -> str:
        name = keystr(path, simple=True, separator=".")
        suffix = STEM_SUFFIX if name.startswith(f"{stem}.") and DEFAULT + STEM_SUFFIX in groups else ""
        if _get_last_name(path) in settings.skip and BIAS in groups:
            return BIAS + suffix
        return (HEAD if name.startswith(f"{head}.") and HEAD in groups else DEFAULT) + suffix

    return tree_map_with_path(label, params)


def _scale_rate(rate: optax.ScalarOrSchedule, factor: float) -> optax.ScalarOrSchedule:
    return (lambda step: factor * rate(step)) if callable(rate) else factor * rate


def _compress_rate(rate: optax.ScalarOrSchedule, factor: float) -> optax.ScalarOrSchedule:
    """Return a schedule that passes through the same rates `factor` times faster and then keeps the last one."""
    return (lambda step: rate(factor * jnp.asarray(step, float))) if callable(rate) else rate


# --- weight decay and trust ratio ------------------------------------------------------------------------------------


def make_mask(settings: Optimizer) -> Callable[[PyTree], PyTree]:
    """Return `mask_skipped` for `settings.skip`, in the form that optax takes masks."""
    return lambda params: mask_skipped(params, settings.skip)


def mask_skipped(params: PyTree, skip: tuple[str, ...]) -> PyTree:
    """Return a tree like `params`: False where the parameter's last name is in `skip`, else True.

    >>> mask_skipped({"conv": {"kernel": 1.0, "bias": 2.0}}, skip=("bias", "scale"))
    {'conv': {'bias': False, 'kernel': True}}
    """
    return tree_map_with_path(lambda path, _: _get_last_name(path) not in skip, params)


def _get_last_name(path: KeyPath) -> str:
    if path and path[-1] == GetAttrKey("value"):  # the array inside a flax Variable, whose name comes before it
        path = path[:-1]
    return keystr(path[-1:], simple=True)
