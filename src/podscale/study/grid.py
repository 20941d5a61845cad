"""Grid: a study's file, read into cases; each case is a recipe that is trained once for every seed.

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

Nothing in it is executed, and all of it is checked before the first training begins.
"""

import itertools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podscale import recipe as recipes
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.recipe import SECTIONS, Recipe

MEASURES = ("accuracy", "best_accuracy", "accuracy_top5", "train_s", "images_per_s")
KEYS = ("recipe", "seeds", "measure", "set", "grid", "case", "at")
SEED = "train.seed"
MOST_CASES = 10_000


@dataclass(frozen=True)
class Case:
    """One recipe of a study. `values` are those by which it differs from the other cases."""

    name: str
    values: dict[str, Any]
    recipe: Recipe

    def seeded(self, seed: int) -> Recipe:
        """The recipe with that seed."""
        return recipes.override(self.recipe, {SEED: seed})


@dataclass(frozen=True)
class Study:
    """A study as its file tells it."""

    name: str
    doc: str
    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    measure: str


def load(path: str | Path, changes: dict[str, Any] | None = None, seeds: Sequence[int] = ()) -> Study:
    """The study in that file; `changes` to recipe fields hold for all cases, `seeds` replace the file's."""
    path = Path(path)
    text = recipes.read(path, "study")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the study {path} is not valid TOML: {error}") from None
    for key in tables:
        if key not in KEYS:
            raise UserError(f"a study has no {key!r}: {suggest_names(key, KEYS)}")
    measure = tables.get("measure", "accuracy")
    if measure not in MEASURES:
        raise UserError(f"a study's measure cannot be {measure!r}: {suggest_names(str(measure), MEASURES)}")
    cases = tuple(_cases(path, tables, changes or {}))
    seeds = _seeds(list(seeds) or tables.get("seeds", [0]))
    for case in cases:
        case.seeded(seeds[0])  # what a recipe refuses, it refuses now
    return Study(path.stem, recipes.opening_comment(text), cases, seeds, measure)


def _cases(path: Path, tables: dict[str, Any], changes: dict[str, Any]) -> Iterator[Case]:
    base = _recipe(path, tables)
    common = flat(tables.get("set", {}), "set") | changes
    grid = {field: _values(field, values) for field, values in flat(tables.get("grid", {}), "grid").items()}
    named = _named(tables.get("case", [{}]))
    bases = {name: _recipe(path, case) if "recipe" in case else base for name, case in named.items()}
    owned = {name: flat(case.get("set", {}), "set") for name, case in named.items()}
    spots = _spots(tables.get("at", []), grid, list(named))
    if any(SEED in fields for fields in (common, grid, *owned.values(), *(spot.own for spot in spots))):
        raise UserError(f"a study's seeds are in `seeds`, not in {SEED}")
    combined = list(itertools.islice(itertools.product(*grid.values()), MOST_CASES + 1))
    if len(combined) * len(named) > MOST_CASES:
        raise UserError(f"the study {path} has more than {MOST_CASES:,} cases")
    for name, own in bases.items():
        for chosen in combined:
            values = dict(zip(grid, chosen, strict=True))
            words = [name, *(f"{field} {_shown(value)}" for field, value in values.items())]
            told = ", ".join(word for word in words if word) or own.name
            shown = ({"case": name} if name else {}) | values
            changed = common | owned[name]
            for spot in spots:
                changed |= spot.own if spot.holds(name, values) else {}
            yield Case(told, shown, recipes.override(own, changed | values))


def _recipe(path: Path, tables: dict[str, Any]) -> Recipe:
    name = tables.get("recipe", "digits")
    if not isinstance(name, str):
        raise UserError(f"a study's recipe is a name or a TOML file, not {name!r}")
    beside = path.parent / name
    return recipes.load(beside if name.endswith(".toml") and beside.exists() else name)


def _named(cases: Any) -> dict[str, dict[str, Any]]:
    """The cases by their names; a study without any has one, which needs no name."""
    found: dict[str, dict[str, Any]] = {}
    if not (isinstance(cases, list) and cases and all(isinstance(case, dict) for case in cases)):
        raise UserError("a study's cases are tables, each begun by [[case]]")
    for case in cases:
        name = case.get("name", "")
        if not isinstance(name, str) or set(case) - {"name", "recipe", "set"} or (case and not name):
            raise UserError("a case of a study has a `name`, which is text, a `recipe` and `set`, and nothing else")
        if name in found:
            raise UserError(f"a study has two cases with the name {name!r}")
        found[name] = case
    return found


@dataclass(frozen=True)
class _Spot:
    """Fields that are different in one case (or in all: "") at these values of the grid."""

    case: str
    where: dict[str, list[Any]]
    own: dict[str, Any]

    def holds(self, case: str, values: dict[str, Any]) -> bool:
        return self.case in ("", case) and all(values[field] in some for field, some in self.where.items())


def _spots(tables: Any, grid: dict[str, list[Any]], names: list[str]) -> list[_Spot]:
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        raise UserError("what a study has `at` some values are tables, each begun by [[at]]")
    found = []
    for table in tables:
        if set(table) - {"case", "grid", "set"} or not table.get("grid") or not table.get("set"):
            raise UserError("a study's [[at]] has `grid` and `set`, and perhaps a `case`, and nothing else")
        case, where = table.get("case", ""), flat(table["grid"], "grid")
        if case and case not in names:
            raise UserError(f"a study's [[at]] is for the case {case!r}, which there is not")
        lists = {field: value if isinstance(value, list) else [value] for field, value in where.items()}
        for field, values in lists.items():
            for value in values:
                if value not in grid.get(field, []):
                    raise UserError(f"a study's [[at]] is for {field} {_shown(value)}, which is not in its grid")
        own = flat(table["set"], "set")
        for field in own.keys() & grid.keys():
            raise UserError(f"a study's [[at]] sets {field}, which its grid varies")
        found.append(_Spot(case, lists, own))
    return found


def _values(field: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise UserError(f"{field} in a study's grid is a list of values, not {values!r}")
    return values


def _seeds(seeds: Any) -> tuple[int, ...]:
    good = isinstance(seeds, list) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not good or len(set(seeds)) < len(seeds):
        raise UserError(f"a study's seeds are different whole numbers from 0 on, not {seeds!r}")
    return tuple(seeds)


def flat(tables: Any, where: str) -> dict[str, Any]:
    """Tables by section and field, or fields by dotted name, as `{"section.field": value}`."""
    if not isinstance(tables, dict):
        raise UserError(f"{where} in a study is a table of recipe fields, not {tables!r}")
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if "." in name:
            found[name] = value
        elif name not in SECTIONS or not isinstance(value, dict):
            raise UserError(f"{where} in a study has {name!r}, which is no section of a recipe: {_sections(name)}")
        else:
            found |= {f"{name}.{field}": inner for field, inner in value.items()}
    return found


def _sections(name: str) -> str:
    return suggest_names(name, SECTIONS)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
