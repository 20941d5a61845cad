"""Published: the model of time beside what others have measured on pods, with the error of every row."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.forecast import chips
from podscale.forecast.compute import RESNET50
from podscale.forecast.model import Forecast, duration, forecast
from podscale.plan import Counts
from podscale.pod import named

IMAGENET = Counts(1_281_167, 50_000, 1000)
EVAL_EPOCHS = 4  # MLPerf's rule
ONE_SUM = Options(bucket_mib=0)  # the TPU compiler joins all sums, unless told otherwise as we do


@dataclass(frozen=True)
class Run:
    """One row of published.toml."""

    name: str
    pod: str
    batch: int
    epochs: float
    seconds: float
    listed: bool
    source: str
    span: int = 64

    @property
    def images_per_s(self) -> float:
        """Averaged over the whole run, evaluations included."""
        return self.epochs * IMAGENET.train / self.seconds


@dataclass(frozen=True)
class Comparison:
    """A published run and its forecast."""

    run: Run
    forecast: Forecast

    @property
    def error(self) -> float:
        """Predicted over published seconds, less one."""
        return self.forecast.train_s / self.run.seconds - 1


def runs() -> list[Run]:
    """All rows of published.toml."""
    return [Run(**row) for row in chips.read_tables(__package__, "published.toml")["run"]]


def compare() -> list[Comparison]:
    """Every published run beside its forecast."""
    return [Comparison(run, _forecast(run)) for run in runs()]


def median_error(found: list[Comparison]) -> float:
    """Of the listed rows, without their signs."""
    return statistics.median(abs(c.error) for c in found if c.run.listed)


def _forecast(run: Run) -> Forecast:
    pod = named(run.pod)
    changes = {
        "batch.size": run.batch,
        "batch.span": run.span,
        "data.lanes": 1,
        "train.epochs": run.epochs,
        "train.eval_epochs": EVAL_EPOCHS,
    }
    recipe = recipes.override(recipes.load("resnet50-imagenet-32k"), changes)
    return forecast(plans.make_plan(recipe, pod, IMAGENET, ONE_SUM), RESNET50)


HEAD = ["run", "pod", "batch", "epochs", "published", "predicted", "error", "limited by"]


def rows(found: list[Comparison]) -> list[list[str]]:
    """The table: listed rows first, as they stand in the file."""
    return [
        [
            c.run.name + ("" if c.run.listed else " *"),
            c.run.pod,
            f"{c.run.batch:,}",
            f"{c.run.epochs:g}",
            duration(c.run.seconds),
            duration(c.forecast.train_s),
            f"{c.error:+.1%}",
            c.forecast.limit,
        ]
        for c in found
    ]


def to_dict(found: list[Comparison]) -> dict[str, Any]:
    """The comparison as plain values, for programs."""
    listed = [c for c in found if c.run.listed]
    return {
        "runs": [asdict(c.run) | {"predicted_s": c.forecast.train_s, "error": c.error} for c in found],
        "median_error": median_error(found),
        "largest_error": max(abs(c.error) for c in listed),
    }
