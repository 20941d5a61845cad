"""Write a run's report as one self-contained HTML page: no network, no server, no library.

Everything is read from the run folder, so the page can be written during the run and again after it. Numbers and text
are written here; the page's scripts only draw the charts, from the JSON embedded in the page.
"""

import math
from html import escape
from pathlib import Path

from podscale.config.json_types import JsonObject
from podscale.recipe import Recipe
from podscale.report import mistakes_section, next_steps, pod_section, time_section
from podscale.report.history import (
    MAX_POINTS,
    Line,
    compute_mean,
    compute_mean_rate,
    group_points,
    make_evaluation_curves,
    make_time_curves,
    make_training_curves,
    select_by_step,
    select_summary,
    split_sessions,
    sum_training_s,
)
from podscale.report.html import format_cell, get_colour, render_cards, render_document, render_table, round_number
from podscale.runs.folder import Run
from podscale.storage.files import write_atomically

MAX_ROWS = 40  # of the table of training steps
SCRIPTS = ("chart.js", "torus.js", "page.js")


def write_report(run: Run) -> Path:
    """Write `report.html` into the run's folder and return its path."""
    path = run.folder / "report.html"
    write_atomically(path, render_report(run))
    return path


def render_report(run: Run) -> str:
    """Return the page as HTML."""
    lines, plan, names = run.metrics(), run.plan(), run.classes()
    trained, evaluated = select_by_step(lines, "train"), select_by_step(lines, "eval")
    summary = select_summary(lines, run.summary())
    return render_document(
        "page.html",
        SCRIPTS,
        _collect_data(lines, trained, evaluated, plan),
        name=escape(run.recipe.name),
        folder=escape(run.folder.resolve().name),
        status=escape(_format_status(lines, plan, summary)),
        headline=render_cards(_list_headline(run, lines, plan, summary)),
        thinned=_describe_thinning(trained) + escape(_describe_loss(run.recipe)),
        next=next_steps.render_next_steps(run, lines),
        parts=_format_keys(make_time_curves(trained)),
        evaluations=_format_evaluations(evaluated, plan),
        steps=_format_steps(trained, plan),
        evidence=mistakes_section.render_mistakes(run.mistakes(), names, plan["steps_per_epoch"]),
        bad=mistakes_section.render_bad_images(run.read_bad_images()),
        time=time_section.render_ledger(summary, run.folder, len(split_sessions(lines))),
        predicted=time_section.render_prediction(summary),
        pod=escape(pod_section.describe_pod(plan)),
        phases="".join(_format_phase(*phase) for phase in pod_section.list_phases(plan)),
        hops=pod_section.describe_hops(plan),
        plan=render_table([], _list_plan_rows(plan, run), "the plan"),
        environment=_format_environment(plan),
        classes=f"<p>{escape(', '.join(names))}</p>",
        recipe=escape(run.recipe.to_toml()),
    )


def _collect_data(lines: list[Line], trained: list[Line], evaluated: list[Line], plan: Line) -> JsonObject:
    """Return the data that the page's scripts draw."""
    pod = plan["pod"]
    return {
        "train": make_training_curves(trained),
        "val": make_evaluation_curves(evaluated),
        "spent": make_time_curves(trained),
        "pauses": list(time_section.PERIODIC_PARTS),
        "colours": {part: get_colour(part) for line in trained for part in line.get("spent", ())},
        "resumes": [line["step"] for line in lines if line["event"] == "start" and line["step"]],
        "steps_per_epoch": plan["steps_per_epoch"],
        "pod": {
            "rows": pod["rows"] // pod.get("slices", 1),
            "cols": pod["cols"],
            "tile": plan["tile"],
            "summation": pod_section.get_main_summation(plan),
        },
    }


def _format_phase(key: str, name: str, text: str) -> str:
    return f'<li data-phase="{key}"><b>{name}.</b> {text}</li>'


