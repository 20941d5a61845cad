"""Run: a folder that holds all there is to know of one training.

    recipe.toml     what is learnt            plan.json       on what, and how
    classes.json    names of the classes      metrics.jsonl   one line a step and an evaluation
    checkpoints/    what was learnt           tensorboard/    the same curves for TensorBoard
    summary.json    how it ended              report.html     all of it to look at
    sample.png      a validation picture, to try `predict` with
    init.json       the weights it began from, if any
    ledger.json     what the time went to     findings.json   what it mistakes for what, and pictures
    lock            whose it is, while it is trained
    bad-pictures-N.txt  pictures that process N could not read, if any
    left-out.json   batches that no update takes any more, if the run diverged
    undone/         checkpoints that it went back behind then
    diverged/       what there is to know where that did not help
    damaged/        checkpoints that were found not to be whole, if any
    programs/       of a deterministic run on GPU: what was compiled

The same command on the same folder resumes. A folder never holds two recipes.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podscale import recipe as recipes
from podscale.errors import UserError
from podscale.recipe import Recipe
from podscale.storage.files import read_json, read_lines, write_atomically
from podscale.storage.lock import LOCK

CHANGES = ("recipe", "data", "versions")  # what --allow-changed may name
CHANGE_FIELDS = (  # of plan.json: which of them it is, and how a refusal says so
    ("counts", "data", "on other data"),
    ("data_digest", "data", "on other data"),
    ("versions", "versions", "by other libraries"),
)


@dataclass(frozen=True)
class Run:
    """A training's folder and recipe."""

    folder: Path
    recipe: Recipe

    @classmethod
    def default_folder(cls, recipe: Recipe, model: Any = None) -> Path:
        """Where a recipe is trained unless told otherwise: each recipe has its own folder, so the same one resumes."""
        whose = f"-{type(model).__name__}" if model is not None else ""
        return Path("runs") / f"{recipe.name}-{recipe.digest()}{whose}"

    @classmethod
    def check(cls, folder: Path, recipe: Recipe, allowed: Collection[str] = ()) -> None:
        """Refuses a folder that holds something else, before anything is written."""
        for kind in allowed:
            if kind not in CHANGES:
                raise UserError(f"--allow-changed takes {', '.join(CHANGES)}, not {kind!r}")
        if not str(folder).isprintable():
            raise UserError(f"the run folder's name {str(folder)!r} has characters that cannot be written down")
        if folder.exists() and not folder.is_dir():
            raise UserError(f"the run folder {folder} is a file; choose another with --run")
        if (folder / "recipe.toml").exists():
            differences = _differences(cls.load(folder).recipe, recipe)
            if differences and "recipe" not in allowed:
                raise UserError(f"{folder} holds a run of another recipe ({differences}); {_ways_out('recipe')}")
        elif folder.exists() and any(path.suffix != ".part" and path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no run; choose another folder with --run")

    @classmethod
    def check_changes(
        cls, folder: Path, plan: dict[str, Any], classes: tuple[str, ...], allowed: Collection[str] = ()
    ) -> None:
        """Refuses to go on with other data, or other libraries, than the run began with."""
        names, before = read_json(folder / "classes.json"), read_json(folder / "plan.json") or {}
        if names is not None and tuple(names) != classes:
            raise UserError(f"{folder} holds a run on data with other classes; choose another folder with --run")
        for field, kind, what in CHANGE_FIELDS:
            told = _changes(before.get(field), plan.get(field))
            if told and kind not in allowed:
                raise UserError(f"{folder} holds a run {what} ({told}); {_ways_out(kind)}")

    @classmethod
    def check_init(cls, folder: Path, digest: str) -> None:
        """Refuses to go on from other weights than the run began from."""
        before = read_json(folder / "init.json")
        if before is not None and digest not in ("", before["digest"]):
            told = f"its weights {before['source']} had digest {before['digest']}, now {digest}"
            raise UserError(f"{folder} holds a run that began otherwise ({told}); {_ways_out('recipe')}")

    @classmethod
    def create(
        cls,
        folder: Path,
        recipe: Recipe,
        plan: dict[str, Any],
        classes: tuple[str, ...],
        allowed: Collection[str] = (),
    ) -> "Run":
        """The folder of a run that begins or resumes; what may have changed since it was last here is `allowed`."""
        cls.check(folder, recipe, allowed)
        cls.check_changes(folder, plan, classes, allowed)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the run folder {folder}: {error.strerror}") from None
        write_atomically(folder / "recipe.toml", recipe.to_toml())  # first: it makes the folder a run's
        write_atomically(folder / "classes.json", json.dumps(list(classes)))
        write_atomically(folder / "plan.json", json.dumps(plan, indent=1))
        return cls(folder, recipe)

    @classmethod
    def plan_in(cls, folder: Path) -> dict[str, Any] | None:
        """The plan of the run in that folder, if there is one and it can be read."""
        found = read_json(folder / "plan.json")
        return found if isinstance(found, dict) and {"pod", "summation", "bucket_bytes"} <= set(found) else None

    @classmethod
    def load(cls, folder: str | Path) -> "Run":
        """A run that exists."""
        path = Path(folder) / "recipe.toml"
        if not path.is_file():
            raise UserError(f"there is no run in {folder}: it has no recipe.toml")
        text = recipes.read(path)
        try:
            return cls(Path(folder), recipes.parse(text, name=recipes.title(text) or Path(folder).name))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @classmethod
    def newest(cls, under: str | Path = "runs") -> "Run":
        """The run that was worked on last."""
        found = sorted(Path(under).glob("*/recipe.toml"), key=lambda p: p.stat().st_mtime)
        if not found:
            raise UserError(f"there is no run under {under}; train one first, or name its folder with --run")
        return cls.load(found[-1].parent)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def bad_pictures(self, process: int) -> Path:
        """Where a process lists the pictures that it could not read."""
        return self.folder / f"bad-pictures-{process}.txt"

    @property
    def programs(self) -> Path:
        return self.folder / "programs"

    def has_checkpoints(self) -> bool:
        """Whether there is anything to resume from, whole or not."""
        return self.checkpoints.is_dir() and any(path.name.isdecimal() for path in self.checkpoints.iterdir())

    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the model's outputs."""
        names = read_json(self.folder / "classes.json")
        if names is None:
            raise UserError(f"the run in {self.folder} does not name its classes: classes.json is missing or broken")
        return tuple(names)

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        try:
            return [json.loads(line) for line in read_lines(path)]
        except ValueError:
            raise UserError(f"{path} is damaged: a line of it is not JSON; remove that line to go on") from None

    def summary(self) -> dict[str, Any]:
        """How the run ended; empty while it has not."""
        return read_json(self.folder / "summary.json") or {}

    def plan(self) -> dict[str, Any]:
        """How the recipe was last mapped onto a pod."""
        found = read_json(self.folder / "plan.json")
        if not isinstance(found, dict):
            raise UserError(f"the run in {self.folder} has no plan: plan.json is missing or broken; train it again")
        return found

    def findings(self) -> dict[str, Any]:
        """What the last evaluation mistook for what; empty where that is not known."""
        found = read_json(self.folder / "findings.json")
        return found if isinstance(found, dict) and len(found.get("examples", ())) == len(self.classes()) else {}

    def all_bad_pictures(self) -> list[str]:
        """What every process said of the pictures that it could not read."""
        files = sorted(self.folder.glob("bad-pictures-*.txt"))
        return list(dict.fromkeys(why for file in files for why in read_lines(file)))


def _changes(before: Any, now: Any) -> str:
    """What differs, in words; empty where nothing does, or where one of the two is not known."""
    if before is None or now is None or before == now:
        return ""
    if not isinstance(now, dict):
        return f"{before}, now {now}"
    return ", ".join(f"{name} {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name])


def _ways_out(kind: str) -> str:
    return f"choose another folder with --run, or go on all the same with --allow-changed {kind}"


def _differences(old: Recipe, new: Recipe) -> str:
    """What differs, in words: "train.seed 0, now 1". Where data and weights lie is the machine's affair."""
    before, after = old.to_dict(), new.to_dict()
    found = [
        f"{section}.{field} {_said(value)}, now {_said(after[section][field])}"
        for section, fields in before.items()
        for field, value in fields.items()
        if value != after[section][field] and not _is_place(f"{section}.{field}", value, after[section][field])
    ]
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def _is_place(field: str, old: Any, new: Any) -> bool:
    """Whether a field only says where something lies; what lies there is compared elsewhere."""
    return field == "data.path" or bool(field == "model.init" and old and new)


def _said(value: Any) -> Any:
    return "none" if value in ("", []) else value
