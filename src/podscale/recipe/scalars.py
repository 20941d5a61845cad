"""Numbers of a recipe that compiled programs take as arguments: recipes that differ only in them share a program."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from podscale.recipe.recipe import Recipe

if TYPE_CHECKING:  # recipes are read without JAX
    from jax.typing import ArrayLike

SCALAR_FIELDS = (
    "schedule.peak",
    "schedule.bias_peak",
    "schedule.head_peak",
    "schedule.end",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "optimizer.trust",
    "augment.label_smoothing",
    "train.seed",
)
SEED = "train.seed"


def read_scalars(recipe: Recipe) -> dict[str, float]:
    """Return the numbers that are arguments of a compiled program, by field.

    A 0 stays part of the program, where it mostly means that something is off; except the seed 0.

    >>> scalars = read_scalars(Recipe())
    >>> scalars["optimizer.momentum"], scalars["train.seed"], "schedule.head_peak" in scalars
    (0.9, 0, False)
    """
    values = {name: _get_field(recipe, name) for name in SCALAR_FIELDS}
    return {name: value for name, value in values.items() if value or name == SEED}


def replace_scalars(recipe: Recipe, values: Mapping[str, "ArrayLike"]) -> Recipe:
    """Return a copy of the recipe with these fields, which may be traced arrays and are not checked."""
    by_section: dict[str, dict[str, ArrayLike]] = {}
    for name, value in values.items():
        section, field = name.split(".")
        by_section.setdefault(section, {})[field] = value
    replaced = copy.copy(recipe)
    vars(replaced).update({name: replace(getattr(recipe, name), **fields) for name, fields in by_section.items()})
    return replaced


def is_off(value: "ArrayLike") -> bool:
    """Return whether a field is the constant 0. An argument of a compiled program never is.

    >>> is_off(0.0), is_off(0.1)
    (True, False)
    """
    return isinstance(value, int | float) and value == 0


def _get_field(recipe: Recipe, name: str) -> float:
    section, field = name.split(".")
    value: float = getattr(getattr(recipe, section), field)
    return value
