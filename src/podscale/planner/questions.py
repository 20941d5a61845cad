"""Ask: what `podscale plan` answers about pods that are not here, as rows for people and values for programs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from podscale import pod
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.forecast import chips, choice, model
from podscale.forecast.compute import Work, work_of
from podscale.plan import Plan
from podscale.planner import compile, described_devices, plot, published, search
from podscale.recipe import Recipe
from podscale.storage.files import write_atomically
from podscale.training import setup


class Answer(NamedTuple):
    """Names and values for people, and the same for programs."""

    rows: list[tuple[str, str]]
    values: dict[str, Any]


def about(recipe: Recipe, where: pod.Pod, options: Options, compiles: bool = True) -> Answer:
    """The plan of a recipe on a pod, its predicted times, and the compiler's word where there is a compiler."""
    plan = setup.plan_recipe(recipe, where, options)
    work = work_of(recipe, plan.counts.classes)
    chosen = choice.settled(options, where, work.parameters)
    if chosen.predicted:
        plan = setup.plan_recipe(recipe, where, chosen.options)
    rows, values = plan.rows(), plan.to_dict() | {"recipe": recipe.name}
    if chips.known(where.kind) is not None:
        found = model.forecast(plan, work)
        rows += model.rows(found)
        values["forecast"] = model.to_dict(found)
    if compiles and not where.present:
        told, report = _compiled(plan)
        rows += told
        values["compiled"] = report
    return Answer(rows, values)


def _compiled(plan: Plan) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """A pod that the compiler refuses still has its plan: what it says is one more row."""
    why = described_devices.why_not(plan.pod)
    if not why:
        try:
            report = compile.compiled(plan)
        except UserError as error:
            why = str(error)
        else:
            return compile.rows(report), asdict(report) | {"fits": report.fits}
    return [("compiled", why)], {"why_not": why}


# --- many pods at once -----------------------------------------------------------------------------------------------


def searched(recipe: Recipe, kind: str, chip_hours: float) -> tuple[list[list[str]], dict[str, Any]]:
    """The table of pods that no smaller one beats."""
    wanted = search.Wanted.parse(kind, chip_hours)
    plan, work = _needs(recipe, wanted.kind)
    found = search.search(wanted, recipe, plan.counts, plan.memory, work)
    values = [
        {"pod": f"{one.plan.pod.kind}:{search.shape(one.plan.pod)}", "recipe": one.plan.recipe.name}
        | {"tile": list(one.plan.tile), "summation": one.plan.summation, "micro_batches": one.plan.micro_batches}
        | model.to_dict(one)
        for one in found
    ]
    return search.rows(found), {"found": values}


def drawn(recipe: Recipe, kind: str, path: str) -> dict[str, Any]:
    """The scaling picture of a recipe on a kind of chip, in a file."""
    plan, work = _needs(recipe, kind)
    found = search.by_chips(search.Wanted(kind), recipe, plan.counts, plan.memory, work)
    text = plot.draw(found, published.runs(), f"{recipe.model.name} on {kind}, the best plan for each number of chips")
    try:
        write_atomically(Path(path), text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return {"plot": path, "chips": [one.plan.pod.rows * one.plan.pod.cols for one in found]}


def _needs(recipe: Recipe, kind: str) -> tuple[Plan, Work]:
    """Counts and memory of the recipe, and its model's work: the same on every pod."""
    chips.chip(kind)
    one = pod.Pod("cpu", 1, 1)
    plan = setup.plan_recipe(recipe, one, Options())
    return plan, work_of(recipe, plan.counts.classes)
