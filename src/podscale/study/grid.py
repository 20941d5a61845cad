"""Read a study's file into cases; each case is a recipe that is trained once for every seed.

    recipe = "digits"              a preset, or a recipe file beside this one
    seeds = [0, 1, 2]
    measure = "accuracy"           what is compared: accuracy, best_accuracy, accuracy_top5, train_s or images_per_s

    [set]                          fields that differ from the recipe in all cases
    train.epochs = 5

    [grid]                         fields with several values: every combination is a case
    batch.size = [128, 256]

    [[case]]                       fields that belong together, under a name; each is combined with the grid
    name = "LARS"
    set.optimizer.name = "lars"

    [[case]]
    name = "mine"
    recipe = "mine.toml"           instead of the study's

    [[at]]                         fields that are different at some values of the grid, in all cases or in one
    case = "LARS"
    grid.batch.size = [256]
    set.schedule.peak = 2.0

Nothing in it is executed, and all of it is checked before the first training starts.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from podscale import recipe as recipes
from podscale.config.json_types import Json, JsonObject
from podscale.config.suggestions import suggest_names
from podscale.config.toml import parse_toml
from podscale.errors import UserError
from podscale.recipe import SECTIONS, Recipe

MEASURES = ("accuracy", "best_accuracy", "accuracy_top5", "train_s", "images_per_s")
KEYS = ("recipe", "seeds", "measure", "set", "grid", "case", "at")
SEED = "train.seed"
MAX_CASES = 10_000


@dataclass(frozen=True)
class Case:
    """One recipe of a study. `values` are those by which it differs from the other cases."""

    name: str
    values: JsonObject
    recipe: Recipe

    def with_seed(self, seed: int) -> Recipe:
        """Return the recipe with that seed."""
        return recipes.override_recipe(self.recipe, {SEED: seed})


@dataclass(frozen=True)
class Study:
    """A study: its cases, their seeds and the measure by which they are compared."""

    name: str
    doc: str
    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    measure: str


def load_study(path: str | Path, changes: JsonObject | None = None, seeds: Sequence[int] = ()) -> Study:
    """Read a study's file.

    Args:
        path: the TOML file.
        changes: values of recipe fields for all cases; the grid's fields keep theirs.
        seeds: instead of the file's.

    Raises:
        UserError: the file or a recipe has a mistake; the message says which.
    """
    path = Path(path)
    text = recipes.read_recipe_file(path, "study")
    tables = parse_toml(text, f"the study {path}")
    for key in tables:
        if key not in KEYS:
            raise UserError(f"a study has no {key!r}: {suggest_names(key, KEYS)}")
    measure = tables.get("measure", "accuracy")
    if measure not in MEASURES:
        raise UserError(f"a study's measure cannot be {measure!r}: {suggest_names(str(measure), MEASURES)}")
    cases = tuple(_build_cases(path, tables, changes or {}))
    seeds = _check_seeds(list(seeds) or tables.get("seeds", [0]))
    for case in cases:
        case.with_seed(seeds[0])  # raises now what the recipe would raise later
    return Study(path.stem, recipes.parse_opening_comment(text), cases, seeds, measure)


def _build_cases(path: Path, tables: JsonObject, changes: JsonObject) -> Iterator[Case]:
    base = _load_recipe(path, tables)
    common = flatten_fields(tables.get("set", {}), "set") | changes
    fields = flatten_fields(tables.get("grid", {}), "grid")
    grid = {field: _check_values(field, values) for field, values in fields.items()}
    named = _index_by_name(tables.get("case", [{}]))
    bases = {name: _load_recipe(path, case) if "recipe" in case else base for name, case in named.items()}
    settings = {name: flatten_fields(case.get("set", {}), "set") for name, case in named.items()}
    overrides = _read_overrides(tables.get("at", []), grid, list(named))
    if any(
        SEED in fields for fields in (common, grid, *settings.values(), *(override.settings for override in overrides))
    ):
        raise UserError(f"a study's seeds are in `seeds`, not in {SEED}")
    combinations = list(itertools.islice(itertools.product(*grid.values()), MAX_CASES + 1))
    if len(combinations) * len(named) > MAX_CASES:
        raise UserError(f"the study {path} has more than {MAX_CASES:,} cases")
    for name, recipe in bases.items():
        for combination in combinations:
            values = dict(zip(grid, combination, strict=True))
            parts = [name, *(f"{field} {_format_value(value)}" for field, value in values.items())]
            title = ", ".join(part for part in parts if part) or recipe.name
            differences = ({"case": name} if name else {}) | values
            changed = common | settings[name]
            for override in overrides:
                changed |= override.settings if override.applies_to(name, values) else {}
            yield Case(title, differences, recipes.override_recipe(recipe, changed | values))


def _load_recipe(path: Path, tables: JsonObject) -> Recipe:
    name = tables.get("recipe", "digits")
    if not isinstance(name, str):
        raise UserError(f"a study's recipe is a name or a TOML file, not {name!r}")
    beside = path.parent / name
    return recipes.load_recipe(beside if name.endswith(".toml") and beside.exists() else name)


def _index_by_name(cases: Json) -> dict[str, JsonObject]:
    """Return the cases by name; a study without cases has one, which needs no name."""
    by_name: dict[str, JsonObject] = {}
    if not (isinstance(cases, list) and cases and all(isinstance(case, dict) for case in cases)):
        raise UserError("a study's cases are tables, each started by [[case]]")
    for case in cases:
        name = case.get("name", "")
        if not isinstance(name, str) or set(case) - {"name", "recipe", "set"} or (case and not name):
            raise UserError("a case of a study has a `name`, which is text, a `recipe` and `set`, and nothing else")
        if name in by_name:
            raise UserError(f"a study has two cases with the name {name!r}")
        by_name[name] = case
    return by_name


@dataclass(frozen=True)
class _Override:
    """Fields that have other values in one case (or in all: "") at these values of the grid."""

    case: str
    grid: dict[str, list[Json]]
    settings: JsonObject

    def applies_to(self, case: str, values: JsonObject) -> bool:
        return self.case in ("", case) and all(values[field] in some for field, some in self.grid.items())


def _read_overrides(tables: Json, grid: dict[str, list[Json]], names: list[str]) -> list[_Override]:
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        raise UserError("what a study has `at` some values are tables, each started by [[at]]")
    overrides = []
    for table in tables:
        if set(table) - {"case", "grid", "set"} or not table.get("grid") or not table.get("set"):
            raise UserError("a study's [[at]] has `grid` and `set`, and perhaps a `case`, and nothing else")
        case, at = table.get("case", ""), flatten_fields(table["grid"], "grid")
        if case and case not in names:
            raise UserError(f"a study's [[at]] is for the case {case!r}, which does not exist")
        lists = {field: value if isinstance(value, list) else [value] for field, value in at.items()}
        for field, values in lists.items():
            for value in values:
                if value not in grid.get(field, []):
                    raise UserError(f"a study's [[at]] is for {field} {_format_value(value)}, which is not in its grid")
        settings = flatten_fields(table["set"], "set")
        for field in settings.keys() & grid.keys():
            raise UserError(f"a study's [[at]] sets {field}, which its grid varies")
        overrides.append(_Override(case, lists, settings))
    return overrides


def _check_values(field: str, values: Json) -> list[Json]:
    if not isinstance(values, list) or not values:
        raise UserError(f"{field} in a study's grid is a list of values, not {values!r}")
    return values


def _check_seeds(seeds: Json) -> tuple[int, ...]:
    valid = isinstance(seeds, list) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not valid or len(set(seeds)) < len(seeds):
        raise UserError(f"a study's seeds are different whole numbers from 0 on, not {seeds!r}")
    return tuple(seeds)


def flatten_fields(tables: Json, section: str) -> JsonObject:
    """Return tables by section and field, or fields by dotted name, as `{"section.field": value}`."""
    if not isinstance(tables, dict):
        raise UserError(f"{section} in a study is a table of recipe fields, not {tables!r}")
    fields: JsonObject = {}
    for name, value in tables.items():
        if "." in name:
            fields[name] = value
        elif name not in SECTIONS or not isinstance(value, dict):
            hint = suggest_names(name, SECTIONS)
            raise UserError(f"{section} in a study has {name!r}, which is no section of a recipe: {hint}")
        else:
            fields |= {f"{name}.{field}": inner for field, inner in value.items()}
    return fields


def _format_value(value: Json) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
