"""Compare several runs on one HTML page: their curves, their results side by side, and where their recipes differ."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from podscale.config.json_types import JsonObject
from podscale.errors import UserError
from podscale.report.history import (
    Line,
    compute_mean_rate,
    make_evaluation_curves,
    make_training_curves,
    select_by_step,
    select_summary,
    split_sessions,
    sum_training_s,
)
from podscale.report.html import render_document, render_table
from podscale.report.page import format_accuracy, format_devices, format_minutes
from podscale.report.time_section import compute_goodput
from podscale.runs.folder import Run
from podscale.storage.files import write_atomically
from podscale.storage.paths import require_local

SCRIPTS = ("chart.js", "compare.js")
MAX_CLASSES = 50  # of the table of classes
MAX_RUNS = 24  # on one page; the curves of more cannot be distinguished


def write_comparison(runs: Sequence[Run], path: Path) -> Path:
    """Write the comparison to a file and return its path.

    Raises:
        UserError: the number of runs is out of range, or the file cannot be written.
    """
    require_local(path, "--to")
    page = render_comparison(runs)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file with --to") from None
    return path


def default_file(runs: Sequence[Run]) -> str:
    """Return a file name that is made of the runs' names."""
    return f"comparison-{'-'.join(run.folder.resolve().name for run in runs)}"[:100] + ".html"


def render_comparison(runs: Sequence[Run]) -> str:
    """Return the page as HTML.

    Raises:
        UserError: there are fewer than 2 runs or more than `MAX_RUNS`.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise UserError(f"a comparison takes 2 to {MAX_RUNS} runs, not {len(runs)}")
    names = _name_runs(runs)
    curves = [_collect_curves(name, run) for name, run in zip(names, runs, strict=True)]
    switches = "".join(
        f'<label><input type="checkbox" id="run-{i}" checked> <span class="key s{i % 8}">{escape(name)}</span></label>'
        for i, name in enumerate(names)
    )
    return render_document(
        "compare.html",
        SCRIPTS,
        {"runs": curves},
        name=escape(", ".join(names)),
        switches=switches,
        results=render_table(("", *names), _make_result_rows(runs), "results of the runs"),
        classes=_render_classes(names, runs),
        recipes=_format_differences(names, [run.recipe.to_dict() for run in runs], "recipes"),
        plans=_format_differences(names, [_select_plan_fields(run) for run in runs], "plans"),
    )


def _name_runs(runs: Sequence[Run]) -> list[str]:
    """Return the name of each run's folder, or its path where two folders share a name."""
    names = [run.folder.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _collect_curves(name: str, run: Run) -> JsonObject:
    lines = run.metrics()
    return {
        "name": name,
        "train": make_training_curves(select_by_step(lines, "train")),
        "val": make_evaluation_curves(select_by_step(lines, "eval")),
        "steps_per_epoch": run.plan()["steps_per_epoch"],
    }


def _make_result_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for each result, with a column for each run."""
    columns = [_summarize_run(run) for run in runs]
    return [[name, *(column[name] for column in columns)] for name in columns[0]]


def _render_classes(names: list[str], runs: Sequence[Run]) -> str:
    """Return the recall of each class by run, the largest difference first."""
    if len({run.classes() for run in runs}) > 1:
        return "<p>The runs have different classes.</p>"
    recalls = [_compute_recalls(run) for run in runs]
    if not all(recalls):
        return "<p>Known once all runs have been evaluated.</p>"
    rows = []
    for number, name in enumerate(runs[0].classes()):
        values = [recall[number] for recall in recalls]
        known = [value for value in values if value is not None]
        cells = ["–" if value is None else f"{value:.1%}" for value in values]
        rows.append((max(known) - min(known) if known else 0.0, [name, *cells]))
    rows.sort(key=lambda row: -row[0])
    return render_table(("class", *names), [cells for _, cells in rows[:MAX_CLASSES]], "recall by class")


def _compute_recalls(run: Run) -> list[float | None]:
    mistakes = run.mistakes()
    counts = zip(mistakes["correct"], mistakes["examples"], strict=True) if mistakes else ()
    return [right / count if count else None for right, count in counts]


def _summarize_run(run: Run) -> dict[str, str]:
    lines, plan = run.metrics(), run.plan()
    summary, evaluated, trained = (
        select_summary(lines, run.summary()),
        select_by_step(lines, "eval"),
        select_by_step(lines, "train"),
    )
    rate, goodput = summary.get("images_per_s") or compute_mean_rate(trained), compute_goodput(summary, run.folder)
    return {
        "accuracy at the end": format_accuracy(evaluated[-1:], plan)[0],
        "best accuracy": " in ".join(format_accuracy(evaluated, plan)[i].rpartition(", ")[2] for i in (0, 1)),
        "steps": f"{max((line['step'] for line in lines), default=0):,} of {plan['steps']:,}",
        "minutes": format_minutes(sum_training_s(lines, run.recipe.batch.size)),
        "images per second": f"{rate:,.0f}" if rate else "–",
        "goodput": "–" if goodput is None else f"{goodput:.0%}",
        "sessions": str(len(split_sessions(lines))),
        "devices": format_devices(plan),
    }


def _select_plan_fields(run: Run) -> dict[str, JsonObject]:
    """Return the parts of a plan that are compared."""
    plan = run.plan()
    shape = {"kind": plan["pod"]["kind"], "shape": f"{plan['pod']['rows']}x{plan['pod']['cols']}"}
    fields = ("images_per_device", "micro_batches", "tile", "summation", "payload", "steps_per_call", "steps")
    facts: Line = plan.get("environment", {})
    code = {"source": facts.get("source", "unknown")} | plan.get("versions", {})
    return {"pod": shape, "plan": {name: plan[name] for name in fields}, "by": code}


def _format_differences(names: list[str], values: list[dict[str, JsonObject]], subject: str) -> str:
    """Return a table of the fields that are not the same in all runs, section by section."""
    fields = dict.fromkeys((section, field) for run in values for section in run for field in run[section])
    rows = []
    for section, field in fields:
        cells = [_format_value(run.get(section, {}).get(field)) for run in values]
        if len(set(cells)) > 1:
            rows.append((f"{section}.{field}", *cells))
    if not rows:
        return f"<p>The {subject} are the same.</p>"
    return render_table(("", *names), rows, f"differences of the {subject}")


def _format_value(value: object) -> str:
    if isinstance(value, list):
        return " x ".join(map(str, value)) or "none"
    return "none" if value in ("", None) else str(value)
