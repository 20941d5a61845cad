"""Plot how a recipe scales over a kind of chip, as an SVG image.

The left panel shows images per second from 1 to 4096 chips, with published runs as points; the right panel the share of
a step that each part takes, stacked, with the efficiency as a line. Both axes of chips are logarithmic.
"""

import math
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from podscale.forecast.model import Forecast
from podscale.planner.published import PublishedRun
from podscale.pod import parse_pod
from podscale.report.svg import FAINT, INK, draw_area, draw_dot, draw_line, draw_text, make_svg

WIDTH, HEIGHT = 1000, 460
TOP, BOTTOM = 70, 380
LEFT, RIGHT = (80, 480), (580, 960)  # the two panels' sides
COLOURS = MappingProxyType(
    {
        "compute": "#4878a8",
        "batch norm": "#e8a33d",
        "summation": "#c44e52",
        "orthogonalization": "#6a9f58",
        "idle": "#b0b0b0",
    }
)
RARE_PARTS = ("orthogonalization",)  # drawn for the recipes that have it


def draw_scaling(forecasts: Sequence[Forecast], runs: Iterable[PublishedRun], title: str) -> str:
    """Return the plot as SVG text.

    Args:
        forecasts: of one kind of chip, by increasing number of chips.
        runs: published runs; those on the same kind of chip are drawn.
        title: the title above both panels.
    """
    counts = [_count_chips(forecast) for forecast in forecasts]
    kind = forecasts[0].plan.pod.kind
    points = [(_count_run_chips(run), run) for run in runs if parse_pod(run.pod).kind == kind]
    body = [
        draw_text(WIDTH / 2, 28, title, size=17),
        *_draw_rates(forecasts, counts, points),
        *_draw_parts(forecasts, counts),
    ]
    return make_svg(WIDTH, HEIGHT, body)


def _count_chips(forecast: Forecast) -> int:
    return forecast.plan.pod.rows * forecast.plan.pod.cols


def _count_run_chips(run: PublishedRun) -> int:
    return math.prod(parse_pod(run.pod).dims)


# --- the two panels --------------------------------------------------------------------------------------------------


def _draw_rates(forecasts: Sequence[Forecast], counts: list[int], points: list[tuple[int, PublishedRun]]) -> list[str]:
    """Draw images per second, both axes logarithmic; the dashed line is the first forecast scaled by the chips."""
    rates = [forecast.images_per_s for forecast in forecasts]
    low = 10 ** math.floor(math.log10(min(rates)))
    high = 10 ** math.ceil(math.log10(max(*rates, rates[0] * counts[-1] / counts[0])))

    def locate(count: float, rate: float) -> tuple[float, float]:
        share = math.log(rate / low) / math.log(high / low)
        return _place_chips(count, counts, LEFT), BOTTOM - share * (BOTTOM - TOP)

    perfect = [locate(count, rates[0] * count / counts[0]) for count in counts]
    lines = [draw_text(sum(LEFT) / 2, 56, "images per second"), *_draw_chip_axis(counts, LEFT)]
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = locate(counts[0], 10.0**power)[1]
        lines += [
            draw_line([(LEFT[0], y), (LEFT[1], y)], FAINT),
            draw_text(LEFT[0] - 8, y + 4, f"{10**power:,}", "end"),
        ]
    lines += [
        draw_line(perfect, "#888", dashed=True),
        draw_line([locate(count, rate) for count, rate in zip(counts, rates, strict=True)], COLOURS["compute"], 2.5),
    ]
    for count, run in points:
        x, y = locate(min(max(count, counts[0]), counts[-1]), run.images_per_s)
        note = f"{run.name}: {count} chips, {run.images_per_s:,.0f} images/s ({run.source})"
        lines.append(draw_dot(x, y, "#c44e52", note))
    if points:
        lines += [
            draw_dot(LEFT[0] + 16, TOP + 14, "#c44e52"),
            draw_text(LEFT[0] + 28, TOP + 18, "published (whole run, with evaluations)", "start"),
        ]
    return lines


def _draw_parts(forecasts: Sequence[Forecast], counts: list[int]) -> list[str]:
    """Draw the shares of a step, stacked, and the efficiency as a line over them."""

    def locate(count: float, share: float) -> tuple[float, float]:
        return _place_chips(count, counts, RIGHT), BOTTOM - share * (BOTTOM - TOP)

    lines = [draw_text(sum(RIGHT) / 2, 56, "where a step's time goes, and efficiency")]
    below = [0.0] * len(forecasts)
    rare = [part for part in RARE_PARTS if any(forecast.parts[part] for forecast in forecasts)]
    colours = {part: colour for part, colour in COLOURS.items() if part not in RARE_PARTS or part in rare}
    for part, colour in colours.items():
        above = [base + forecast.parts[part] / forecast.step_s for base, forecast in zip(below, forecasts, strict=True)]
        edge = [locate(*point) for point in zip(counts, above, strict=True)]
        edge += [locate(*point) for point in reversed(list(zip(counts, below, strict=True)))]
        lines.append(draw_area(edge, colour, part))
        below = above
    efficiency = [(forecast.compute_s - forecast.few_images_s) / forecast.step_s for forecast in forecasts]
    lines.append(draw_line([locate(*point) for point in zip(counts, efficiency, strict=True)], "white", 2.5))
    for tenth in range(0, 11, 2):
        y = locate(counts[0], tenth / 10)[1]
        lines.append(draw_text(RIGHT[0] - 8, y + 4, f"{tenth * 10} %", "end"))
    for index, (part, colour) in enumerate(colours.items()):
        x = RIGHT[0] + 380 // len(colours) * index
        lines.append(f'<rect x="{x}" y="{HEIGHT - 30}" width="12" height="12" fill="{colour}"/>')
        lines.append(draw_text(x + 18, HEIGHT - 19, part, "start"))
    lines.append(draw_text(RIGHT[0] + 40, TOP + 24, "white: efficiency", "start", colour="white"))
    return lines + _draw_chip_axis(counts, RIGHT)


# --- axes ------------------------------------------------------------------------------------------------------------


def _place_chips(count: float, counts: list[int], sides: tuple[int, int]) -> float:
    """Return the x coordinate of a number of chips between the panel's sides."""
    range_ = math.log(counts[-1] / counts[0]) or 1.0
    return sides[0] + math.log(count / counts[0]) / range_ * (sides[1] - sides[0])


def _draw_chip_axis(counts: list[int], sides: tuple[int, int]) -> list[str]:
    marks = counts[:: max(1, len(counts) // 7)]
    labels = [draw_text(_place_chips(count, counts, sides), BOTTOM + 18, f"{count:,}") for count in marks]
    return [
        draw_line([(sides[0], BOTTOM), (sides[1], BOTTOM)], INK),
        *labels,
        draw_text(sum(sides) / 2, BOTTOM + 38, "chips"),
    ]
