"""Recipe: what to train. Data, model, batch, optimizer, schedule, augmentation; nothing about the machine.

A recipe is a TOML file read into a frozen dataclass. The same functions check files and command-line overrides, so the
same mistake gets the same message wherever it is made. A recipe is data: nothing in it is ever executed.
"""

import dataclasses
import hashlib
import json
import math
import typing
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from podscale.config.fields import document_field as _field
from podscale.config.fields import replace_fields
from podscale.config.ranges import check_ranges
from podscale.config.suggestions import list_divisors, suggest_names, suggest_numbers
from podscale.config.toml import MAX_TOML_BYTES, format_toml, parse_toml
from podscale.errors import UserError
from podscale.storage.files import read_text


@dataclass(frozen=True)
class Data:
    """Where the images come from and how they are prepared."""

    source: Literal["digits", "folder", "npz", "tar", "tfrecord", "parquet", "cifar", "mnist"] = _field(
        "digits", "embedded digits, an image folder, an .npz file, a folder of shards, or CIFAR's or MNIST's own files"
    )
    path: str = _field("", "the folder (train/CLASS/FILE and val/CLASS/FILE, or shards) or the .npz file")
    image_size: int = _field(8, "side of the square the model sees, in pixels")
    shrink: int = _field(0, "images are first shrunk to at most this many pixels on the longer side; 0: not at all")
    lanes: int = _field(1, "independent shuffles that the data set is split into; a host reads only its own lanes")
    classes: int = _field(0, "number of classes; 0: as found")
    hold_out: float = _field(
        0.0, "share of the training images to validate on instead of the validation set; they are not trained on"
    )
    train_samples: int = _field(0, "number of training images; 0: as found")
    val_samples: int = _field(0, "number of validation images; 0: as found")
    eval_fraction: float = _field(1.0, "share of the shorter side that evaluation's centre crop keeps")
    eval_views: int = _field(
        1, "views that evaluation averages over: 1; 2: and mirrored; 6: both also moved by a pixel along the diagonal"
    )
    max_image_mib: int = _field(1024, "memory that decoding one image may take, in MiB; larger ones count as bad")
    eval_confidence: float = _field(
        1.0, "further views only of images whose first view has a class of lower probability; 1: of all"
    )
    bad_share: float = _field(0.001, "share of a split's images that may turn out unreadable before the run stops")
    mean: tuple[float, ...] = _field((0.485, 0.456, 0.406), "per-channel mean of pixels in 0..1")
    std: tuple[float, ...] = _field((0.229, 0.224, 0.225), "per-channel standard deviation of pixels in 0..1")

    @property
    def max_image_bytes(self) -> int:
        """Memory that decoding one image may take, in bytes."""
        return self.max_image_mib * 2**20


@dataclass(frozen=True)
class Model:
    """The network."""

    name: str = _field("resnet8", "a name that `podscale.models.registry.list_models()` lists")
    stem: Literal["conv7", "space_to_depth", "small"] = _field(
        "small", "7x7 stride 2 and max-pool; the same function on 2x2 blocks; or 3x3 for small images"
    )
    activation: Literal["default", "cubic_gelu"] = _field(
        "default", "ReLU of ResNets and GELU of cifarnet; or a cubic that is close to GELU and faster (cifarnet)"
    )
    width: int = _field(64, "channels of the first stage")
    precision: Literal["float32", "bfloat16", "float64"] = _field(
        "float32", "of the computation; parameters and statistics are at least float32 (float64 is for checking)"
    )
    init: str = _field("", "weights to start from: a run's folder, a .safetensors file, or a torch state dict")
    freeze: tuple[str, ...] = _field((), "layers that stay as they are, such as layers.0; body: all but the head")


@dataclass(frozen=True)
class Batch:
    """How many images make one update, and how many are normalized together."""

    size: int = _field(128, "images per update, over the whole pod")
    span: int = _field(64, "images that one batch-norm group averages over")


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
    """How training augments an image; everything is a function of (seed, pass or step, image or position)."""

    crop: Literal["resized", "padded", "centre"] = _field(
        "resized", "a random box resized; a random shift inside a padded border; or evaluation's centre crop"
    )
    min_area: float = _field(0.08, "least share of the image that a resized crop takes")
    max_aspect: float = _field(4 / 3, "largest ratio of a resized crop's sides")
    padding: int = _field(4, "border of a padded crop, in pixels (reflected)")
    flip: bool = _field(True, "flip each image with a chance of one half")
    alternate: bool = _field(False, "flip: that chance holds in the first pass; then mirrored and not take turns")
    randaugment: int = _field(0, "RandAugment operations per image; 0: none")
    magnitude: float = _field(9.0, "strength of RandAugment, 0 to 30")
    mixup: float = _field(0.0, "alpha of mixup between positions 2k and 2k+1; 0: none")
    erase: float = _field(0.0, "chance that a random rectangle is erased")
    brightness: float = _field(0.0, "largest shift of all normalized pixels of an image; 0: none")
    contrast: float = _field(0.0, "largest deviation from 1 of the factor that they are then multiplied by; 0: none")
    label_smoothing: float = _field(0.0, "share of the target spread over all classes")


