"""Plot: how a recipe scales over a kind of chip, as an SVG picture written by hand.

On the left the images a second from 1 to 4096 chips, with published runs as points; on the right the share of a step
that each part takes, stacked, with the efficiency drawn over it. Both axes of chips are logarithmic.
"""

import math
from collections.abc import Iterable, Sequence

from podscale.forecast.model import Forecast
from podscale.planner.published import Run
from podscale.pod import named
from podscale.report.svg import FAINT, INK, area, dot, line, picture, text

WIDTH, HEIGHT = 1000, 460
TOP, BOTTOM = 70, 380
LEFT, RIGHT = (80, 480), (580, 960)  # the two panels' sides
COLOURS = {"compute": "#4878a8", "batch norm": "#e8a33d", "summation": "#c44e52", "idle": "#b0b0b0"}


def draw(found: Sequence[Forecast], runs: Iterable[Run], title: str) -> str:
    """The picture of these forecasts, by growing number of chips, and of those runs that are on the same kind."""
    counts = [_chips(one) for one in found]
    kind = found[0].plan.pod.kind
    points = [(_count(run), run) for run in runs if named(run.pod).kind == kind]
    body = [
        text(WIDTH / 2, 28, title, size=17),
        *_rates(found, counts, points),
        *_parts(found, counts),
    ]
    return picture(WIDTH, HEIGHT, body)


def _chips(found: Forecast) -> int:
    return found.plan.pod.rows * found.plan.pod.cols


def _count(run: Run) -> int:
    return math.prod(named(run.pod).dims)


# --- the two panels --------------------------------------------------------------------------------------------------


def _rates(found: Sequence[Forecast], counts: list[int], points: list[tuple[int, Run]]) -> list[str]:
    """Images a second, both axes logarithmic; the dotted line is the first forecast times the chips."""
    rates = [one.images_per_s for one in found]
    low = 10 ** math.floor(math.log10(min(rates)))
    high = 10 ** math.ceil(math.log10(max(*rates, rates[0] * counts[-1] / counts[0])))

    def spot(count: float, rate: float) -> tuple[float, float]:
        share = math.log(rate / low) / math.log(high / low)
        return _across(count, counts, LEFT), BOTTOM - share * (BOTTOM - TOP)

    perfect = [spot(count, rates[0] * count / counts[0]) for count in counts]
    lines = [text(sum(LEFT) / 2, 56, "images a second"), *_chip_axis(counts, LEFT)]
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = spot(counts[0], 10.0**power)[1]
        lines += [line([(LEFT[0], y), (LEFT[1], y)], FAINT), text(LEFT[0] - 8, y + 4, f"{10**power:,}", "end")]
    lines += [
        line(perfect, "#888", dashed=True),
        line([spot(count, rate) for count, rate in zip(counts, rates, strict=True)], COLOURS["compute"], 2.5),
    ]
    for count, run in points:
        x, y = spot(min(max(count, counts[0]), counts[-1]), run.images_per_s)
        note = f"{run.name}: {count} chips, {run.images_per_s:,.0f} images/s ({run.source})"
        lines.append(dot(x, y, "#c44e52", note))
    if points:
        lines += [
            dot(LEFT[0] + 16, TOP + 14, "#c44e52"),
            text(LEFT[0] + 28, TOP + 18, "published (whole run, with evaluations)", "start"),
        ]
    return lines


def _parts(found: Sequence[Forecast], counts: list[int]) -> list[str]:
    """Shares of a step, stacked, and the efficiency as a line over them."""

    def spot(count: float, share: float) -> tuple[float, float]:
        return _across(count, counts, RIGHT), BOTTOM - share * (BOTTOM - TOP)

    lines = [text(sum(RIGHT) / 2, 56, "where a step's time goes, and efficiency")]
    below = [0.0] * len(found)
    for part, colour in COLOURS.items():
        above = [base + one.parts[part] / one.step_s for base, one in zip(below, found, strict=True)]
        edge = [spot(*place) for place in zip(counts, above, strict=True)]
        edge += [spot(*place) for place in reversed(list(zip(counts, below, strict=True)))]
        lines.append(area(edge, colour, part))
        below = above
    efficiency = [(one.compute_s - one.few_images_s) / one.step_s for one in found]
    lines.append(line([spot(*place) for place in zip(counts, efficiency, strict=True)], "white", 2.5))
    for tenth in range(0, 11, 2):
        y = spot(counts[0], tenth / 10)[1]
        lines.append(text(RIGHT[0] - 8, y + 4, f"{tenth * 10} %", "end"))
    for index, (part, colour) in enumerate(COLOURS.items()):
        x = RIGHT[0] + 95 * index
        lines.append(f'<rect x="{x}" y="{HEIGHT - 30}" width="12" height="12" fill="{colour}"/>')
        lines.append(text(x + 18, HEIGHT - 19, part, "start"))
    lines.append(text(RIGHT[0] + 40, TOP + 24, "white: efficiency", "start", colour="white"))
    return lines + _chip_axis(counts, RIGHT)


# --- strokes ---------------------------------------------------------------------------------------------------------


def _across(count: float, counts: list[int], sides: tuple[int, int]) -> float:
    whole = math.log(counts[-1] / counts[0]) or 1.0
    return sides[0] + math.log(count / counts[0]) / whole * (sides[1] - sides[0])


def _chip_axis(counts: list[int], sides: tuple[int, int]) -> list[str]:
    marks = counts[:: max(1, len(counts) // 7)]
    labels = [text(_across(count, counts, sides), BOTTOM + 18, f"{count:,}") for count in marks]
    return [line([(sides[0], BOTTOM), (sides[1], BOTTOM)], INK), *labels, text(sum(sides) / 2, BOTTOM + 38, "chips")]
