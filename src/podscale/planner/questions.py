"""Answer the questions of `podscale plan` about pods, as rows of a table and as values for JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.forecast import chips, model
from podscale.forecast.compute import Work, count_work
from podscale.plan import Plan
from podscale.planner import compile, described_devices, plot, published, search
from podscale.pod import Pod
from podscale.recipe import Recipe
from podscale.storage.files import write_atomically
from podscale.storage.paths import require_local
from podscale.training import setup


class Answer(NamedTuple):
    """Names and values for a table, and the same as a dictionary for JSON."""

    rows: list[tuple[str, str]]
    values: JsonObject


def plan_on_pod(recipe: Recipe, pod: Pod, options: Options, compiles: bool = True) -> Answer:
    """Plan a recipe on a pod, predict its times, and compile it where there is a compiler for a pod not available.

    Args:
        recipe: what to train.
        pod: where; it need not be available.
        options: machine options.
        compiles: whether to compile the training step for a pod that is not available.
    """
    plan = setup.plan_recipe(recipe, pod, options)
    work = count_work(recipe.override({"model.remat": plan.options.remat == "on"}), plan.counts.classes)
    rows, values = plan.rows(), plan.to_dict() | {"recipe": recipe.name}
    if chips.find_chip(pod.kind) is not None:
        forecast = model.make_forecast(plan, work)
        rows += model.format_rows(forecast)
        values["forecast"] = model.to_dict(forecast)
    if compiles and not pod.is_present:
        compiler_rows, values["compiled"] = _compile(plan)
        rows += compiler_rows
    return Answer(rows, values)


def _compile(plan: Plan) -> tuple[list[tuple[str, str]], JsonObject]:
    """Return the compiler's report as rows and values; if nothing can be compiled, the reason as one row."""
    reason = described_devices.explain_no_compiler(plan.pod)
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
    """Return a plan with the recipe's counts and memory, and its model's work: both are the same on every pod."""
    chips.get_chip(kind)
    plan = setup.plan_recipe(recipe, Pod("cpu", 1, 1), Options())
    return plan, count_work(recipe, plan.counts.classes)
