"""Compute curves, sessions and rates from the lines of metrics.jsonl."""

import math

from podscale.config.json_types import JsonObject
from podscale.report.html import get_colour, round_number

MAX_POINTS = 1000  # of a curve; longer ones are averaged
Line = JsonObject


def select_by_step(lines: list[Line], event: str) -> list[Line]:
    """Return the lines of one kind of event by step; of a step that was repeated, only the last line."""
    last = {line["step"]: line for line in lines if line["event"] == event}
    return [last[step] for step in sorted(last)]


def group_points(lines: list[Line], points: int = MAX_POINTS) -> list[list[Line]]:
    """Group consecutive lines so that there are at most `points` groups.

    >>> group_points([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size = max(1, math.ceil(len(lines) / points))
    return [lines[i : i + size] for i in range(0, len(lines), size)]


def compute_mean(lines: list[Line], name: str) -> float | None:
    """Return the mean of a field; None if any value is not finite, since an average must not hide that."""
    values = [round_number(line.get(name)) for line in lines]
    finite = [v for v in values if v is not None]
    return round_number(sum(finite) / len(finite)) if finite and len(finite) == len(values) else None


def make_training_curves(trained: list[Line]) -> dict[str, list[float | None]]:
    """Return step, loss, accuracy, learning rate and gradient norm, with a point for every group of steps."""
    groups = group_points(trained)
    names = ("step", "loss", "accuracy", "learning_rate", "grad_norm")
    return {name: [compute_mean(group, name) for group in groups] for name in names}


def make_evaluation_curves(evaluated: list[Line]) -> dict[str, list[float | None]]:
    """Return step, loss and accuracy of every evaluation."""
    return {name: [round_number(line.get(name)) for line in evaluated] for name in ("step", "loss", "accuracy")}


def make_time_curves(trained: list[Line]) -> dict[str, list[float]]:
    """Return the milliseconds of a step by part of the work, at the points of the training curves."""
    names = {part for line in trained for part in line.get("spent", ())}
    parts = sorted(names, key=lambda part: (get_colour(part), part))
    return {part: [_compute_mean_ms(group, part) for group in group_points(trained)] for part in parts}


def _compute_mean_ms(lines: list[Line], part: str) -> float:
    return round(1e3 * sum(line.get("spent", {}).get(part, 0.0) for line in lines) / len(lines), 4)


def split_sessions(lines: list[Line]) -> list[list[Line]]:
    """Split the lines where the run started or was resumed."""
    starts = [i for i, line in enumerate(lines) if line["event"] == "start"] or [0]
    return [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


def sum_training_s(lines: list[Line], batch: int) -> float:
    """Return the seconds of training in all sessions: the last clock of each, plus the steps after it by their rate."""
    total = 0.0
    for session in split_sessions(lines):
        clock = 0.0
        for line in session:
            rate = round_number(line.get("images_per_s"))
            clock = line["seconds"] if "seconds" in line else clock + (batch / rate if rate else 0.0)
        total += clock
    return total


def compute_mean_rate(trained: list[Line]) -> float | None:
    """Return the images per second over all steps; None before the first rate."""
    rates = [r for line in trained if (r := round_number(line.get("images_per_s")))]
    return len(rates) / sum(1 / r for r in rates) if rates else None


def select_summary(lines: list[Line], summary: Line) -> Line:
    """Return the run's summary if its last session wrote it, else an empty one."""
    return summary if lines and lines[-1]["event"] == "end" else {}
