"""Where the time of a run went, as HTML: over all sessions, and of a step, measured beside predicted."""

from pathlib import Path
from typing import Any

from podscale.report.html import bar, table
from podscale.runs import ledger as ledgers

PAUSES = ("check", "evaluate", "checkpoint", "other")  # parts of a step's time that come now and then
Line = dict[str, Any]


def ledger(summary: Line, folder: Path, sessions: int) -> str:
    """Every second since the run began, booked once: as a stacked bar and its table."""
    parts, until = summary.get("run_seconds") or summary.get("seconds", {}), ""
    if not summary:
        step, parts = ledgers.so_far(folder)
        until = f" up to step {step:,}"
    parts = {name: s for name, s in parts.items() if s > 0}
    wall = sum(parts.values())
    if not wall:
        return "<p>Known after the first checkpoint.</p>"
    over = f", over {sessions} sessions" if sessions > 1 else ""
    share = parts.get(ledgers.TRAINING, 0.0) / wall
    words = (
        f"{wall:,.1f} s of wall time{until}{over}, compilation and all; {share:.0%} of it was training that counted."
    )
    return f"<p>{words}</p>{bar(parts, 'Wall time by part')}"


def predicted(summary: Line) -> str:
    """The measured step beside the predicted one; nothing where the chip is not one that is known."""
    step = summary.get("step")
    if not step:
        return ""
    names = dict.fromkeys([*step["predicted_parts_s"], *step["measured_parts_s"]])
    rows = [_beside(name, step["measured_parts_s"].get(name), step["predicted_parts_s"].get(name)) for name in names]
    rows.append(_beside("step", step["measured_s"], step["predicted_s"]))
    shown = table(("", "measured", "predicted", "ratio"), rows, "a step, measured and predicted")
    return f"<h3>A step, predicted and measured</h3>{shown}"


def _beside(name: str, measured: float | None, expected: float | None) -> tuple[str, str, str, str]:
    told = ["" if s is None else f"{s * 1e3:,.2f} ms" for s in (measured, expected)]
    ratio = f"{measured / expected:.2f}" if measured is not None and expected else ""
    return name, told[0], told[1], ratio


def goodput_of(summary: Line, folder: Path) -> float | None:
    """The share of all time that was training which counted; None before anything is known."""
    if "goodput" in summary:
        return float(summary["goodput"])
    _, parts = ledgers.so_far(folder)
    wall = sum(parts.values())
    return parts.get(ledgers.TRAINING, 0.0) / wall if wall else None
