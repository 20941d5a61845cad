"""Recipe: its sections as one frozen dataclass, checked as a whole; overrides; the digest that names its runs."""

import dataclasses
import hashlib
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType

from podscale.config.fields import replace_fields
from podscale.config.json_types import JsonObject
from podscale.config.ranges import check_ranges
from podscale.config.suggestions import list_divisors, suggest_names, suggest_numbers
from podscale.config.toml import format_toml
from podscale.errors import UserError
from podscale.recipe.sections import Augment, Batch, Data, Model, Optimizer, Schedule, Train


@dataclass(frozen=True)
class Recipe:
    """Everything that determines what is learnt; a frozen dataclass of sections, each a frozen dataclass of fields.

    Args:
        name: of the preset or file it comes from.
        doc: the comment that opens its file.
        data: where the images come from and how they are prepared.
        model: the network.
        batch: how many images make one update, and how many are normalized together.
        optimizer: how a gradient becomes an update.
        schedule: the learning rate over the run.
        augment: how training augments an image.
        train: how long to train, how often to evaluate, from which seed.

    Raises:
        UserError: a value is out of range, or values contradict each other.

    >>> from podscale.recipe import load_recipe
    >>> load_recipe("digits").batch.size
    128
    >>> load_recipe("digits").override({"batch.size": 256, "train.seed": 1}).train.seed
    1
    """

    name: str = "unnamed"
    doc: str = ""
    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    batch: Batch = dataclasses.field(default_factory=Batch)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    augment: Augment = dataclasses.field(default_factory=Augment)
    train: Train = dataclasses.field(default_factory=Train)

    def __post_init__(self) -> None:
        _check(self)

    def override(self, changes: JsonObject) -> "Recipe":
        """Return a copy with `{"section.field": value}` applied; see `override_recipe`."""
        return override_recipe(self, changes)

    def to_dict(self) -> JsonObject:
        """Return sections and fields as plain JSON-ready values, without the recipe's name and comment."""
        return {
            section: {k: list(v) if isinstance(v, tuple) else v for k, v in vars(getattr(self, section)).items()}
            for section in SECTIONS
        }

    def to_toml(self) -> str:
        """Return the recipe as the text of a file that `load_recipe` reads back."""
        lines = [f"# {line}".rstrip() for line in (f"recipe: {self.name}", *self.doc.splitlines())]
        for section, fields in self.to_dict().items():
            lines += [
                "",
                f"[{section}]",
                *(f"{key} = {format_toml(value)}" for key, value in fields.items()),
            ]
        return "\n".join(lines) + "\n"

    def digest(self) -> str:
        """Return eight hex digits that change with anything that changes what is learnt."""
        sections = self.to_dict()
        for section, field in (name.split(".") for name in NEW_FIELDS):
            default = getattr(SECTIONS[section], field)
            if sections[section][field] == (list(default) if isinstance(default, tuple) else default):
                del sections[section][field]
        return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:8]

    def steps(self, samples: int, epochs: float | Fraction | None = None) -> int:
        """Return the number of updates: ceil(epochs * samples / batch).

        Args:
            samples: number of training images.
            epochs: passes over them, taken as the decimal that it prints as; None: the whole run.

        >>> from podscale.recipe import load_recipe
        >>> load_recipe("digits").override({"train.epochs": 1.1, "batch.size": 100, "batch.span": 50}).steps(1000)
        11
        """
        epochs = self.train.epochs if epochs is None else epochs
        return math.ceil(Fraction(str(epochs)) * samples / self.batch.size)


SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        f.name: typing.get_type_hints(Recipe)[f.name]
        for f in dataclasses.fields(Recipe)
        if dataclasses.is_dataclass(typing.get_type_hints(Recipe)[f.name])
    }
)
# Younger than the run folders that digests name: at their defaults they are no part of a digest.
_NEW_FIELDS = (
    "data.balance data.train_sizes data.size_epochs data.max_image_mib data.eval_confidence model.activation "
    "model.patch model.pooling model.positions model.padding model.norm_epsilon model.dropout model.drop_path "
    "model.remat schedule.decay_epochs schedule.layer_decay augment.cutmix augment.cutmix_chance "
    "augment.brightness augment.contrast train.loss train.class_weights"
)
NEW_FIELDS = tuple(_NEW_FIELDS.split())


# --- overrides -----------------------------------------------------------------------------------------------------


def override_recipe(recipe: Recipe, changes: JsonObject) -> Recipe:
    """Return a copy of `recipe` with changes applied.

    Args:
        recipe: the recipe to start from.
        changes: {"section.field": value}; values are checked, text is read as TOML.

    Raises:
        UserError: there is no such field, or a value is not valid.

    >>> override_recipe(Recipe(), {"train.epochs": "2.5"}).train.epochs
    2.5
    """
    sections: dict[str, JsonObject] = {}
    for dotted, value in changes.items():
        section, _, field = dotted.partition(".")
        require_section(section)
        sections.setdefault(section, {})[field] = value
    return dataclasses.replace(
        recipe, **{name: replace_fields(getattr(recipe, name), name, values) for name, values in sections.items()}
    )


def require_section(name: str) -> None:
    """Refuse a name that no section has."""
    if name not in SECTIONS:
        raise UserError(f"a recipe has no section {name!r}: {suggest_names(name, SECTIONS)}")


# --- checks that hold for all machines ---------------------------------------------------------------------------


def _check(recipe: Recipe) -> None:
    check_ranges(recipe)
    size, span, lanes = recipe.batch.size, recipe.batch.span, recipe.data.lanes
    for field, part in (("batch.span", span), ("data.lanes", lanes)):
        if size % part:
            hint = suggest_numbers(part, list_divisors(size))
            raise UserError(f"{field} {part} does not divide batch.size {size}; {hint}")
    for field in ("mean", "std"):
        if len(getattr(recipe.data, field)) != 3:
            raise UserError(f"data.{field} needs three numbers, one per channel, not {getattr(recipe.data, field)}")
    _check_sizes(recipe)
    if recipe.data.eval_views not in (1, 2, 6):
        raise UserError(f"data.eval_views must be 1, 2 or 6, not {recipe.data.eval_views}")
    if recipe.augment.alternate and not recipe.augment.flip:
        raise UserError("augment.alternate says how to flip, but augment.flip is false; set it true")
    if recipe.schedule.peak == 0 and (recipe.schedule.bias_peak or recipe.schedule.head_peak):
        raise UserError("schedule.bias_peak and head_peak share the shape of schedule.peak, which must not be 0 then")


def _check_sizes(recipe: Recipe) -> None:
    sizes, epochs = recipe.data.train_sizes, recipe.data.size_epochs
    if len(epochs) != max(len(sizes) - 1, 0):
        raise UserError(
            f"data.size_epochs needs one number less than data.train_sizes, which has {len(sizes)}, not {len(epochs)}"
        )
    edges = [0.0, *epochs, recipe.train.epochs]
    if any(a >= b for a, b in pairwise(edges)):
        raise UserError(f"data.size_epochs must rise between 0 and train.epochs {recipe.train.epochs}, not {epochs}")
