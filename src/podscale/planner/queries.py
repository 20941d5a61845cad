"""Plan, search and plot for pods, as `podscale plan` asks: rows of a table, and values for JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.data.index import catalog
from podscale.data.index.bucket_index import has_stored_index
from podscale.data.index.dataset import Splits
from podscale.errors import UserError
from podscale.forecast import bucket, chips, model
from podscale.forecast.compute import Work, count_work
from podscale.plan import Plan
from podscale.planner import compile, plot, published, search, topologies
from podscale.pod import Pod
from podscale.recipe import Recipe
from podscale.storage.files import write_atomically
from podscale.storage.locations import has_scheme, parse_location
from podscale.storage.paths import require_local
from podscale.storage.prices import READ_USD
from podscale.training import setup


class QueryResult(NamedTuple):
    """Names and values for a table, and the same as a dictionary for JSON."""

    rows: list[tuple[str, str]]
    values: JsonObject


def plan_on_pod(
    recipe: Recipe, pod: Pod, options: Options, compiles: bool = True, read_usd: float = READ_USD
) -> QueryResult:
    """Plan a recipe on a pod, predict its times, and compile it where there is a compiler for a pod not available.

    Args:
        recipe: what to train.
        pod: where; it need not be available.
        options: machine options.
        compiles: whether to compile the training step for a pod that is not available.
        read_usd: price of a million reads of a bucket, if the data is in one.
    """
    splits = setup.open_uncounted(recipe.data)
    plan = setup.plan_counts(recipe, pod, options, setup.count_samples(recipe.data, splits))
    work = count_work(recipe.override({"model.remat": plan.options.remat == "on"}), plan.counts.classes)
    rows, values, images_per_s = plan.rows(), plan.to_dict() | {"recipe": recipe.name}, 0.0
    if chips.find_chip(pod.kind) is not None:
        forecast = model.make_forecast(plan, work)
        rows += model.format_rows(forecast)
        values["forecast"] = model.to_dict(forecast)
        images_per_s = recipe.batch.size / forecast.device_s
    if has_scheme(recipe.data.path) and recipe.data.source in catalog.FORMATS:
        load = bucket.BucketLoad(plan, _describe_bucket(recipe, splits), images_per_s)
        rows += bucket.format_rows(load, read_usd)
        values["bucket"] = bucket.to_dict(load, read_usd)
    if compiles and not pod.is_present:
        compiler_rows, values["compiled"] = _compile(plan)
        rows += compiler_rows
    return QueryResult(rows, values)


def _describe_bucket(recipe: Recipe, splits: Splits | None) -> bucket.Contents:
    """Return what a data set in a bucket consists of; by the recipe's counts alone if these made the plan."""
    data = recipe.data
    parse_location(data.path, "data.path")
    if splits is None:
        return bucket.Contents(data.source, data.train_samples, data.val_samples)
    return bucket.describe_contents(data.source, splits, has_index=has_stored_index(data.path))


def _compile(plan: Plan) -> tuple[list[tuple[str, str]], JsonObject]:
    """Return the compiler's report as rows and values; if nothing can be compiled, the reason as one row."""
    reason = topologies.explain_no_compiler(plan.pod)
    if not reason:
        try:
            report = compile.compile_plan(plan)
        except UserError as error:
            reason = str(error)
        else:
            return compile.format_rows(report), asdict(report) | {"fits": report.fits}
    return [("compiled", reason)], {"why_not": reason}


# --- many pods at once -----------------------------------------------------------------------------------------------


def search_pods(recipe: Recipe, kind: str, chip_hours: float) -> tuple[list[list[str]], JsonObject]:
    """Return a table and values of the pods of a kind that train the recipe faster than every smaller pod.

    Args:
        recipe: what to train.
        kind: "KIND" or "KIND:CHIPS".
        chip_hours: the largest number of chip-hours; 0 for no limit.
    """
    request = search.SearchRequest.parse(kind, chip_hours)
    plan, work = _count_needs(recipe, request.kind)
    forecasts = search.find_fastest_pods(request, recipe, plan.counts, plan.memory, work)
    values = [
        {"pod": f"{f.plan.pod.kind}:{search.format_shape(f.plan.pod)}", "recipe": f.plan.recipe.name}
        | {"tile": list(f.plan.tile), "summation": f.plan.options.summation, "micro_batches": f.plan.micro_batches}
        | model.to_dict(f)
        for f in forecasts
    ]
    return search.format_rows(forecasts), {"found": values}


def write_scaling_plot(recipe: Recipe, kind: str, path: str) -> JsonObject:
    """Write a plot of how a recipe scales on a kind of chip to an SVG file."""
    require_local(path, "--plot")
    plan, work = _count_needs(recipe, kind)
    forecasts = search.find_best_by_chips(search.SearchRequest(kind), recipe, plan.counts, plan.memory, work)
    title = f"{recipe.model.name} on {kind}, the best plan for each number of chips"
    text = plot.draw_scaling(forecasts, published.load_runs(), title)
    try:
        write_atomically(Path(path), text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return {"plot": path, "chips": [f.plan.pod.rows * f.plan.pod.cols for f in forecasts]}


def _count_needs(recipe: Recipe, kind: str) -> tuple[Plan, Work]:
    """Return a plan with the recipe's counts and memory, and its model's work, which is the same on every pod.

    The plan is for one device, so the memory is that of whole arrays.
    """
    chips.get_chip(kind)
    plan = setup.plan_recipe(recipe, Pod("cpu", 1, 1), Options())
    return plan, count_work(recipe, plan.counts.classes)
