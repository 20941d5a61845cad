"""Recipe: what is learnt. Data, model, batch, optimizer, schedule, augmentation; nothing about the machine.

A recipe is a TOML file read into a frozen dataclass. The same reader checks files and command-line overrides, so the
same mistake gets the same sentence wherever it is made. A recipe is data: nothing in it is ever executed.
"""

import dataclasses
import hashlib
import json
import math
import tomllib
import typing
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from podscale.config.fields import document_field as _field
from podscale.config.fields import replace_fields
from podscale.config.suggestions import divisors, suggest_names, suggest_numbers
from podscale.errors import UserError


@dataclass(frozen=True)
class Data:
    """Where the pictures come from and what they look like on arrival."""

    source: Literal["digits", "folder", "npz", "tar", "tfrecord", "parquet", "cifar", "mnist"] = _field(
        "digits", "embedded digits, an image folder, an .npz file, a folder of shards, or CIFAR's or MNIST's own files"
    )
    path: str = _field("", "the folder (train/CLASS/FILE and val/CLASS/FILE, or shards) or the .npz file")
    image_size: int = _field(8, "side of the square the model sees, in pixels")
    shrink: int = _field(0, "pictures are first shrunk to at most this many pixels on the longer side; 0: not at all")
    lanes: int = _field(1, "independent shuffles the data set is cut into; a host reads only its own lanes")
    classes: int = _field(0, "number of classes; 0: as found")
    hold_out: float = _field(
        0.0, "share of the training pictures to validate on instead of the validation set; they are not trained on"
    )
    train_samples: int = _field(0, "number of training pictures; 0: as found")
    val_samples: int = _field(0, "number of validation pictures; 0: as found")
    eval_fraction: float = _field(1.0, "share of the shorter side that evaluation's centre crop keeps")
    eval_views: int = _field(
        1, "views that evaluation averages over: 1; 2: and mirrored; 6: both also moved by a pixel along the diagonal"
    )
    bad_share: float = _field(0.001, "share of a split's pictures that may turn out unreadable before the run stops")
    mean: tuple[float, ...] = _field((0.485, 0.456, 0.406), "per-channel mean of pixels in 0..1")
    std: tuple[float, ...] = _field((0.229, 0.224, 0.225), "per-channel standard deviation of pixels in 0..1")


@dataclass(frozen=True)
class Model:
    """The network."""

    name: str = _field("resnet8", "a name that `podscale.models.registry.names()` lists")
    stem: Literal["conv7", "space_to_depth", "small"] = _field(
        "small", "7x7 stride 2 and max-pool; the same function on 2x2 blocks; or 3x3 for small pictures"
    )
    width: int = _field(64, "channels of the first stage")
    precision: Literal["float32", "bfloat16", "float64"] = _field(
        "float32", "of the computation; parameters and statistics are at least float32 (float64 is for checking)"
    )
    init: str = _field("", "weights to begin from: a run's folder, a .safetensors file, or a torch state dict")
    freeze: tuple[str, ...] = _field((), "layers that stay as they are, such as layers.0; body: all but the head")


@dataclass(frozen=True)
class Batch:
    """How many pictures make one update, and how many are normalized together."""

    size: int = _field(128, "pictures per update, over the whole pod")
    span: int = _field(64, "pictures that one batch-norm group averages over")


