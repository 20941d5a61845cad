"""Make Markdown tables and an SVG plot of the results of `sums.py`: measured points over the lines of the model.

python benchmarks/torusnet/draw.py sums-3x3.json sums-4x4.json --svg docs/torus-measured.svg
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from podscale.forecast.probe import Probe
from podscale.parallel.strategies import STRATEGIES
from podscale.parallel.summation import Load

NAMES = {
    "xla": "`xla` (Gloo)",
    "ring": "`ring`",
    "ring2": "`ring2`",
    "torus": "`torus`",
    "torus4": "`torus4`",
    "swing": "`swing`",
    "swing_latency": "`swing_latency`",
    "auto": "`auto`",
}
COLOURS = {
    "xla": "#777777",
    "ring": "#c44e52",
    "ring2": "#e8a33d",
    "torus": "#4878a8",
    "torus4": "#2c7a4b",
    "swing": "#8a5fb0",
    "swing_latency": "#b0458a",
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 300, 60, 40, 70
Point = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    results = [json.loads(path.read_text()) for path in arguments.files]
    for result in results:
        print(f"{format_title(result)}\n\n{format_table(result)}\n")
    if arguments.svg:
        arguments.svg.write_text(draw_plot(results))


def format_title(result: dict[str, Any]) -> str:
    inside = f", {result['inside_mbit']:g} along rows" if result["inside_mbit"] else ""
    return f"{result['shape']}, {result['mbit']:g} Mbit/s{inside}, {result['delay_us'] / 1000:g} ms a link"


def format_table(result: dict[str, Any]) -> str:
    """Return a row per strategy and devices of a host, a column per payload: milliseconds, the model's in brackets."""
    payloads = list(dict.fromkeys(point["payload"] for point in result["points"]))
    times = {(point["strategy"], point["cores"], point["payload"]): point for point in result["points"]}
    lines = ["| ms (model) | " + " | ".join(payloads) + " |", "| --- |" + " --- |" * len(payloads)]
    for cores in sorted({point["cores"] for point in result["points"]}):
        for name, label in NAMES.items():
            points = [times.get((name, cores, payload)) for payload in payloads]
            cells = [f"{p['ms']:,.0f} ({p['model_ms']:,.0f})" if p else "" for p in points]
            if any(cells):
                devices = f", {cores} devices" if cores > 1 else ""
                lines.append(f"| {label}{devices} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- the plot ------------------------------------------------------------------------------------------------------


def draw_plot(results: list[dict[str, Any]]) -> str:
    width = LEFT + len(results) * (WIDTH + GAP)
    parts = [draw_panel(result, LEFT + i * (WIDTH + GAP)) for i, result in enumerate(results)]
    size = f'viewBox="0 0 {width} {HEIGHT + 2 * TOP + 30}"'
    style = "text{font:12px sans-serif;fill:#333}.axis{stroke:#999;fill:none}.grid{stroke:#e4e4e4}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, background, *parts, draw_legend(), "</svg>"]) + "\n"


def draw_panel(result: dict[str, Any], left: float) -> str:
    points: list[Point] = result["points"]
    sizes, times = [p["bytes"] for p in points], [p["ms"] for p in points]
    x = make_log_scale(min(sizes), max(sizes), left, left + WIDTH)
    y = make_log_scale(
        10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times))), TOP + HEIGHT, TOP
    )
    parts = [
        f'<text x="{left}" y="{TOP - 14}">{format_title(result)}</text>',
        *draw_grid(x, y, min(sizes), max(sizes), times, left),
    ]
    for name, colour in COLOURS.items():
        strategy_points = [p for p in points if p["strategy"] == name]
        strategy_points = [p for p in strategy_points if p["cores"] == strategy_points[0]["cores"]]
        if not strategy_points:
            continue
        line = " ".join(
            f"{x(size):.1f},{y(ms):.1f}"
            for size, ms in predict_line(
                result, strategy_points[0], min(sizes), max(p["bytes"] for p in strategy_points)
            )
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{x(p["bytes"]):.1f}" cy="{y(p["ms"]):.1f}" r="4" fill="{colour}"/>' for p in strategy_points
        ]
    return "\n".join(parts)


def predict_line(result: dict[str, Any], point: Point, least: int, most: int) -> list[tuple[float, float]]:
    """Return the model's line of a strategy, as (bytes, milliseconds)."""
    probe = Probe.from_dict(result["links"][str(point["cores"])])
    sizes = [least * (most / least) ** (i / 60) for i in range(61)]
    return [(size, 1e3 * STRATEGIES[point["strategy"]].predict_s(probe, Load(size))) for size in sizes]


def draw_grid(x: Any, y: Any, least: int, most: int, times: list[float], left: float) -> list[str]:
    parts = []
    for power in range(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))) + 1):
        height = y(10**power)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{height + 4:.1f}" text-anchor="end">{10**power:,} ms</text>')
    for size, text in ((64, "64 B"), (4096, "4 KB"), (65536, "64 KB"), (10**6, "1 MB"), (10**7, "10 MB")):
        if least <= size <= most:
            parts.append(f'<text x="{x(size):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{text}</text>')
    parts.append(f'<rect class="axis" x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>')
    return parts


def draw_legend() -> str:
    parts = []
    for i, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + i * 90
        parts.append(f'<circle cx="{x}" cy="{TOP + HEIGHT + 40}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 8}" y="{TOP + HEIGHT + 44}">{name}</text>')
    end = LEFT + len(COLOURS) * 90 + 30
    parts.append(f'<text x="{end}" y="{TOP + HEIGHT + 44}">points: measured; lines: model</text>')
    return "\n".join(parts)


def make_log_scale(low: float, high: float, start: float, end: float) -> Any:
    """Return a logarithmic function from values to coordinates."""
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


if __name__ == "__main__":
    main()
