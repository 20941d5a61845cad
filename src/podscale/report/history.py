"""What the lines of metrics.jsonl say: curves, sessions, rates."""

import math
from typing import Any

from podscale.report.html import colour, number

POINTS = 1000  # in a curve; longer ones are averaged down
Line = dict[str, Any]


def by_step(lines: list[Line], event: str) -> list[Line]:
    """The lines of one kind in order; where a step was done again, only what came of it last."""
    found = {line["step"]: line for line in lines if line["event"] == event}
    return [found[step] for step in sorted(found)]


def thin(lines: list[Line], points: int = POINTS) -> list[list[Line]]:
    """Neighbours that make one point together: as many as keep to `points`.

    >>> thin([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size = max(1, math.ceil(len(lines) / points))
    return [lines[i : i + size] for i in range(0, len(lines), size)]


def mean(lines: list[Line], name: str) -> float | None:
    """None if any is not a finite number: an average must not hide that."""
    values = [number(line.get(name)) for line in lines]
    known = [v for v in values if v is not None]
    return number(sum(known) / len(known)) if known and len(known) == len(values) else None


def training_curves(trained: list[Line]) -> dict[str, list[float | None]]:
    """Step, loss, accuracy and learning rate, a point for every few steps."""
    some = thin(trained)
    return {name: [mean(few, name) for few in some] for name in ("step", "loss", "accuracy", "learning_rate")}


def evaluation_curves(evaluated: list[Line]) -> dict[str, list[float | None]]:
    """The same of evaluations, every one of them."""
    return {name: [number(line.get(name)) for line in evaluated] for name in ("step", "loss", "accuracy")}


def spent_curves(trained: list[Line]) -> dict[str, list[float]]:
    """Milliseconds of a step by part of the work, at the points of the training curves."""
    found = {part for line in trained for part in line.get("spent", ())}
    parts = sorted(found, key=lambda part: (colour(part), part))
    return {part: [_mean_ms(few, part) for few in thin(trained)] for part in parts}


def _mean_ms(lines: list[Line], part: str) -> float:
    return round(1e3 * sum(line.get("spent", {}).get(part, 0.0) for line in lines) / len(lines), 4)


def sessions(lines: list[Line]) -> list[list[Line]]:
    """The lines cut where the run began or was resumed."""
    starts = [i for i, line in enumerate(lines) if line["event"] == "start"] or [0]
    return [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


def training_s(lines: list[Line], batch: int) -> float:
    """Seconds of training in all sessions: what their last clock said, and the steps after it by their rate."""
    total = 0.0
    for session in sessions(lines):
        clock = 0.0
        for line in session:
            rate = number(line.get("images_per_s"))
            clock = line["seconds"] if "seconds" in line else clock + (batch / rate if rate else 0.0)
        total += clock
    return total


def mean_rate(trained: list[Line]) -> float | None:
    """Images a second over all steps."""
    rates = [r for line in trained if (r := number(line.get("images_per_s")))]
    return len(rates) / sum(1 / r for r in rates) if rates else None


def summary_of(lines: list[Line], written: Line) -> Line:
    """The summary that a run has written, if it is of its last session."""
    return written if lines and lines[-1]["event"] == "end" else {}
