"""Several runs as one HTML page: their curves together, their results side by side, and where their recipes differ."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from podscale.errors import UserError
from podscale.report.history import (
    Line,
    by_step,
    evaluation_curves,
    mean_rate,
    sessions,
    summary_of,
    training_curves,
    training_s,
)
from podscale.report.html import document, table
from podscale.report.page import accuracy, devices, minutes
from podscale.report.time_section import goodput_of
from podscale.runs.folder import Run
from podscale.storage.files import write_atomically

SCRIPTS = ("chart.js", "compare.js")
MOST = 24  # runs on one page; beyond that no one tells the curves apart


def write(runs: Sequence[Run], path: Path) -> Path:
    """Writes the comparison, and returns where it is."""
    page = text(runs)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file with --to") from None
    return path


def text(runs: Sequence[Run]) -> str:
    """The page."""
    if not 2 <= len(runs) <= MOST:
        raise UserError(f"a comparison takes 2 to {MOST} runs, not {len(runs)}")
    names = _names(runs)
    curves = [_curves(name, run) for name, run in zip(names, runs, strict=True)]
    switches = "".join(
        f'<label><input type="checkbox" id="run-{i}" checked> <span class="key s{i % 8}">{escape(name)}</span></label>'
        for i, name in enumerate(names)
    )
    return document(
        "compare.html",
        SCRIPTS,
        {"runs": curves},
        name=escape(", ".join(names)),
        switches=switches,
        results=table(("", *names), _results(runs), "results of the runs"),
        recipes=_differences(names, [run.recipe.to_dict() for run in runs], "recipes"),
        plans=_differences(names, [_plan(run) for run in runs], "plans"),
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """Each run's folder by its own name, or by its path where two share one."""
    short = [run.folder.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.folder) for run in runs]


def _curves(name: str, run: Run) -> dict[str, Any]:
    lines = run.metrics()
    return {
        "name": name,
        "train": training_curves(by_step(lines, "train")),
        "val": evaluation_curves(by_step(lines, "eval")),
        "steps_per_epoch": run.plan()["steps_per_epoch"],
    }


def _results(runs: Sequence[Run]) -> list[list[str]]:
    """A row for each result, a column for each run."""
    columns = [_result(run) for run in runs]
    return [[name, *(column[name] for column in columns)] for name in columns[0]]


def _result(run: Run) -> dict[str, str]:
    lines, plan = run.metrics(), run.plan()
    summary, evaluated, trained = summary_of(lines, run.summary()), by_step(lines, "eval"), by_step(lines, "train")
    rate, good = summary.get("images_per_s") or mean_rate(trained), goodput_of(summary, run.folder)
    return {
        "accuracy at the end": accuracy(evaluated[-1:], plan)[0],
        "best accuracy": " in ".join(accuracy(evaluated, plan)[i].rpartition(", ")[2] for i in (0, 1)),
        "steps": f"{max((line['step'] for line in lines), default=0):,} of {plan['steps']:,}",
        "minutes": minutes(training_s(lines, run.recipe.batch.size)),
        "images a second": f"{rate:,.0f}" if rate else "–",
        "goodput": "–" if good is None else f"{good:.0%}",
        "sessions": str(len(sessions(lines))),
        "devices": devices(plan),
    }


def _plan(run: Run) -> dict[str, dict[str, Any]]:
    """What of a plan is worth comparing."""
    plan = run.plan()
    shape = {"kind": plan["pod"]["kind"], "shape": f"{plan['pod']['rows']}x{plan['pod']['cols']}"}
    kept = ("images_per_device", "micro_batches", "tile", "summation", "payload", "steps_per_call", "steps")
    facts: Line = plan.get("environment", {})
    code = {"source": facts.get("source", "unknown")} | plan.get("versions", {})
    return {"pod": shape, "plan": {name: plan[name] for name in kept}, "by": code}


def _differences(names: list[str], values: list[dict[str, dict[str, Any]]], what: str) -> str:
    """The fields that are not the same in all, section by section."""
    fields = dict.fromkeys((section, field) for one in values for section in one for field in one[section])
    rows = []
    for section, field in fields:
        found = [_said(one.get(section, {}).get(field)) for one in values]
        if len(set(found)) > 1:
            rows.append((f"{section}.{field}", *found))
    if not rows:
        return f"<p>The {what} are the same.</p>"
    return table(("", *names), rows, f"differences of the {what}")


def _said(value: Any) -> str:
    if isinstance(value, list):
        return " x ".join(map(str, value)) or "none"
    return "none" if value in ("", None) else str(value)