@dataclass(frozen=True)
class Optimizer:
    """How a gradient becomes an update."""

    name: Literal["lars", "sgd", "adamw", "muon"] = _field("lars", "the update rule")
    form: Literal["mlperf", "scaled", "optax"] = _field("mlperf", "which published form of LARS")
    momentum: float = _field(0.9, "momentum; the first moment's decay for adamw")
    nesterov: bool = _field(False, "Nesterov's momentum (sgd, adamw, muon)")
    weight_decay: float = _field(1e-4, "weight decay")
    trust: float = _field(
        0.001, "trust coefficient of lars; the share of its norm that muon moves a kernel by, at rate 1"
    )
    newton_schulz: int = _field(5, "steps in which muon comes near an orthogonal matrix")
    renormalize: bool = _field(
        False, "muon gives every kernel the norm √outputs before each update, and its update the norm it has by itself"
    )
    rest_momentum: float = _field(0.0, "momentum of what muon leaves to sgd; 0: the same")
    epsilon: float = _field(0.0, "added to denominators (lars, adamw)")
    second_moment: float = _field(0.999, "adamw's second moment's decay")
    skip: tuple[str, ...] = _field(("bias", "scale"), "parameters without weight decay and trust ratio, by last name")
    clip_norm: float = _field(0.0, "gradients are scaled down to this global norm; 0: never")
    average: float = _field(0.0, "decay of the weight average that evaluation uses; 0: no average")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run: linear warm-up to `peak`, then decay to `end`."""

    peak: float = _field(1.0, "learning rate at the end of warm-up, before scaling by the batch")
    bias_peak: float = _field(0.0, "the same for parameters in optimizer.skip; 0: as for all")
    head_peak: float = _field(0.0, "the same for the last layer, but for its bias; 0: as for all")
    stem_epochs: float = _field(
        0.0, "epochs in which the first layer goes through the whole schedule, to stay at its end; 0: all of them"
    )
    scale_batch: int = _field(0, "linear scaling rule: peak is for this batch size; 0: peak is taken as it is")
    warmup_epochs: float = _field(0.0, "epochs of linear warm-up from 0")
    decay: Literal["polynomial", "cosine", "step", "constant"] = _field("polynomial", "shape after warm-up")
    power: float = _field(2.0, "of polynomial decay")
    end: float = _field(1e-4, "learning rate at the end (polynomial, cosine)")
    milestones: tuple[float, ...] = _field((), "epochs at which step decay multiplies by `factor`")
    factor: float = _field(0.1, "of step decay")


@dataclass(frozen=True)
class Augment:
    """What training does to a picture; everything is a function of (seed, pass or step, picture or position)."""

    crop: Literal["resized", "padded", "centre"] = _field(
        "resized", "a random box resized; a random shift inside a padded border; or evaluation's centre crop"
    )
    min_area: float = _field(0.08, "least share of the picture that a resized crop takes")
    max_aspect: float = _field(4 / 3, "largest ratio of a resized crop's sides")
    padding: int = _field(4, "border of a padded crop, in pixels (reflected)")
    flip: bool = _field(True, "mirror each picture with a chance of one half")
    alternate: bool = _field(False, "flip: that chance holds in the first pass; then mirrored and not take turns")
    randaugment: int = _field(0, "RandAugment operations per picture; 0: none")
    magnitude: float = _field(9.0, "strength of RandAugment, 0 to 30")
    mixup: float = _field(0.0, "alpha of mixup between positions 2k and 2k+1; 0: none")
    erase: float = _field(0.0, "chance that a random rectangle is erased")
    label_smoothing: float = _field(0.0, "share of the target spread over all classes")


@dataclass(frozen=True)
class Train:
    """How long, how often evaluated, from which seed."""

    epochs: float = _field(10.0, "passes over the training pictures")
    seed: int = _field(0, "of everything random")
    eval_epochs: float = _field(1.0, "epochs between evaluations")
    stats_momentum: float = _field(0.9, "decay of the running batch-norm statistics, per update")
    bad_updates: int = _field(
        10, "updates in a row without a number, after which the run goes back and leaves their batches out; 0: never"
    )


@dataclass(frozen=True)
class Recipe:
    """All that decides what is learnt.

    >>> load("digits").batch.size
    128
    >>> override(load("digits"), {"batch.size": 256, "train.seed": 1}).train.seed
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

    def override(self, changes: dict[str, Any]) -> "Recipe":
        """A copy with `{"section.field": value}` applied; see the function of that name."""
        return override(self, changes)

    def to_dict(self) -> dict[str, Any]:
        """Sections and fields as plain JSON-ready values, without the name and the text that describe them."""
        return {section: _plain(getattr(self, section)) for section in SECTIONS}

    def to_toml(self) -> str:
        """The recipe as a file that `load` reads back."""
        lines = [f"# {line}".rstrip() for line in (f"recipe: {self.name}", *self.doc.splitlines())]
        for section, fields in self.to_dict().items():
            lines += [
                "",
                f"[{section}]",
                *(f"{key} = {_toml(value)}" for key, value in fields.items()),
            ]
        return "\n".join(lines) + "\n"

    def digest(self) -> str:
        """Eight hex digits that change with anything that changes what is learnt."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]

    def steps(self, samples: int, epochs: float | Fraction | None = None) -> int:
        """Updates over so many epochs, by default the whole run: ceil(epochs * samples / batch).

        `epochs` is taken as the decimal it prints as.

        >>> override(load("digits"), {"train.epochs": 1.1, "batch.size": 100, "batch.span": 50}).steps(1000)
        11
        """
        epochs = self.train.epochs if epochs is None else epochs
        return math.ceil(Fraction(str(epochs)) * samples / self.batch.size)


SECTIONS: dict[str, type] = {
    f.name: typing.get_type_hints(Recipe)[f.name]
    for f in dataclasses.fields(Recipe)
    if dataclasses.is_dataclass(typing.get_type_hints(Recipe)[f.name])
}


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character JSON lets pass


def _plain(section: Any) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(section).items()}


# --- reading -----------------------------------------------------------------------------------------------------


def presets() -> dict[str, str]:
    """Names of the recipes that come with the package, each with the text that opens its file."""
    files = (f for f in resources.files("podscale.recipes").iterdir() if f.name.endswith(".toml"))
    return {f.name[:-5]: opening_comment(f.read_text()) for f in sorted(files, key=lambda f: f.name)}


def load(name: str | Path = "digits") -> Recipe:
    """The preset of that name, or the recipe in that TOML file."""
    text, stem = _text(str(name))
    return parse(text, name=stem)


def _text(name: str) -> tuple[str, str]:
    if name.endswith(".toml"):
        return read(Path(name)), Path(name).stem
    if name not in presets():
        raise UserError(f"there is no recipe {name!r}: {suggest_names(name, presets())}")
    return resources.files("podscale.recipes").joinpath(f"{name}.toml").read_text(), name


def read(path: Path, what: str = "recipe") -> str:
    """The text of a recipe file."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UserError(f"there is no {what} file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read the {what} file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the {what} file {path} is not text in UTF-8") from None