def _format_keys(parts: JsonObject) -> str:
    return " ".join(f'<span class="key s{get_colour(name)}">{escape(name)}</span>' for name in parts)


# --- the top of the page -------------------------------------------------------------------------------------------


def _format_status(lines: list[Line], plan: Line, summary: Line) -> str:
    last = max((line["step"] for line in lines), default=0)
    if not last:
        return f"No step completed yet (0 of {plan['steps']:,})."
    position = f"Step {last:,} of {plan['steps']:,}, epoch {last / plan['steps_per_epoch']:.1f}"
    if not summary:
        return f"{position}: running or interrupted when this page was written."
    if "until" in summary:
        (metric, value), *_ = summary["until"].items()
        outcome = f"reached in {summary['reached_s']:.1f} s" if summary["reached"] else "was not reached"
        return f"{position}: finished; {metric} {value} {outcome}."
    return f"{position}: finished."


def _list_headline(run: Run, lines: list[Line], plan: Line, summary: Line) -> list[tuple[str, str, str]]:
    evaluated, trained = select_by_step(lines, "eval"), select_by_step(lines, "train")
    count, rate = len(split_sessions(lines)), summary.get("images_per_s") or compute_mean_rate(trained)
    seconds, goodput = sum_training_s(lines, run.recipe.batch.size), time_section.compute_goodput(summary, run.folder)
    in_sessions = f", in {count} sessions" if count > 1 else ""
    return [
        ("accuracy at the end" if summary else "accuracy so far", *format_accuracy(evaluated[-1:], plan)),
        ("best accuracy", *format_accuracy(evaluated, plan)),
        ("minutes", format_minutes(seconds), f"{seconds:,.1f} s of training and evaluation{in_sessions}"),
        ("images per second", f"{rate:,.0f}" if rate else "–", f"on {format_devices(plan)}"),
        ("goodput", "–" if goodput is None else f"{goodput:.0%}", "of wall time spent training"),
    ]


def format_accuracy(evaluated: list[Line], plan: Line) -> tuple[str, str]:
    """Return the best accuracy of these evaluations, and where it was reached."""
    if not evaluated:
        return "–", "not evaluated yet"
    best = max(evaluated, key=lambda line: line["accuracy"])
    examples = f"of {best['examples']:,} images, " if "examples" in best else ""
    return f"{best['accuracy']:.2%}", f"{examples}epoch {best['step'] / plan['steps_per_epoch']:.1f}"


def format_minutes(seconds: float) -> str:
    """Format seconds as minutes with the significant digits.

    >>> format_minutes(9.6), format_minutes(132), format_minutes(36000)
    ('0.16', '2.20', '600')
    """
    return f"{seconds / 60:,.2f}" if seconds < 600 else f"{seconds / 60:,.0f}"


def format_devices(plan: Line) -> str:
    """Return the number and kind of devices."""
    pod = plan["pod"]
    kind = "CPU" if pod["kind"] == "cpu" else pod["kind"]
    return f"{pod['devices']:,} {kind} device{'s' * (pod['devices'] > 1)}"


# --- tables --------------------------------------------------------------------------------------------------------


def _format_evaluations(evaluated: list[Line], plan: Line) -> str:
    if not evaluated:
        return "<p>Not evaluated yet.</p>"
    rows = [
        (
            f"{line['step']:,}",
            f"{line['step'] / plan['steps_per_epoch']:.1f}",
            format_cell(round_number(line["accuracy"]), ".2%"),
            format_cell(round_number(line.get("accuracy_top5")), ".2%"),
            format_cell(round_number(line.get("loss"))),
            format_cell(round_number(line.get("seconds")), ",.1f"),
        )
        for line in evaluated
    ]
    head = ("step", "epoch", "accuracy", "top-5 accuracy", "loss", "seconds in the session")
    return render_table(head, rows, "evaluations")


