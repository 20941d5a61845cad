"""Groups of parameters with learning rates and weight decay of their own."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, keystr, tree_map_with_path

from podscale.errors import UserError
from podscale.recipe import Optimizer, Recipe

# --- kinds of parameters with learning rates of their own ---

REST, BIAS, HEAD, OF_STEM = "rest", "bias", "head", " of the stem"


def group_rates(
    recipe: Recipe, learning_rate: optax.ScalarOrSchedule, stem: str, head: str
) -> dict[str, optax.ScalarOrSchedule]:
    """The learning rate of each kind of parameters that has one."""
    wanted, rates = recipe.schedule, {REST: learning_rate}
    for kind, peak in ((BIAS, wanted.bias_peak), (HEAD, wanted.head_peak)):
        if peak:
            rates[kind] = _scale_rate(learning_rate, peak / wanted.peak)
    for field, place in (("stem_epochs", stem), ("head_peak", head)):
        if getattr(wanted, field) and not place:
            raise UserError(f"schedule.{field} needs a model with a list of `layers`, or a `stem` and a `head`")
    if wanted.stem_epochs:
        sooner = max(1.0, recipe.train.epochs / wanted.stem_epochs)
        rates |= {kind + OF_STEM: _advance_rate(rate, sooner) for kind, rate in rates.items()}
    return rates


def label_groups(wanted: Optimizer, known: set[str], stem: str, head: str, params: Any) -> Any:
    """A tree like `params`: of which kind each is."""

    def kind(path: tuple[Any, ...], _: Any) -> str:
        name = keystr(path, simple=True, separator=".")
        of_stem = OF_STEM if name.startswith(f"{stem}.") and REST + OF_STEM in known else ""
        if _last_name(path) in wanted.skip and BIAS in known:
            return BIAS + of_stem
        return (HEAD if name.startswith(f"{head}.") and HEAD in known else REST) + of_stem

    return tree_map_with_path(kind, params)


def _scale_rate(rate: optax.ScalarOrSchedule, factor: float) -> optax.ScalarOrSchedule:
    return (lambda step: factor * rate(step)) if callable(rate) else factor * rate


def _advance_rate(rate: optax.ScalarOrSchedule, factor: float) -> optax.ScalarOrSchedule:
    """The same rates, so many times earlier; what comes after the last is the last."""
    return (lambda step: rate(factor * jnp.asarray(step, float))) if callable(rate) else rate


def mask_skipped(params: Any, skip: tuple[str, ...]) -> Any:
    """A tree like `params`: False where the parameter's last name is in `skip`, else True.

    >>> adapted({"conv": {"kernel": 1.0, "bias": 2.0}}, skip=("bias", "scale"))
    {'conv': {'bias': False, 'kernel': True}}
    """
    return tree_map_with_path(lambda path, _: _last_name(path) not in skip, params)


def _last_name(path: tuple[Any, ...]) -> str:
    if path and path[-1] == GetAttrKey("value"):  # the array inside a flax Variable; its name is the one before
        path = path[:-1]
    return keystr(path[-1:], simple=True)


def make_mask(wanted: Optimizer) -> Callable[[Any], Any]:
    return lambda params: mask_skipped(params, wanted.skip)
