"""Render where the time of a run went as HTML: over all sessions, and of a step, measured and predicted."""

from pathlib import Path

from podscale.config.json_types import JsonObject
from podscale.report.html import render_bar, render_table
from podscale.runs import ledger as ledgers

PERIODIC_PARTS = ("check", "evaluate", "checkpoint", "other")  # parts of a step's time that only some steps have
Line = JsonObject


def render_ledger(summary: Line, folder: Path, sessions: int) -> str:
    """Return all seconds since the run began, each counted once, as a stacked bar and its table."""
    parts, until = summary.get("run_seconds") or summary.get("seconds", {}), ""
    if not summary:
        step, parts = ledgers.read_phase_seconds(folder)
        until = f" up to step {step:,}"
    parts = {name: s for name, s in parts.items() if s > 0}
    wall = sum(parts.values())
    if not wall:
        return "<p>Known after the first checkpoint.</p>"
    over = f", over {sessions} sessions" if sessions > 1 else ""
    share = parts.get(ledgers.TRAINING, 0.0) / wall
    text = f"{wall:,.1f} s of wall time{until}{over}, including compilation"
    return f"<p>{text}; {share:.0%} of it went into training that counted.</p>{render_bar(parts, 'Wall time by part')}"


def render_prediction(summary: Line) -> str:
    """Return a table of the measured and the predicted step; empty if there is no forecast for the chip."""
    step = summary.get("step")
    if not step:
        return ""
    names = dict.fromkeys([*step["predicted_parts_s"], *step["measured_parts_s"]])
    rows = [_make_row(name, step["measured_parts_s"].get(name), step["predicted_parts_s"].get(name)) for name in names]
    rows.append(_make_row("step", step["measured_s"], step["predicted_s"]))
    rendered = render_table(("", "measured", "predicted", "ratio"), rows, "a step, measured and predicted")
    return f"<h3>A step, predicted and measured</h3>{rendered}"


def _make_row(name: str, measured: float | None, expected: float | None) -> tuple[str, str, str, str]:
    cells = ["" if s is None else f"{s * 1e3:,.2f} ms" for s in (measured, expected)]
    ratio = f"{measured / expected:.2f}" if measured is not None and expected else ""
    return name, cells[0], cells[1], ratio


def compute_goodput(summary: Line, folder: Path) -> float | None:
    """Return the share of all time that was training which counted; None before the first checkpoint."""
    if "goodput" in summary:
        return float(summary["goodput"])
    _, parts = ledgers.read_phase_seconds(folder)
    wall = sum(parts.values())
    return parts.get(ledgers.TRAINING, 0.0) / wall if wall else None
