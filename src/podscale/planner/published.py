"""Compare the model of time with published trainings on pods, with the error of every row."""

import statistics
from dataclasses import asdict, dataclass

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.forecast import chips
from podscale.forecast.compute import RESNET50
from podscale.forecast.model import Forecast, format_duration, make_forecast
from podscale.plan import Counts
from podscale.pod import named_pod

IMAGENET = Counts(1_281_167, 50_000, 1000)
EVAL_EPOCHS = 4  # MLPerf's rule
ONE_SUM = Options(bucket_mib=0)  # the TPU compiler joins all sums unless it is given a limit, as podscale gives it


@dataclass(frozen=True)
class PublishedRun:
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
        """The average over the whole run, evaluations included."""
        return self.epochs * IMAGENET.train / self.seconds


@dataclass(frozen=True)
class Comparison:
    """A published run and its forecast."""

    run: PublishedRun
    forecast: Forecast

    @property
    def error(self) -> float:
        """Predicted over published seconds, minus one."""
        return self.forecast.train_s / self.run.seconds - 1


def load_runs() -> list[PublishedRun]:
    """Return all rows of published.toml."""
    return [PublishedRun(**row) for row in chips.read_tables(__package__, "published.toml")["run"]]


def compare_runs() -> list[Comparison]:
    """Return every published run with its forecast."""
    return [Comparison(run, _forecast_run(run)) for run in load_runs()]


def compute_median_error(comparisons: list[Comparison]) -> float:
    """Return the median absolute error of the listed rows."""
    return statistics.median(abs(c.error) for c in comparisons if c.run.listed)


def _forecast_run(run: PublishedRun) -> Forecast:
    pod = named_pod(run.pod)
    changes = {
        "batch.size": run.batch,
        "batch.span": run.span,
        "data.lanes": 1,
        "train.epochs": run.epochs,
        "train.eval_epochs": EVAL_EPOCHS,
    }
    recipe = recipes.override_recipe(recipes.load_recipe("resnet50-imagenet-32k"), changes)
    return make_forecast(plans.make_plan(recipe, pod, IMAGENET, ONE_SUM), RESNET50)


HEADER = ("run", "pod", "batch", "epochs", "published", "predicted", "error", "limited by")


def format_rows(comparisons: list[Comparison]) -> list[list[str]]:
    """Return the rows of the table, in the order of the file; a * marks those that are not listed."""
    return [
        [
            c.run.name + ("" if c.run.listed else " *"),
            c.run.pod,
            f"{c.run.batch:,}",
            f"{c.run.epochs:g}",
            format_duration(c.run.seconds),
            format_duration(c.forecast.train_s),
            f"{c.error:+.1%}",
            c.forecast.limit,
        ]
        for c in comparisons
    ]


def to_dict(comparisons: list[Comparison]) -> JsonObject:
    """Return the comparison as a dictionary of plain values, for JSON."""
    listed = [c for c in comparisons if c.run.listed]
    return {
        "runs": [asdict(c.run) | {"predicted_s": c.forecast.train_s, "error": c.error} for c in comparisons],
        "median_error": compute_median_error(comparisons),
        "largest_error": max(abs(c.error) for c in listed),
    }
