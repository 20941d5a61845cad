"""Run: a folder with everything about one training.

    recipe.toml     what to train             plan.json       on which devices, and how
    classes.json    names of the classes      metrics.jsonl   one line per step and per evaluation
    checkpoints/    the trained state         tensorboard/    the same curves for TensorBoard
    summary.json    how it ended              report.html     a page to look at
    sample.png      a validation image, to try `predict` with
    init.json       the initial weights, if they came from a file or a run
    ledger.json     seconds per phase         findings.json   which classes are mistaken, with example images
    lock            the process that trains it
    bad-images-N.txt    images that process N could not read, if any
    left-out.json   batches that are skipped, if the run diverged
    undone/         checkpoints that the run rolled back behind then
    diverged/       diagnostics of a run for which that did not help
    damaged/        checkpoints that failed verification, if any; nothing in it is ever deleted
    last-checkpoint.json  the step of a checkpoint that was completed: without any left, the run does not start at 0
    programs/       of a deterministic run on GPU: the compiled programs

The same command on the same folder resumes. A folder never has two recipes.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from podscale.config.json_types import Json, JsonObject
from podscale.errors import UserError
from podscale.recipe import Recipe, parse_recipe, parse_title, read_recipe_file
from podscale.runs.bucket import find_bucket, resolve_folder
from podscale.storage.files import describe_kind, read_json, read_lines, write_atomically
from podscale.storage.lock import LOCK
from podscale.storage.paths import require_local

CHANGES = ("recipe", "data", "versions")  # values of --allow-changed
CHANGE_FIELDS = (  # fields of plan.json, the change that each belongs to, and how a message describes it
    ("counts", "data", "on other data"),
    ("data_digest", "data", "on other data"),
    ("versions", "versions", "by other libraries"),
)


@dataclass(frozen=True)
class Run:
    """A training's folder and recipe.

    Args:
        folder: the folder; see the module for its files.
        recipe: what is trained in it.

    >>> import tempfile
    >>> from podscale import load_recipe
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> run = Run.create(folder, load_recipe("digits"), plan={}, classes=("0", "1"))
    >>> Run.load(folder).classes()
    ('0', '1')
    """

    folder: Path
    recipe: Recipe

    @classmethod
    def default_folder(cls, recipe: Recipe, model: object = None) -> Path:
        """Return the folder that a recipe is trained in by default: each recipe has its own, so the same one resumes.

        Args:
            recipe: what is trained.
            model: a model of the caller's, if any; its class becomes part of the name.
        """
        suffix = f"-{type(model).__name__}" if model is not None else ""
        return Path("runs") / f"{recipe.name}-{recipe.digest()}{suffix}"

    @classmethod
    def check(cls, folder: Path, recipe: Recipe, allowed: Collection[str] = ()) -> None:
        """Refuse a folder with other content, before anything is written.

        Args:
            folder: the run's.
            recipe: what is to be trained in it.
            allowed: of `CHANGES`, what may have changed since.

        Raises:
            UserError: the folder has another recipe or other files, or is not a local folder.
        """
        for kind in allowed:
            if kind not in CHANGES:
                raise UserError(f"--allow-changed takes {', '.join(CHANGES)}, not {kind!r}")
        require_local(folder, "--run")
        if not str(folder).isprintable():
            raise UserError(
                f"the run folder's name {str(folder)!r} has unprintable characters; choose another with --run"
            )
        _require_working_folder(folder)
        if folder.exists() and not folder.is_dir():
            raise UserError(f"the run folder {folder} is a file; choose another with --run")
        _refuse_special_files(folder)
        if (folder / "recipe.toml").exists():
            differences = _describe_differences(cls.load(folder).recipe, recipe)
            if differences and "recipe" not in allowed:
                raise UserError(f"{folder} holds a run of another recipe ({differences}); {_suggest_options('recipe')}")
        elif folder.exists() and any(path.suffix != ".part" and path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no run; choose another folder with --run")

    @classmethod
    def check_changes(
        cls, folder: Path, plan: JsonObject, classes: tuple[str, ...], allowed: Collection[str] = ()
    ) -> None:
        """Refuse to resume with other data, or other libraries, than the run started with.

        Raises:
            UserError: the message says what differs.
        """
        names, before = read_json(folder / "classes.json"), read_json(folder / "plan.json") or {}
        if names is not None and tuple(names) != classes:
            raise UserError(f"{folder} holds a run on data with other classes; choose another folder with --run")
        for field, kind, how in CHANGE_FIELDS:
            change = _describe_change(before.get(field), plan.get(field))
            if change and kind not in allowed:
                raise UserError(f"{folder} holds a run {how} ({change}); {_suggest_options(kind)}")

    @classmethod
    def check_init(cls, folder: Path, digest: str) -> None:
        """Refuse to resume with other initial weights than the run started from.

        Raises:
            UserError: their digests differ.
        """
        before = read_json(folder / "init.json")
        if before is not None and digest not in ("", before["digest"]):
            change = f"its weights {before['source']} had digest {before['digest']}, now {digest}"
            raise UserError(f"{folder} holds a run that started differently ({change}); {_suggest_options('recipe')}")

    @classmethod
    def create(
        cls,
        folder: Path,
        recipe: Recipe,
        plan: JsonObject,
        classes: tuple[str, ...],
        allowed: Collection[str] = (),
    ) -> "Run":
        """Return the run in a folder, new or resumed, and write its recipe, classes and plan.

        Args:
            folder: the run's; made if it does not exist.
            recipe: what to train.
            plan: `Plan.to_dict()` and facts about the input.
            classes: names, in the order of the model's outputs.
            allowed: of `CHANGES`, what may have changed since the run was last trained.

        Raises:
            UserError: the folder has other content, or cannot be made.
        """
        cls.check(folder, recipe, allowed)
        cls.check_changes(folder, plan, classes, allowed)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the run folder {folder}: {error.strerror}") from None
        write_atomically(folder / "recipe.toml", recipe.to_toml())  # first: it marks the folder as a run's
        write_atomically(folder / "classes.json", json.dumps(list(classes)))
        write_atomically(folder / "plan.json", json.dumps(plan, indent=1))
        return cls(folder, recipe)

    @classmethod
    def read_plan(cls, folder: Path) -> JsonObject | None:
        """Return the plan of the run in a folder; None if there is none, or it is broken."""
        plan = read_json(folder / "plan.json")
        return plan if isinstance(plan, dict) and {"pod", "summation", "bucket_bytes"} <= set(plan) else None

    @classmethod
    def load(cls, folder: str | Path) -> "Run":
        """Return the run in a folder.

        Raises:
            UserError: the folder has no run.
        """
        folder = resolve_folder(folder, "run")
        path = folder / "recipe.toml"
        if not path.is_file():
            where = bucket.location if (bucket := find_bucket(folder)) else folder
            raise UserError(f"there is no run in {where}: it has no recipe.toml")
        text = read_recipe_file(path)
        try:
            return cls(folder, parse_recipe(text, name=parse_title(text) or folder.name))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @classmethod
    def load_newest(cls, under: str | Path = "runs", *, trained: bool = False) -> "Run":
        """Return the run below a folder that was started or resumed last.

        Args:
            under: the folder of the runs.
            trained: only of those that have a checkpoint.

        Raises:
            UserError: there is none.
        """
        paths = sorted(Path(under).glob("*/recipe.toml"), key=lambda p: p.stat().st_mtime)
        if not paths:
            raise UserError(f"there is no run under {under}; train one first, or name its folder with --run")
        folders = [path.parent for path in paths if not trained or _list_checkpoints(path.parent / "checkpoints")]
        if not folders:
            raise UserError(f"no run under {under} has a checkpoint yet; the newest is {paths[-1].parent}")
        return cls.load(folders[-1])

    newest = load_newest  # an earlier name

    @property
    def where(self) -> str:
        """The run as the user names it: its folder, or the URL that the folder is a working copy of."""
        bucket = find_bucket(self.folder)
        return str(bucket.location if bucket else self.folder)

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    def get_bad_images_path(self, process: int) -> Path:
        """Return the file in which a process lists the images that it could not read."""
        return self.folder / f"bad-images-{process}.txt"

    @property
    def programs(self) -> Path:
        """The folder of the compiled programs of a deterministic run."""
        return self.folder / "programs"

    def has_checkpoints(self) -> bool:
        """Return whether there is a checkpoint, intact or not."""
        bucket = find_bucket(self.folder)
        return bool(bucket.refresh().get("steps") if bucket else _list_checkpoints(self.checkpoints))

    def classes(self) -> tuple[str, ...]:
        """Return names of the classes, in the order of the model's outputs."""
        names = read_json(self.folder / "classes.json")
        if names is None:
            raise UserError(f"the run in {self.folder} does not name its classes: classes.json is missing or broken")
        return tuple(names)

    def metrics(self) -> list[JsonObject]:
        """Return all lines of metrics.jsonl.

        Raises:
            UserError: a line is damaged.
        """
        path = self.folder / "metrics.jsonl"
        try:
            return [json.loads(line) for line in read_lines(path)]
        except ValueError:
            raise UserError(f"{path} is damaged: a line of it is not JSON; remove that line to resume") from None

    def summary(self) -> JsonObject:
        """Return summary.json; empty while the run has not ended."""
        return read_json(self.folder / "summary.json") or {}

    def plan(self) -> JsonObject:
        """Return plan.json: how the recipe was last mapped onto a pod.

        Raises:
            UserError: the file is missing or broken.
        """
        plan = read_json(self.folder / "plan.json")
        if not isinstance(plan, dict):
            raise UserError(f"the run in {self.folder} has no plan: plan.json is missing or broken; train it again")
        return plan

    def mistakes(self) -> JsonObject:
        """Return findings.json: which classes the last evaluation mistook for which; empty if that is not known."""
        mistakes = read_json(self.folder / "findings.json")
        is_valid = isinstance(mistakes, dict) and len(mistakes.get("examples", ())) == len(self.classes())
        return mistakes if is_valid else {}

    findings = mistakes  # an earlier name

    def read_bad_images(self) -> list[str]:
        """Return all processes' messages about images that they could not read, without repetitions."""
        files = sorted(self.folder.glob("bad-images-*.txt"))
        return list(dict.fromkeys(message for file in files for message in read_lines(file)))


