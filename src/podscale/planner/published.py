"""Compare the model of time with published trainings on pods, with the error of every row."""

import re
import statistics
import zlib
from dataclasses import asdict, dataclass

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.forecast import chips
from podscale.forecast.compute import RESNET50
from podscale.forecast.model import Forecast, format_duration, make_forecast
from podscale.forecast.software import Software
from podscale.plan import Counts, Plan
from podscale.pod import CHIPS, parse_pod

IMAGENET = Counts(1_281_167, 50_000, 1000)
EVAL_EPOCHS = 4  # MLPerf's rule
PAPER = "paper"  # the round of a run that is not MLPerf's
OPTIONS = ("summation", "payload", "bucket_mib")  # that a row of [[software]] may set


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
    span: int = 64  # 0: each device's own images
    evals: int = 0  # 0: one every fourth epoch

    @property
    def round(self) -> str:
        """MLPerf's round, such as "0.7"."""
        match = re.search(r"\b\d\.\d\b", self.name)
        return match[0] if match else PAPER

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


def load_runs(part: str = "known") -> list[PublishedRun]:
    """Return one part of published.toml, without rows on chips that have no forecast.

    Args:
        part: "known" for the rows of [[run]], "first" or "second" for a half of MLPerf's.
    """
    tables = chips.read_tables(__package__, "published.toml")
    if part == "known":
        return [PublishedRun(**row) for row in tables["run"]]
    known = tables["mlperf"]["known"]
    return [
        _read_result(row) for row in tables["mlperf"]["rows"] if "pod" in row and find_half(row["id"], known) == part
    ]


def find_half(name: str, known: list[str]) -> str:
    """Return the half of a row: the parity of its id's CRC-32 decides, unless the row was known before the rule.

    >>> find_half("1.0/Google/tpu-v4-128-TF", known=[])
    'first'
    """
    return "first" if name in known or zlib.crc32(name.encode()) % 2 == 0 else "second"


def _read_result(row: JsonObject) -> PublishedRun:
    fields = {name: row[name] for name in ("batch", "epochs", "seconds", "evals")}
    fields["pod"] = _name_pod(row["pod"], row["chip"])
    source = f"mlcommons/training_results_v{row['id'].partition('/')[0]}: {row['log']}"
    return PublishedRun(name=row["id"], span=row.get("span", 0), listed=True, source=source, **fields)


def _name_pod(pod: str, chip: str) -> str:
    """Return the pod with the kind of chip that has as much memory as the system description says.

    >>> _name_pod("a100:2x8", "A100-SXM4-80GB (400W)"), _name_pod("a100:2x8", "A100-SXM4-40GB")
    ('a100-80gb:2x8', 'a100:2x8')
    """
    kind, _, shape = pod.partition(":")
    memory = re.search(r"\d+GB", chip)
    variant = f"{kind}-{memory[0].lower()}" if memory else kind
    return f"{variant if variant in CHIPS else kind}:{shape}"


def find_software(run: PublishedRun) -> tuple[Software, Options]:
    """Return the program of a published run, and the options of its plan.

    Raises:
        UserError: published.toml describes no program for it.
    """
    family = "gpu" if parse_pod(run.pod).is_gpu_cluster else "tpu"
    for row in chips.read_tables(__package__, "published.toml")["software"]:
        if row["family"] == family and run.round in row["rounds"]:
            facts = {name: row[name] for name in row if name in Software.__dataclass_fields__}
            return Software(**facts), Options(**{name: row[name] for name in OPTIONS if name in row})
    raise UserError(f"published.toml describes no program of {run.name}")


def compare_runs(part: str = "known") -> list[Comparison]:
    """Return every published run of a part with its forecast."""
    return [Comparison(run, _forecast_run(run)) for run in load_runs(part)]


def compute_median_error(comparisons: list[Comparison]) -> float:
    """Return the median absolute error of the listed rows."""
    return statistics.median(abs(c.error) for c in comparisons if c.run.listed)


def _forecast_run(run: PublishedRun) -> Forecast:
    return make_forecast(plan_run(run), RESNET50, find_software(run)[0])


def plan_run(run: PublishedRun) -> Plan:
    """Return the plan of a published run, with the options of its program."""
    pod = parse_pod(run.pod)
    changes = {
        "batch.size": run.batch,
        "batch.span": run.span or run.batch // pod.size,
        "data.lanes": 1,
        "train.epochs": run.epochs,
        "train.eval_epochs": round(run.epochs / run.evals) if run.evals else EVAL_EPOCHS,
    }
    recipe = recipes.override_recipe(recipes.load_recipe("resnet50-imagenet-32k"), changes)
    return plans.make_plan(recipe, pod, IMAGENET, find_software(run)[1])


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
