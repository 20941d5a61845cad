"""Ranges of a recipe's numbers: the same on all machines, each field by itself."""

import math
from collections.abc import Callable, Iterable

from podscale.errors import UserError


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split())


_AT_LEAST_ONE = _split(
    "data.image_size data.train_sizes data.lanes data.max_image_mib model.width model.patch batch.size batch.span "
    "optimizer.newton_schulz"
)
_POSITIVE = (
    "train.epochs",
    "train.eval_epochs",
    "data.std",
    "data.eval_fraction",
    "schedule.power",
    "schedule.layer_decay",
    "schedule.decay_epochs",
)
_SHARES = _split(
    "data.eval_fraction data.eval_confidence data.bad_share data.hold_out optimizer.momentum optimizer.rest_momentum "
    "optimizer.second_moment optimizer.average "
    "model.dropout model.drop_path schedule.layer_decay augment.cutmix_chance "
    "augment.min_area augment.erase augment.label_smoothing train.stats_momentum"
)
_AT_LEAST_ZERO = _split(
    "data.shrink data.classes data.train_samples data.val_samples model.norm_epsilon optimizer.weight_decay "
    "optimizer.trust "
    "optimizer.epsilon optimizer.clip_norm schedule.peak schedule.end schedule.scale_batch schedule.warmup_epochs "
    "schedule.bias_peak schedule.head_peak schedule.stem_epochs schedule.factor "
    "augment.padding augment.randaugment augment.magnitude augment.mixup augment.cutmix "
    "augment.brightness augment.contrast train.seed train.bad_updates"
)


def check_ranges(recipe: object) -> None:
    """Refuse a recipe with a value out of range.

    Raises:
        UserError: the message names the field, the range and the value.
    """

    def require(fields: Iterable[str], is_valid: Callable[[float], bool], description: str) -> None:
        for dotted in fields:
            section, field = dotted.split(".")
            value = getattr(getattr(recipe, section), field)
            for number in value if isinstance(value, tuple) else (value,):
                if not is_valid(number):
                    raise UserError(f"{dotted} must be {description}, not {number}")

    require(_AT_LEAST_ONE, lambda v: v >= 1, "at least 1")
    require(_POSITIVE, lambda v: 0 < v < float("inf"), "above 0")
    require(_SHARES, lambda v: 0 <= v <= 1, "between 0 and 1")
    require(_AT_LEAST_ZERO, lambda v: 0 <= v < float("inf"), "0 or more")
    require(["data.mean"], math.isfinite, "finite")
    require(["schedule.milestones"], lambda v: 0 <= v < float("inf"), "0 or more")
    require(["train.seed"], lambda v: v < 2**32, "below 2**32")
    require(["data.max_image_mib"], lambda v: v <= 2**20, "at most 2**20")
    require(["batch.size"], lambda v: v <= 2**24, "at most 2**24")
    require(["data.image_size", "data.train_sizes", "model.width"], lambda v: v <= 2**14, "at most 2**14")
    require(["augment.max_aspect"], lambda v: 1 <= v < float("inf"), "at least 1")
    require(["model.dropout", "model.drop_path"], lambda v: v < 1, "below 1")
    require(["train.class_weights"], lambda v: 0 <= v < float("inf"), "0 or more")
    require(["augment.magnitude"], lambda v: v <= 30, "at most 30")