def parse(text: str, name: str = "unnamed") -> Recipe:
    """A recipe from TOML text: tables named like the sections, keys named like their fields."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"recipe {name} is not valid TOML: {error}") from None
    changes: dict[str, Any] = {}
    for section, fields in tables.items():
        if not isinstance(fields, dict):
            raise UserError(f"recipe {name}: {section!r} stands outside any section; the sections are {_listed()}")
        _known_section(section)
        changes |= {f"{section}.{key}": value for key, value in fields.items()}
    return override(Recipe(name=name, doc=opening_comment(text)), changes)


def override(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """A copy of `recipe` with `{"section.field": value}` applied; values are checked, text is read as TOML."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in changes.items():
        section, _, field = dotted.partition(".")
        _known_section(section)
        sections.setdefault(section, {})[field] = value
    return dataclasses.replace(
        recipe, **{name: replace_fields(getattr(recipe, name), name, values) for name, values in sections.items()}
    )


def _known_section(name: str) -> None:
    if name not in SECTIONS:
        raise UserError(f"a recipe has no section {name!r}: {suggest_names(name, SECTIONS)}")


def _listed() -> str:
    return ", ".join(SECTIONS)


def title(text: str) -> str:
    """The name that `to_toml` wrote into a recipe's first line; empty for a file written by hand."""
    first = text.partition("\n")[0]
    return first.removeprefix("# recipe: ") if first.startswith("# recipe: ") else ""


