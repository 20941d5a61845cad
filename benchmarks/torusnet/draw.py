"""Tables in Markdown and a plot in SVG of what `sums.py` found: measured points over the lines of the model.

python benchmarks/torusnet/draw.py sums-3x3.json sums-4x4.json --svg docs/torus-measured.svg
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from podscale.forecast.probe import Line, Probe

NAMES = {"xla": "`xla` (Gloo)", "ring": "`ring`", "ring2": "`ring2`", "torus": "`torus`", "torus4": "`torus4`"}
COLOURS = {"xla": "#777777", "ring": "#c44e52", "ring2": "#e8a33d", "torus": "#4878a8", "torus4": "#2c7a4b"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 300, 60, 40, 70
Point = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    found = [json.loads(path.read_text()) for path in arguments.files]
    for one in found:
        print(f"{title(one)}\n\n{table(one)}\n")
    if arguments.svg:
        arguments.svg.write_text(picture(found))


def title(one: dict[str, Any]) -> str:
    inside = f", {one['inside_mbit']:g} along rows" if one["inside_mbit"] else ""
    return f"{one['shape']}, {one['mbit']:g} Mbit/s{inside}, {one['delay_us'] / 1000:g} ms a link"


def table(one: dict[str, Any]) -> str:
    """A row a strategy, a column a payload: milliseconds, and the model's in brackets."""
    payloads = list(dict.fromkeys(point["payload"] for point in one["points"]))
    times = {(point["strategy"], point["payload"]): point for point in one["points"]}
    lines = ["| ms (model) | " + " | ".join(payloads) + " |", "| --- |" + " --- |" * len(payloads)]
    for name, shown in NAMES.items():
        points = [times.get((name, payload)) for payload in payloads]
        cells = [f"{p['ms']:,.0f} ({p['model_ms']:,.0f})" if p else "" for p in points]
        if any(cells):
            lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- the plot ------------------------------------------------------------------------------------------------------


def picture(found: list[dict[str, Any]]) -> str:
    width = LEFT + len(found) * (WIDTH + GAP)
    parts = [panel(one, LEFT + i * (WIDTH + GAP)) for i, one in enumerate(found)]
    size = f'viewBox="0 0 {width} {HEIGHT + 2 * TOP + 30}"'
    style = "text{font:12px sans-serif;fill:#333}.axis{stroke:#999;fill:none}.grid{stroke:#e4e4e4}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, background, *parts, legend(), "</svg>"]) + "\n"


def panel(one: dict[str, Any], left: float) -> str:
    points: list[Point] = one["points"]
    sizes, times = [p["bytes"] for p in points], [p["ms"] for p in points]
    x = scale(min(sizes), max(sizes), left, left + WIDTH)
    y = scale(10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times))), TOP + HEIGHT, TOP)
    parts = [f'<text x="{left}" y="{TOP - 14}">{title(one)}</text>', *grid(x, y, min(sizes), max(sizes), times, left)]
    for name, colour in COLOURS.items():
        own = [p for p in points if p["strategy"] == name]
        if not own:
            continue
        line = " ".join(f"{x(size):.1f},{y(ms):.1f}" for size, ms in modelled(one, own[0], min(sizes), max(sizes)))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x(p["bytes"]):.1f}" cy="{y(p["ms"]):.1f}" r="4" fill="{colour}"/>' for p in own]
    return "\n".join(parts)


def modelled(one: dict[str, Any], point: Point, least: int, most: int) -> list[tuple[float, float]]:
    """The model's line of a strategy, as (bytes, milliseconds)."""
    told = one["links"][str(point["cores"])]
    lines = {
        name: Line(value["hop_s"], value["rate"] or math.inf) for name, value in told.items() if isinstance(value, dict)
    }  # JSON has no infinity: a chip of one core has nothing to sum
    probe = Probe(told["rows"], told["cols"], **lines)
    sizes = [least * (most / least) ** (i / 60) for i in range(61)]
    return [(size, 1e3 * probe.summation_s(point["strategy"], size)) for size in sizes]


def grid(x: Any, y: Any, least: int, most: int, times: list[float], left: float) -> list[str]:
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


def legend() -> str:
    words = []
    for i, (name, colour) in enumerate(COLOURS.items()):
        at = LEFT + i * 80
        words.append(f'<circle cx="{at}" cy="{TOP + HEIGHT + 40}" r="4" fill="{colour}"/>')
        words.append(f'<text x="{at + 8}" y="{TOP + HEIGHT + 44}">{name}</text>')
    end = LEFT + len(COLOURS) * 80
    words.append(f'<text x="{end}" y="{TOP + HEIGHT + 44}">points: measured; lines: model</text>')
    return "\n".join(words)


def scale(low: float, high: float, start: float, end: float) -> Any:
    """From values to places, logarithmically."""
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


if __name__ == "__main__":
    main()
