"""Spread: what the seeds of each case came to, as means and deviations, as a table and as a plot with error bars."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from podscale.report.svg import FAINT, INK, dot, line, picture, text
from podscale.study.grid import MEASURES, Study

KEPT = (*MEASURES, "steps", "compile_s")
HEAD = ["case", "mean", "deviation", "least", "most", "seeds"]
SHARES = ("accuracy", "best_accuracy", "accuracy_top5")  # shown in percent
WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 90, 640, 60, 400
COLOURS = ("#4878a8", "#c44e52", "#55a868", "#e8a33d", "#8172b2", "#64b5cd", "#8c613c", "#808080")
WIDE = 8  # values whose largest is so many times the least are drawn on a logarithmic axis


def summarize(study: Study, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1) of the measure, for every case with a result."""
    cases = []
    for name, case in found.items():
        values = [run[study.measure] for run in case["runs"] if run.get(study.measure) is not None]
        told = {
            "mean": statistics.fmean(values) if values else None,
            "deviation": statistics.stdev(values) if len(values) > 1 else None,
            "least": min(values, default=None),
            "most": max(values, default=None),
            "count": len(values),
        }
        cases.append({"case": name} | case | told)
    return {"study": study.name, "about": study.doc, "measure": study.measure, "cases": cases}


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table's lines, in the study's own order."""
    return [
        [case["case"], *(shown(case[part], result["measure"]) for part in HEAD[1:5]), str(case["count"])]
        for case in result["cases"]
    ]


def shown(value: float | None, measure: str) -> str:
    """A measure as people read it."""
    if value is None:
        return "-"
    return f"{100 * value:.2f}" if measure in SHARES else f"{value:,.2f}"


def failures(result: dict[str, Any]) -> str:
    """One sentence about trainings without a result; empty if there are none."""
    missing = [(case["case"], run) for case in result["cases"] for run in case["runs"] if "error" in run]
    if not missing:
        return ""
    name, run = missing[0]
    return f"{len(missing)} of the trainings have no result; the first: {name}, seed {run['seed']}: {run['error']}"


# --- the plot --------------------------------------------------------------------------------------------------------


def draw(study: Study, result: dict[str, Any]) -> str:
    """Means with bars of one deviation: along the first field that has several numbers, or else case by case."""
    cases = [case for case in result["cases"] if case["mean"] is not None]
    along = _along(study)
    places = sorted({case["values"][along] for case in cases}) if along else [case["case"] for case in cases]
    across, down, ticks = _across(places), *_down(cases, result["measure"])
    percent = ", %" if result["measure"] in SHARES else ""
    marks = [text(WIDTH / 2, 28, study.name, size=17), text(LEFT, TOP - 12, f"{result['measure']}{percent}", "start")]
    for y, label in ticks:
        marks += [line([(LEFT, y), (RIGHT, y)], FAINT), text(LEFT - 8, y + 4, label, "end")]
    marks.append(line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], INK))
    for number, place in enumerate(places):
        marks.append(text(across(place), BOTTOM + 18, f"{place:,}" if along else str(number + 1)))
    marks.append(text((LEFT + RIGHT) / 2, BOTTOM + 40, along or "case"))
    for number, (name, series) in enumerate(_series(cases, along).items()):
        colour, legend = COLOURS[number % len(COLOURS)], TOP + 18 * number
        spots = [(across(case["values"][along] if along else case["case"]), case) for case in series]
        marks += _bars(sorted(spots, key=lambda spot: spot[0]), down, colour, bool(along))
        marks += [dot(RIGHT + 30, legend, colour), text(RIGHT + 42, legend + 4, name, "start", 11)]
    return picture(WIDTH, HEIGHT, marks)


def _bars(spots: list[tuple[float, dict[str, Any]]], down: Any, colour: str, joined: bool) -> list[str]:
    marks = [line([(x, down(case["mean"])) for x, case in spots], colour, 1.5)] if joined and len(spots) > 1 else []
    for x, case in spots:
        around = case["deviation"] or 0.0
        ends = down(case["mean"] - around), down(case["mean"] + around)
        note = f"{case['case']}: {case['mean']:.4g} ± {around:.2g}, {case['count']} seeds"
        marks += [line([(x, ends[0]), (x, ends[1])], colour, 1.5), dot(x, down(case["mean"]), colour, note)]
        marks += [line([(x - 5, y), (x + 5, y)], colour, 1.5) for y in ends]
    return marks


def _along(study: Study) -> str:
    """The first field that differs between cases and is a number in all of them."""
    for field in study.cases[0].values:
        values = [case.values.get(field) for case in study.cases]
        if len(set(map(str, values))) > 1 and all(type(value) in (int, float) for value in values):
            return field
    return ""


def _series(cases: Sequence[dict[str, Any]], along: str) -> dict[str, list[dict[str, Any]]]:
    """Cases that differ only along the axis belong to one line."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, case in enumerate(cases, start=1):
        others = [f"{field} {value}" if field != "case" else str(value) for field, value in case["values"].items()]
        rest = [word for field, word in zip(case["values"], others, strict=True) if field != along]
        found.setdefault((", ".join(rest) or along) if along else f"{number}: {case['case']}", []).append(case)
    return found


def _across(places: Sequence[Any]) -> Any:
    inner = LEFT + 30, RIGHT - 30
    numbers = all(type(place) in (int, float) for place in places)
    if not numbers or len(places) < 2:
        step = (inner[1] - inner[0]) / max(1, len(places) - 1)
        return lambda place: inner[0] + step * places.index(place)
    scale = math.log if places[0] > 0 and places[-1] / places[0] >= WIDE else float
    low, high = scale(places[0]), scale(places[-1])
    return lambda place: inner[0] + (scale(place) - low) / (high - low) * (inner[1] - inner[0])


def _down(cases: Sequence[dict[str, Any]], measure: str) -> tuple[Any, list[tuple[float, str]]]:
    """From a value to its height, and the axis' ticks."""
    ends = [case["mean"] + sign * (case["deviation"] or 0.0) for case in cases for sign in (-1, 1)] or [0.0, 1.0]
    around = max(ends) - min(ends) or abs(max(ends)) or 1.0
    step = 10.0 ** math.floor(math.log10(around / 3))
    step *= next(times for times in (1, 2, 5, 10) if around / (step * times) <= 6)
    low, high = math.floor(min(ends) / step) * step, math.ceil(max(ends) / step) * step
    high = high if high > low else low + step

    def down(value: float) -> float:
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    unit = 100 if measure in SHARES else 1
    digits = max(0, -math.floor(math.log10(step * unit)))
    ticks = [low + step * number for number in range(round((high - low) / step) + 1)]
    return down, [(down(tick), f"{tick * unit:,.{digits}f}") for tick in ticks]
