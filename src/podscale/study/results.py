"""Summarize a study: mean and standard deviation of each case over its seeds, as a table and a plot with error bars."""

import math
import statistics
from collections.abc import Callable, Sequence

from podscale.config.json_types import Json, JsonObject
from podscale.report.svg import FAINT, INK, draw_dot, draw_line, draw_text, make_svg
from podscale.study.grid import MEASURES, Study

Scale = Callable[[Json], float]  # from a value to a coordinate

SUMMARY_KEYS = (*MEASURES, "steps", "compile_s")
COLUMNS = ("case", "mean", "deviation", "least", "most", "seeds")
PERCENT_MEASURES = ("accuracy", "best_accuracy", "accuracy_top5")  # shown in percent
WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 90, 640, 60, 400
COLOURS = ("#4878a8", "#c44e52", "#55a868", "#e8a33d", "#8172b2", "#64b5cd", "#8c613c", "#808080")
LOG_RATIO = 8  # a ratio of the largest to the smallest value from which the axis is logarithmic


def summarize(study: Study, by_case: dict[str, JsonObject]) -> JsonObject:
    """Return mean and standard deviation (n - 1) of the measure, for every case with a result."""
    cases = []
    for name, case in by_case.items():
        values = [run[study.measure] for run in case["runs"] if run.get(study.measure) is not None]
        statistic = {
            "mean": statistics.fmean(values) if values else None,
            "deviation": statistics.stdev(values) if len(values) > 1 else None,
            "least": min(values, default=None),
            "most": max(values, default=None),
            "count": len(values),
        }
        cases.append({"case": name} | case | statistic)
    return {"study": study.name, "about": study.doc, "measure": study.measure, "cases": cases}


def format_rows(result: JsonObject) -> list[list[str]]:
    """Return the table's rows, in the order of the study."""
    return [
        [case["case"], *(format_measure(case[part], result["measure"]) for part in COLUMNS[1:5]), str(case["count"])]
        for case in result["cases"]
    ]


def format_measure(value: float | None, measure: str) -> str:
    """Return a measure as people read it."""
    if value is None:
        return "-"
    return f"{100 * value:.2f}" if measure in PERCENT_MEASURES else f"{value:,.2f}"


def describe_failures(result: JsonObject) -> str:
    """Return one sentence about trainings without a result; "" if there are none."""
    missing = [(case["case"], run) for case in result["cases"] for run in case["runs"] if "error" in run]
    if not missing:
        return ""
    name, run = missing[0]
    return f"{len(missing)} of the trainings have no result; the first: {name}, seed {run['seed']}: {run['error']}"


# --- the plot --------------------------------------------------------------------------------------------------------


def draw_plot(study: Study, result: JsonObject) -> str:
    """Draw means with error bars of one deviation, along the first field with several numbers, or case by case."""
    cases = [case for case in result["cases"] if case["mean"] is not None]
    axis = _choose_axis_field(study)
    places = sorted({case["values"][axis] for case in cases}) if axis else [case["case"] for case in cases]
    x_of, y_of, ticks = _make_x_scale(places), *_make_y_scale(cases, result["measure"])
    percent = ", %" if result["measure"] in PERCENT_MEASURES else ""
    marks = [
        draw_text(WIDTH / 2, 28, study.name, size=17),
        draw_text(LEFT, TOP - 12, f"{result['measure']}{percent}", "start"),
    ]
    for y, label in ticks:
        marks += [draw_line([(LEFT, y), (RIGHT, y)], FAINT), draw_text(LEFT - 8, y + 4, label, "end")]
    marks.append(draw_line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], INK))
    for number, place in enumerate(places):
        marks.append(draw_text(x_of(place), BOTTOM + 18, f"{place:,}" if axis else str(number + 1)))
    marks.append(draw_text((LEFT + RIGHT) / 2, BOTTOM + 40, axis or "case"))
    for number, (name, series) in enumerate(_group_into_series(cases, axis).items()):
        colour, legend = COLOURS[number % len(COLOURS)], TOP + 18 * number
        points = [(x_of(case["values"][axis] if axis else case["case"]), case) for case in series]
        marks += _draw_error_bars(sorted(points, key=lambda point: point[0]), y_of, colour, bool(axis))
        marks += [draw_dot(RIGHT + 30, legend, colour), draw_text(RIGHT + 42, legend + 4, name, "start", 11)]
    return make_svg(WIDTH, HEIGHT, marks)