def _format_steps(trained: list[Line], plan: Line) -> str:
    if not trained:
        return "<p>No step completed yet.</p>"
    rows = []
    for group in group_points(trained, MAX_ROWS):
        first, last = group[0]["step"], group[-1]["step"]
        means = [format_cell(compute_mean(group, name)) for name in ("loss", "accuracy", "learning_rate")]
        steps = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        rows.append(
            (steps, f"{last / plan['steps_per_epoch']:.1f}", *means, format_cell(compute_mean_rate(group), ",.0f"))
        )
    return render_table(("steps", "epoch", "loss", "accuracy", "learning rate", "images/s"), rows, "training steps")


def _describe_thinning(trained: list[Line]) -> str:
    size = max(1, math.ceil(len(trained) / MAX_POINTS))
    each = f"Each point of a training curve is the mean of {size} steps. " if size > 1 else ""
    return (
        f"{each}The faint line is what was measured, the strong one its moving average. Point at a curve, or focus it "
        "and use the arrow keys, to read values. A dotted vertical line is where the run was resumed."
    )


def _describe_loss(recipe: Recipe) -> str:
    """Return why training loss and validation loss may not be compared, if they may not."""
    parts = [f"label smoothing {recipe.augment.label_smoothing:g}"] if recipe.augment.label_smoothing else []
    parts += [f"mixup {recipe.augment.mixup:g}"] if recipe.augment.mixup else []
    if not parts:
        return ""
    return f" Training loss includes {' and '.join(parts)}, and validation loss does not: the two are not comparable."


def _list_plan_rows(plan: Line, run: Run) -> list[tuple[str, str]]:
    pod, counts, recipe, memory = plan["pod"], plan["counts"], run.recipe, plan["bytes_per_device"]
    parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in memory.items() if name != "limit" and size)
    return [
        ("recipe", f"{recipe.name} {recipe.digest()}"),
        ("data", f"{counts['train']:,} train, {counts['val']:,} val, {counts['classes']:,} classes"),
        ("model", f"{recipe.model.name}, {recipe.data.image_size} px, {recipe.model.precision}"),
        ("pod", f"{pod['kind']}, {pod['rows']}x{pod['cols']} torus, {format_devices(plan)}, hosts: {pod['hosts']:,}"),
        ("batch", f"{recipe.batch.size:,} images, {plan['images_per_device']:,} per device"),
        ("micro-batches", f"{plan['micro_batches']:,} per step"),
        ("batch norm", f"groups of {plan['span']:,}, tiles of {plan['tile'][0]}x{plan['tile'][1]} chips"),
        (
            "summation",
            f"{plan['summation']}, {plan['payload']} payload, buckets of {plan['bucket_bytes'] / 2**20:,.0f} MiB",
        ),
        ("input", f"lanes: {recipe.data.lanes:,}, at most {plan['lanes_per_host']:,} per host"),
        ("steps", f"{plan['steps']:,} ({plan['steps_per_epoch']:.1f} per epoch), {plan['steps_per_call']:,} per call"),
        ("memory", f"MiB per device, estimated: {parts or 'unknown'}; {memory['limit'] / 2**20:,.0f} available"),
    ]


def _format_environment(plan: Line) -> str:
    """Return machine, libraries and code of the last session."""
    facts, libraries = plan.get("environment"), plan.get("versions", {})
    if not facts:
        return "<p>Not known: the run was started by an older Podscale.</p>"
    settings = ", ".join(f"{name}={value}" for name, value in facts["settings"].items())
    rows = [
        ("source", f"podscale {libraries.get('podscale', '')}, SHA-256 {facts['source']}..."),
        ("libraries", ", ".join(f"{name} {version}" for name, version in libraries.items() if name != "podscale")),
        ("devices", facts["accelerators"]),
        ("processor", f"{facts['processor']}, cores: {facts['cores']}, {facts['memory_bytes'] / 2**30:.1f} GiB"),
        ("system", facts["system"]),
        ("settings", settings or "none"),
        ("data", f"digest {plan.get('data_digest', 'unknown')}"),
    ]
    return render_table([], rows, "the environment")