@dataclass(frozen=True)
class Train:
    """How long to train, how often to evaluate, from which seed."""

    epochs: float = _field(10.0, "passes over the training images")
    seed: int = _field(0, "of everything random")
    eval_epochs: float = _field(1.0, "epochs between evaluations")
    stats_momentum: float = _field(0.9, "decay of the running batch-norm statistics, per update")
    bad_updates: int = _field(
        10, "consecutive non-finite updates before the run rolls back and skips their batches; 0: never"
    )


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

    def override(self, changes: dict[str, Any]) -> "Recipe":
        """Return a copy with `{"section.field": value}` applied; see `override_recipe`."""
        return override_recipe(self, changes)

    def to_dict(self) -> dict[str, Any]:
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
            if sections[section][field] == getattr(SECTIONS[section], field):
                del sections[section][field]
        return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:8]

    def steps(self, samples: int, epochs: float | Fraction | None = None) -> int:
        """Return the number of updates: ceil(epochs * samples / batch).

        Args:
            samples: number of training images.
            epochs: passes over them, taken as the decimal that it prints as; None: the whole run.

        >>> load_recipe("digits").override({"train.epochs": 1.1, "batch.size": 100, "batch.span": 50}).steps(1000)
        11
        """
        epochs = self.train.epochs if epochs is None else epochs
        return math.ceil(Fraction(str(epochs)) * samples / self.batch.size)


SECTIONS: dict[str, type] = {
    f.name: typing.get_type_hints(Recipe)[f.name]
    for f in dataclasses.fields(Recipe)
    if dataclasses.is_dataclass(typing.get_type_hints(Recipe)[f.name])
}
# Younger than the run folders that digests name: at their defaults they are no part of a digest.
NEW_FIELDS = "data.max_image_mib data.eval_confidence model.activation augment.brightness augment.contrast".split()


# --- reading -----------------------------------------------------------------------------------------------------


def list_presets() -> dict[str, str]:
    """Return the recipes that come with the package: the comment that opens each file, by name.

    Returns:
        {name: comment}, sorted by name.

    >>> "digits" in list_presets()
    True
    """
    files = (f for f in resources.files("podscale.recipes").iterdir() if f.name.endswith(".toml"))
    return {f.name[:-5]: parse_opening_comment(f.read_text()) for f in sorted(files, key=lambda f: f.name)}


def load_recipe(name: str | Path = "digits") -> Recipe:
    """Return a preset, or the recipe in a TOML file.

    Args:
        name: a name that `list_presets` returns, or a path that ends in .toml.

    Returns:
        The recipe, checked.

    Raises:
        UserError: there is no such preset or file, or it is not a valid recipe.

    >>> load_recipe("digits").model.name
    'resnet8'
    """
    text, stem = _read_text(str(name))
    return parse_recipe(text, name=stem)


def _read_text(name: str) -> tuple[str, str]:
    if name.endswith(".toml"):
        return read_recipe_file(Path(name)), Path(name).stem
    if name not in list_presets():
        raise UserError(f"there is no recipe {name!r}: {suggest_names(name, list_presets())}")
    return resources.files("podscale.recipes").joinpath(f"{name}.toml").read_text(), name


def read_recipe_file(path: Path, kind: str = "recipe") -> str:
    """Return the text of a recipe file.

    Args:
        path: the file.
        kind: what messages call it.

    Raises:
        UserError: the file is missing, unreadable, too large or not UTF-8.
    """
    try:
        return read_text(path, MAX_TOML_BYTES)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UserError(f"there is no {kind} file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read the {kind} file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the {kind} file {path} is not text in UTF-8") from None


def parse_recipe(text: str, name: str = "unnamed") -> Recipe:
    """Return the recipe in a TOML text: tables are named like the sections, keys like their fields.

    Raises:
        UserError: the text is not TOML, or not a valid recipe.
    """
    tables = parse_toml(text, f"recipe {name}")
    changes: dict[str, Any] = {}
    for section, fields in tables.items():
        if not isinstance(fields, dict):
            raise UserError(
                f"recipe {name}: {section!r} stands outside any section; the sections are {', '.join(SECTIONS)}"
            )
        _require_section(section)
        changes |= {f"{section}.{key}": value for key, value in fields.items()}
    return override_recipe(Recipe(name=name, doc=parse_opening_comment(text)), changes)


def override_recipe(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """Return a copy of `recipe` with changes applied.

    Args:
        recipe: the recipe to start from.
        changes: {"section.field": value}; values are checked, text is read as TOML.

    Raises:
        UserError: there is no such field, or a value is not valid.

    >>> override_recipe(Recipe(), {"train.epochs": "2.5"}).train.epochs
    2.5
    """
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in changes.items():
        section, _, field = dotted.partition(".")
        _require_section(section)
        sections.setdefault(section, {})[field] = value
    return dataclasses.replace(
        recipe, **{name: replace_fields(getattr(recipe, name), name, values) for name, values in sections.items()}
    )


def _require_section(name: str) -> None:
    if name not in SECTIONS:
        raise UserError(f"a recipe has no section {name!r}: {suggest_names(name, SECTIONS)}")


def parse_title(text: str) -> str:
    """Return the name that `to_toml` wrote into a recipe's first line; empty for a file written by hand."""
    first = text.partition("\n")[0]
    return first.removeprefix("# recipe: ") if first.startswith("# recipe: ") else ""


def parse_opening_comment(text: str) -> str:
    """Return the comment that opens a file."""
    text = text.removeprefix(f"# recipe: {parse_title(text)}\n")
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    return "\n".join(lines).strip("\n")


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
            raise UserError(f"data.{field} needs three numbers, one a channel, not {getattr(recipe.data, field)}")
    if recipe.data.eval_views not in (1, 2, 6):
        raise UserError(f"data.eval_views must be 1, 2 or 6, not {recipe.data.eval_views}")
    if recipe.augment.alternate and not recipe.augment.flip:
        raise UserError("augment.alternate says how to flip, but augment.flip is false; set it true")
    if recipe.schedule.peak == 0 and (recipe.schedule.bias_peak or recipe.schedule.head_peak):
        raise UserError("schedule.bias_peak and head_peak share the shape of schedule.peak, which must not be 0 then")
