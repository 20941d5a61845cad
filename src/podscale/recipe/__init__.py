"""Recipe: what to train. Data, model, batch, optimizer, schedule, augmentation; nothing about the machine.

A recipe is a TOML file read into a frozen dataclass. The same functions check files and command-line overrides, so the
same mistake gets the same message wherever it is made. A recipe is data: nothing in it is ever executed.
"""

from podscale.recipe.files import (
    list_presets,
    load_recipe,
    parse_opening_comment,
    parse_recipe,
    parse_title,
    read_recipe_file,
)
from podscale.recipe.image_sizes import (
    SizeRange,
    check_any_size,
    describe_sizes,
    find_largest_size,
    find_train_size,
    list_size_ranges,
    list_size_shares,
)
from podscale.recipe.recipe import NEW_FIELDS, SECTIONS, Recipe, override_recipe
from podscale.recipe.scalars import SEED, is_off, read_scalars, replace_scalars
from podscale.recipe.sections import Augment, Batch, Data, Model, Optimizer, Schedule, Train

__all__ = [
    "NEW_FIELDS",
    "SECTIONS",
    "SEED",
    "Augment",
    "Batch",
    "Data",
    "Model",
    "Optimizer",
    "Recipe",
    "Schedule",
    "SizeRange",
    "Train",
    "check_any_size",
    "describe_sizes",
    "find_largest_size",
    "find_train_size",
    "is_off",
    "list_presets",
    "list_size_ranges",
    "list_size_shares",
    "load_recipe",
    "override_recipe",
    "parse_opening_comment",
    "parse_recipe",
    "parse_title",
    "read_recipe_file",
    "read_scalars",
    "replace_scalars",
]
