"""A run as one HTML page that needs nothing else: no network, no server, no library.

Everything is read from the run folder, so the page can be written while the run goes on and again after it. Numbers and
words are written here; only the drawings are left to the page's scripts, from the JSON that the page carries.
"""

import math
from html import escape
from pathlib import Path
from typing import Any

from podscale.report import mistakes_section, pod_section, time_section
from podscale.report.history import (
    POINTS,
    Line,
    by_step,
    evaluation_curves,
    mean,
    mean_rate,
    sessions,
    spent_curves,
    summary_of,
    thin,
    training_curves,
    training_s,
)
from podscale.report.html import cards, cell, colour, document, number, table
from podscale.runs.folder import Run
from podscale.storage.files import write_atomically

ROWS = 40  # in the table of training steps
SCRIPTS = ("chart.js", "torus.js", "page.js")


def write(run: Run) -> Path:
    """Writes `report.html` into the run's folder, and returns where it is."""
    path = run.folder / "report.html"
    write_atomically(path, text(run))
    return path


def text(run: Run) -> str:
    """The page."""
    lines, plan, names = run.metrics(), run.plan(), run.classes()
    trained, evaluated = by_step(lines, "train"), by_step(lines, "eval")
    summary = summary_of(lines, run.summary())
    return document(
        "page.html",
        SCRIPTS,
        _drawn(lines, trained, evaluated, plan),
        name=escape(run.recipe.name),
        folder=escape(run.folder.resolve().name),
        status=escape(_status(lines, plan, summary)),
        headline=cards(_headline(run, lines, plan, summary)),
        thinned=_thinning(trained),
        parts=_keys(spent_curves(trained)),
        evaluations=_evaluations(evaluated, plan),
        steps=_steps(trained, plan),
        evidence=mistakes_section.section(run.findings(), names, plan["steps_per_epoch"]),
        bad=mistakes_section.bad_pictures(run.all_bad_pictures()),
        time=time_section.ledger(summary, run.folder, len(sessions(lines))),
        predicted=time_section.predicted(summary),
        pod=escape(pod_section.pod(plan)),
        phases="".join(_phase(*phase) for phase in pod_section.phases(plan)),
        hops=pod_section.hops(plan),
        plan=table([], _plan_rows(plan, run), "the plan"),
        environment=_environment(plan),
        classes=f"<p>{escape(', '.join(names))}</p>",
        recipe=escape(run.recipe.to_toml()),
    )


def _drawn(lines: list[Line], trained: list[Line], evaluated: list[Line], plan: Line) -> dict[str, Any]:
    """What the page's scripts draw."""
    pod = plan["pod"]
    return {
        "train": training_curves(trained),
        "val": evaluation_curves(evaluated),
        "spent": spent_curves(trained),
        "pauses": list(time_section.PAUSES),
        "colours": {part: colour(part) for line in trained for part in line.get("spent", ())},
        "resumes": [line["step"] for line in lines if line["event"] == "start" and line["step"]],
        "steps_per_epoch": plan["steps_per_epoch"],
        "pod": {"rows": pod["rows"], "cols": pod["cols"], "tile": plan["tile"], "summation": plan["summation"]},
    }


def _phase(key: str, name: str, words: str) -> str:
    return f'<li data-phase="{key}"><b>{name}.</b> {words}</li>'


def _keys(parts: dict[str, Any]) -> str:
    return " ".join(f'<span class="key s{colour(name)}">{escape(name)}</span>' for name in parts)


# --- the top of the page -------------------------------------------------------------------------------------------


def _status(lines: list[Line], plan: Line, summary: Line) -> str:
    last = max((line["step"] for line in lines), default=0)
    if not last:
        return f"Not one step done yet of {plan['steps']:,}."
    words = f"Step {last:,} of {plan['steps']:,}, epoch {last / plan['steps_per_epoch']:.1f}"
    if not summary:
        return f"{words}: not at its end when this page was written."
    if "until" in summary:
        (metric, value), *_ = summary["until"].items()
        found = f"reached in {summary['reached_s']:.1f} s" if summary["reached"] else "was not reached"
        return f"{words}: at its end; {metric} {value} {found}."
    return f"{words}: at its end."


def _headline(run: Run, lines: list[Line], plan: Line, summary: Line) -> list[tuple[str, str, str]]:
    evaluated, trained = by_step(lines, "eval"), by_step(lines, "train")
    count, rate = len(sessions(lines)), summary.get("images_per_s") or mean_rate(trained)
    seconds, good = training_s(lines, run.recipe.batch.size), time_section.goodput_of(summary, run.folder)
    in_sessions = f", in {count} sessions" if count > 1 else ""
    return [
        ("accuracy at the end" if summary else "accuracy so far", *accuracy(evaluated[-1:], plan)),
        ("best accuracy", *accuracy(evaluated, plan)),
        ("minutes", minutes(seconds), f"{seconds:,.1f} s from the first batch{in_sessions}"),
        ("images a second", f"{rate:,.0f}" if rate else "–", f"on {devices(plan)}"),
        ("goodput", "–" if good is None else f"{good:.0%}", "of all time was training that counted"),
    ]