def _draw_error_bars(points: list[tuple[float, JsonObject]], y_of: Scale, colour: str, joined: bool) -> list[str]:
    marks = (
        [draw_line([(x, y_of(case["mean"])) for x, case in points], colour, 1.5)] if joined and len(points) > 1 else []
    )
    for x, case in points:
        deviation = case["deviation"] or 0.0
        ends = y_of(case["mean"] - deviation), y_of(case["mean"] + deviation)
        note = f"{case['case']}: {case['mean']:.4g} ± {deviation:.2g}, {case['count']} seeds"
        marks += [draw_line([(x, ends[0]), (x, ends[1])], colour, 1.5), draw_dot(x, y_of(case["mean"]), colour, note)]
        marks += [draw_line([(x - 5, y), (x + 5, y)], colour, 1.5) for y in ends]
    return marks


def _choose_axis_field(study: Study) -> str:
    """Return the first field that differs between cases and is a number in all of them; "" if there is none."""
    for field in study.cases[0].values:
        values = [case.values.get(field) for case in study.cases]
        if len(set(map(str, values))) > 1 and all(type(value) in (int, float) for value in values):
            return field
    return ""


def _group_into_series(cases: Sequence[JsonObject], axis: str) -> dict[str, list[JsonObject]]:
    """Group cases that differ only along the axis into one line."""
    series: dict[str, list[JsonObject]] = {}
    for number, case in enumerate(cases, start=1):
        labels = [f"{field} {value}" if field != "case" else str(value) for field, value in case["values"].items()]
        others = [label for field, label in zip(case["values"], labels, strict=True) if field != axis]
        series.setdefault((", ".join(others) or axis) if axis else f"{number}: {case['case']}", []).append(case)
    return series


def _make_x_scale(places: Sequence[Json]) -> Scale:
    """Return a function from a place on the axis to its x coordinate."""
    inner = LEFT + 30, RIGHT - 30
    numbers = all(type(place) in (int, float) for place in places)
    if not numbers or len(places) < 2:
        step = (inner[1] - inner[0]) / max(1, len(places) - 1)
        return lambda place: inner[0] + step * places.index(place)
    scale = math.log if places[0] > 0 and places[-1] / places[0] >= LOG_RATIO else float
    low, high = scale(places[0]), scale(places[-1])
    return lambda place: inner[0] + (scale(place) - low) / (high - low) * (inner[1] - inner[0])


def _make_y_scale(cases: Sequence[JsonObject], measure: str) -> tuple[Scale, list[tuple[float, str]]]:
    """Return a function from a value to its y coordinate, and the ticks of the axis."""
    ends = [case["mean"] + sign * (case["deviation"] or 0.0) for case in cases for sign in (-1, 1)] or [0.0, 1.0]
    extent = max(ends) - min(ends) or abs(max(ends)) or 1.0
    step = 10.0 ** math.floor(math.log10(extent / 3))
    step *= next(times for times in (1, 2, 5, 10) if extent / (step * times) <= 6)
    low, high = math.floor(min(ends) / step) * step, math.ceil(max(ends) / step) * step
    high = high if high > low else low + step

    def y_of(value: float) -> float:
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    unit = 100 if measure in PERCENT_MEASURES else 1
    digits = max(0, -math.floor(math.log10(step * unit)))
    ticks = [low + step * number for number in range(round((high - low) / step) + 1)]
    return y_of, [(y_of(tick), f"{tick * unit:,.{digits}f}") for tick in ticks]