def opening_comment(text: str) -> str:
    """What a file says about itself at its top."""
    text = text.removeprefix(f"# recipe: {title(text)}\n")
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    return "\n".join(lines).strip("\n")


# --- what cannot be, whatever the machine --------------------------------------------------------------------------


def _check(recipe: Recipe) -> None:
    _check_ranges(recipe)
    size, span, lanes = recipe.batch.size, recipe.batch.span, recipe.data.lanes
    for field, part in (("batch.span", span), ("data.lanes", lanes)):
        if size % part:
            hint = suggest_numbers(part, divisors(size))
            raise UserError(f"{field} {part} does not divide batch.size {size}; {hint}")
    for field in ("mean", "std"):
        if len(getattr(recipe.data, field)) != 3:
            raise UserError(f"data.{field} needs three numbers, one a channel, not {getattr(recipe.data, field)}")
    if recipe.data.eval_views not in (1, 2, 6):
        raise UserError(f"data.eval_views must be 1, 2 or 6, not {recipe.data.eval_views}")
    if recipe.augment.alternate and not recipe.augment.flip:
        raise UserError("augment.alternate says how to mirror, but augment.flip is false; set it true")
    if recipe.schedule.peak == 0 and (recipe.schedule.bias_peak or recipe.schedule.head_peak):
        raise UserError("schedule.bias_peak and head_peak share the shape of schedule.peak, which must not be 0 then")


_AT_LEAST_ONE = ("data.image_size data.lanes model.width batch.size batch.span optimizer.newton_schulz").split()
_POSITIVE = ("train.epochs", "train.eval_epochs", "data.std", "data.eval_fraction", "schedule.power")
_SHARES = (
    "data.eval_fraction data.bad_share data.hold_out optimizer.momentum optimizer.rest_momentum "
    "optimizer.second_moment optimizer.average "
    "augment.min_area augment.erase augment.label_smoothing train.stats_momentum"
).split()
_AT_LEAST_ZERO = (
    "data.shrink data.classes data.train_samples data.val_samples optimizer.weight_decay optimizer.trust "
    "optimizer.epsilon optimizer.clip_norm schedule.peak schedule.end schedule.scale_batch schedule.warmup_epochs "
    "schedule.bias_peak schedule.head_peak schedule.stem_epochs schedule.factor "
    "augment.padding augment.randaugment augment.magnitude augment.mixup train.seed "
    "train.bad_updates"
).split()


def _check_ranges(recipe: Recipe) -> None:
    def require(fields: typing.Iterable[str], holds: typing.Callable[[float], bool], words: str) -> None:
        for dotted in fields:
            section, field = dotted.split(".")
            value = getattr(getattr(recipe, section), field)
            for number in value if isinstance(value, tuple) else (value,):
                if not holds(number):
                    raise UserError(f"{dotted} must be {words}, not {number}")

    require(_AT_LEAST_ONE, lambda v: v >= 1, "at least 1")
    require(_POSITIVE, lambda v: 0 < v < float("inf"), "above 0")
    require(_SHARES, lambda v: 0 <= v <= 1, "between 0 and 1")
    require(_AT_LEAST_ZERO, lambda v: 0 <= v < float("inf"), "0 or more")
    require(["data.mean"], math.isfinite, "finite")
    require(["schedule.milestones"], lambda v: 0 <= v < float("inf"), "0 or more")
    require(["train.seed"], lambda v: v < 2**32, "below 2**32")
    require(["batch.size"], lambda v: v <= 2**24, "at most 2**24")
    require(["augment.max_aspect"], lambda v: 1 <= v < float("inf"), "at least 1")
    require(["augment.magnitude"], lambda v: v <= 30, "at most 30")