def _refuse_special_files(folder: Path) -> None:
    """Refuse a run's folder with pipes, sockets or devices in it: to open a pipe may take for ever."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is {describe_kind(path.stat().st_mode)}, not a file of a run; remove it")


def _require_working_folder(folder: Path) -> None:
    try:
        folder.absolute()
    except FileNotFoundError:
        raise UserError(
            f"the working folder, in which the run folder {folder} would be, no longer exists; change to another one, "
            "or give --run an absolute path"
        ) from None


def _describe_change(before: Json, now: Json) -> str:
    """Return what differs, as text; empty if nothing does, or if one of the two is not known."""
    if before is None or now is None or before == now:
        return ""
    if not isinstance(now, dict):
        return f"{before}, now {now}"
    return ", ".join(f"{name} {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name])


def _suggest_options(kind: str) -> str:
    return f"choose another folder with --run, or resume anyway with --allow-changed {kind}"


def _describe_differences(old: Recipe, new: Recipe) -> str:
    """Return what differs, such as "train.seed 0, now 1"; the locations of data and weights may differ."""
    before, after = old.to_dict(), new.to_dict()
    differences = [
        f"{section}.{field} {_format_value(value)}, now {_format_value(after[section][field])}"
        for section, fields in before.items()
        for field, value in fields.items()
        if value != after[section][field] and not _is_location(f"{section}.{field}", value, after[section][field])
    ]
    return "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")


def _is_location(field: str, old: object, new: object) -> bool:
    """Return whether a field only says where something is; its content is compared elsewhere."""
    return field == "data.path" or bool(field == "model.init" and old and new)


def _format_value(value: object) -> object:
    return "none" if value in ("", []) else value


def _list_checkpoints(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a run's folder of them, intact or not."""
    return [path.name for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