def accuracy(evaluated: list[Line], plan: Line) -> tuple[str, str]:
    """The best of these evaluations, and which it was."""
    if not evaluated:
        return "–", "not evaluated yet"
    best = max(evaluated, key=lambda line: line["accuracy"])
    where = f"of {best['examples']:,} pictures, " if "examples" in best else ""
    return f"{best['accuracy']:.2%}", f"{where}epoch {best['step'] / plan['steps_per_epoch']:.1f}"


def minutes(seconds: float) -> str:
    """Minutes with the digits that matter.

    >>> minutes(9.6), minutes(132), minutes(36000)
    ('0.16', '2.20', '600')
    """
    return f"{seconds / 60:,.2f}" if seconds < 600 else f"{seconds / 60:,.0f}"


def devices(plan: Line) -> str:
    """How many of what kind."""
    pod = plan["pod"]
    return f"{pod['devices']:,} {pod['kind']} device{'s' * (pod['devices'] > 1)}"


# --- tables --------------------------------------------------------------------------------------------------------


def _evaluations(evaluated: list[Line], plan: Line) -> str:
    if not evaluated:
        return "<p>Not evaluated yet.</p>"
    rows = [
        (
            f"{line['step']:,}",
            f"{line['step'] / plan['steps_per_epoch']:.1f}",
            cell(number(line["accuracy"]), ".2%"),
            cell(number(line.get("accuracy_top5")), ".2%"),
            cell(number(line.get("loss"))),
            cell(number(line.get("seconds")), ",.1f"),
        )
        for line in evaluated
    ]
    head = ("step", "epoch", "accuracy", "top-5 accuracy", "loss", "seconds in its session")
    return table(head, rows, "evaluations")


def _steps(trained: list[Line], plan: Line) -> str:
    if not trained:
        return "<p>Not one step done yet.</p>"
    rows = []
    for some in thin(trained, ROWS):
        first, last = some[0]["step"], some[-1]["step"]
        means = [cell(mean(some, name)) for name in ("loss", "accuracy", "learning_rate")]
        at = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        rows.append((at, f"{last / plan['steps_per_epoch']:.1f}", *means, cell(mean_rate(some), ",.0f")))
    return table(("steps", "epoch", "loss", "accuracy", "learning rate", "images/s"), rows, "training steps")


def _thinning(trained: list[Line]) -> str:
    size = max(1, math.ceil(len(trained) / POINTS))
    each = f"Each point of a training curve is the mean of {size} steps. " if size > 1 else ""
    return (
        f"{each}The faint line is what was measured, the strong one its moving average. Point at a curve, or focus it "
        "and use the arrow keys, to read values. A dotted upright line is where the run was resumed."
    )


def _plan_rows(plan: Line, run: Run) -> list[tuple[str, str]]:
    pod, counts, recipe, memory = plan["pod"], plan["counts"], run.recipe, plan["bytes_per_device"]
    parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in memory.items() if name != "limit" and size)
    return [
        ("recipe", f"{recipe.name} {recipe.digest()}"),
        ("data", f"{counts['train']:,} train, {counts['val']:,} val, {counts['classes']:,} classes"),
        ("model", f"{recipe.model.name}, {recipe.data.image_size} px, {recipe.model.precision}"),
        ("pod", f"{pod['kind']}, {pod['rows']}x{pod['cols']} torus, {devices(plan)}, hosts: {pod['hosts']:,}"),
        ("batch", f"{recipe.batch.size:,} images, {plan['images_per_device']:,} a device"),
        ("micro-batches", f"{plan['micro_batches']:,} a step"),
        ("batch norm", f"groups of {plan['span']:,}, tiles of {plan['tile'][0]}x{plan['tile'][1]} chips"),
        (
            "summation",
            f"{plan['summation']}, {plan['payload']} payload, buckets of {plan['bucket_bytes'] / 2**20:,.0f} MiB",
        ),
        ("input", f"lanes: {recipe.data.lanes:,}, at most {plan['lanes_per_host']:,} a host"),
        ("steps", f"{plan['steps']:,} ({plan['steps_per_epoch']:.1f} an epoch), {plan['steps_per_call']:,} a call"),
        ("memory", f"MiB a device, estimated: {parts or 'unknown'}; there are {memory['limit'] / 2**20:,.0f}"),
    ]


def _environment(plan: Line) -> str:
    """Machine, libraries and code, as the last session found them."""
    facts, libraries = plan.get("environment"), plan.get("versions", {})
    if not facts:
        return "<p>Not known: the run was begun by an older Podscale.</p>"
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
    return table([], rows, "the environment")
