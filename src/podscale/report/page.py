"""A run as one HTML page that needs nothing else: no network, no server, no library.

Everything is read from the run folder, so the page can be written while the run goes on and again after it. Numbers and
words are written here, escaped; only the drawings are left to the page's script, from the JSON that the page carries.
The page allows its own style and script by their hashes and nothing besides: what a name smuggles in does not run.
The text is plain ASCII (the rest as references), so that no locale can spoil it.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from podscale.run import Run, write_atomically

POINTS = 1000  # in a curve; longer ones are averaged down
ROWS = 40  # in the table of training steps
DRAWN = 8  # rows and columns of chips; larger pods are drawn as an excerpt, as the page's script does

Line = dict[str, Any]


def write(run: Run) -> Path:
    """Writes `report.html` into the run's folder, and returns where it is."""
    path = run.folder / "report.html"
    write_atomically(path, text(run))
    return path


def text(run: Run) -> str:
    """The page."""
    lines, plan = run.metrics(), json.loads((run.folder / "plan.json").read_text())
    trained, evaluated = _by_step(lines, "train"), _by_step(lines, "eval")
    summary = run.summary() if lines and lines[-1]["event"] == "end" else {}  # an older one is not of this session
    style, script = _part("page.css"), _part("page.js")
    page = Template(_part("page.html")).substitute(
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'",
        style=style,
        script=script,
        data=_embedded(_drawn(lines, trained, evaluated, plan)),
        name=escape(run.recipe.name),
        folder=escape(run.folder.resolve().name),
        status=escape(_status(lines, plan, summary)),
        headline=_headline(lines, plan, summary, run.recipe.batch.size),
        thinned=_thinning(trained),
        evaluations=_evaluations(evaluated, plan),
        steps=_steps(trained, plan),
        time=_time(summary, lines),
        pod=escape(_pod(plan)),
        phases="".join(f'<li data-phase="{key}"><b>{name}.</b> {words}</li>' for key, name, words in _phases(plan)),
        hops=_hops(plan),
        plan=_table([], _plan_rows(plan, run)),
        classes=f"<p>{escape(', '.join(run.classes()))}</p>",
        recipe=escape(run.recipe.to_toml()),
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="ascii")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _embedded(values: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can close the element or open another."""
    found = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return found.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# --- what the lines say --------------------------------------------------------------------------------------------


def _by_step(lines: list[Line], event: str) -> list[Line]:
    """The lines of one kind in order; where a step was done again, only what came of it last."""
    found = {line["step"]: line for line in lines if line["event"] == event}
    return [found[step] for step in sorted(found)]


def _number(value: Any) -> float | None:
    """A finite number with as many digits as a drawing needs, or None."""
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _thin(lines: list[Line], points: int) -> list[list[Line]]:
    """Neighbours that make one point together: as many as keep to `points`.

    >>> _thin([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size = max(1, math.ceil(len(lines) / points))
    return [lines[i : i + size] for i in range(0, len(lines), size)]


def _mean(lines: list[Line], name: str) -> float | None:
    """None if any is not a finite number: an average must not hide that."""
    values = [_number(line.get(name)) for line in lines]
    known = [v for v in values if v is not None]
    return _number(sum(known) / len(known)) if known and len(known) == len(values) else None


def _sessions(lines: list[Line]) -> list[list[Line]]:
    """The lines cut where the run began or was resumed."""
    starts = [i for i, line in enumerate(lines) if line["event"] == "start"] or [0]
    return [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


def _training_s(lines: list[Line], batch: int) -> float:
    """Seconds of training in all sessions: what their last clock said, and the steps after it by their rate."""
    total = 0.0
    for session in _sessions(lines):
        clock = 0.0
        for line in session:
            rate = _number(line.get("images_per_s"))
            clock = line["seconds"] if "seconds" in line else clock + (batch / rate if rate else 0.0)
        total += clock
    return total


def _rate(trained: list[Line]) -> float | None:
    """Images a second over all steps."""
    rates = [r for line in trained if (r := _number(line.get("images_per_s")))]
    return len(rates) / sum(1 / r for r in rates) if rates else None


def _drawn(lines: list[Line], trained: list[Line], evaluated: list[Line], plan: Line) -> dict[str, Any]:
    """What the page's script draws."""
    thin = _thin(trained, POINTS)
    pod = plan["pod"]
    return {
        "train": {name: [_mean(some, name) for some in thin] for name in ("step", "loss", "accuracy", "learning_rate")},
        "val": {name: [_number(line.get(name)) for line in evaluated] for name in ("step", "loss", "accuracy")},
        "resumes": [line["step"] for line in lines if line["event"] == "start" and line["step"]],
        "steps_per_epoch": plan["steps_per_epoch"],
        "pod": {"rows": pod["rows"], "cols": pod["cols"], "tile": plan["tile"], "summation": plan["summation"]},
    }


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


def _headline(lines: list[Line], plan: Line, summary: Line, batch: int) -> str:
    evaluated, trained = _by_step(lines, "eval"), _by_step(lines, "train")
    sessions = len(_sessions(lines))
    rate = summary.get("images_per_s") or _rate(trained)
    seconds = _training_s(lines, batch)
    in_sessions = f", in {sessions} sessions" if sessions > 1 else ""
    cards = [
        ("accuracy at the end" if summary else "accuracy so far", *_accuracy(evaluated[-1:], plan)),
        ("best accuracy", *_accuracy(evaluated, plan)),
        ("minutes", _minutes(seconds), f"{seconds:,.1f} s from the first batch{in_sessions}"),
        ("images a second", f"{rate:,.0f}" if rate else "–", f"on {_devices(plan)}"),
    ]
    return "".join(
        f'<div><dt>{name}</dt><dd class="value">{escape(value)}</dd><dd class="beside">{escape(beside)}</dd></div>'
        for name, value, beside in cards
    )


def _accuracy(evaluated: list[Line], plan: Line) -> tuple[str, str]:
    if not evaluated:
        return "–", "not evaluated yet"
    best = max(evaluated, key=lambda line: line["accuracy"])
    where = f"of {best['examples']:,} pictures, " if "examples" in best else ""
    return f"{best['accuracy']:.2%}", f"{where}epoch {best['step'] / plan['steps_per_epoch']:.1f}"


def _minutes(seconds: float) -> str:
    """Minutes with the digits that matter.

    >>> _minutes(9.6), _minutes(132), _minutes(36000)
    ('0.16', '2.20', '600')
    """
    return f"{seconds / 60:,.2f}" if seconds < 600 else f"{seconds / 60:,.0f}"


def _devices(plan: Line) -> str:
    pod = plan["pod"]
    return f"{pod['devices']:,} {pod['kind']} device{'s' * (pod['devices'] > 1)}"


# --- tables --------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text as a table: numbers under a head, or names with their values."""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if head else ""
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body += f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>'
    kind = ' class="numbers"' if head else ""
    return f'<div class="scroll" tabindex="0"><table{kind}>{top}<tbody>{body}</tbody></table></div>'


def _cell(value: float | None, form: str = ".4g") -> str:
    return "not a number" if value is None else format(value, form)


def _evaluations(evaluated: list[Line], plan: Line) -> str:
    if not evaluated:
        return "<p>Not evaluated yet.</p>"
    rows = [
        (
            f"{line['step']:,}",
            f"{line['step'] / plan['steps_per_epoch']:.1f}",
            _cell(_number(line["accuracy"]), ".2%"),
            _cell(_number(line.get("accuracy_top5")), ".2%"),
            _cell(_number(line.get("loss"))),
            _cell(_number(line.get("seconds")), ",.1f"),
        )
        for line in evaluated
    ]
    return _table(("step", "epoch", "accuracy", "top-5 accuracy", "loss", "seconds in its session"), rows)


def _steps(trained: list[Line], plan: Line) -> str:
    if not trained:
        return "<p>Not one step done yet.</p>"
    rows = []
    for some in _thin(trained, ROWS):
        first, last = some[0]["step"], some[-1]["step"]
        means = [_cell(_mean(some, name)) for name in ("loss", "accuracy", "learning_rate")]
        at = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        rows.append((at, f"{last / plan['steps_per_epoch']:.1f}", *means, _cell(_rate(some), ",.0f")))
    return _table(("steps", "epoch", "loss", "accuracy", "learning rate", "images/s"), rows)


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
        ("pod", f"{pod['kind']}, {pod['rows']}x{pod['cols']} torus, {_devices(plan)}, hosts: {pod['hosts']:,}"),
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


# --- where the time went -------------------------------------------------------------------------------------------


def _time(summary: Line, lines: list[Line]) -> str:
    """A stacked bar and its table; known only at the end."""
    seconds = {name: s for name, s in summary.get("seconds", {}).items() if s > 0}
    wall = sum(seconds.values())
    if not wall:
        return "<p>Known when the run is at its end.</p>"
    bar, rows, done = [], [], 0.0
    for i, (name, s) in enumerate(seconds.items()):
        colour, left, width = f"p{i % 8}", 1000 * done / wall, 1000 * s / wall
        gap = min(2, width / 2)  # between parts, so that neighbours are told apart without their colours
        label = f"<title>{escape(name)} {s:,.1f} s, {s / wall:.1%}</title>"
        bar.append(f'<rect class="{colour}" x="{left:.2f}" width="{width - gap:.2f}" height="40">{label}</rect>')
        swatch = f'<svg class="swatch" viewBox="0 0 9 9"><rect class="{colour}" width="9" height="9"/></svg>'
        rows.append(f'<tr><th scope="row">{swatch}{escape(name)}</th><td>{s:,.1f} s</td><td>{s / wall:.1%}</td></tr>')
        done += s
    sessions = len(_sessions(lines))
    only = f" It was resumed: this is the last of {sessions} sessions." if sessions > 1 else ""
    return (
        f"<p>{wall:,.1f} s of wall time, compilation and all.{only}</p>"
        '<svg class="bar" viewBox="0 0 1000 40" preserveAspectRatio="none" role="img" '
        f'aria-label="Wall time by part, as in the table below">{"".join(bar)}</svg>'
        f'<div class="scroll" tabindex="0"><table class="numbers"><tbody>{"".join(rows)}</tbody></table></div>'
    )


# --- the pod -------------------------------------------------------------------------------------------------------


def _pod(plan: Line) -> str:
    pod, (h, w) = plan["pod"], plan["tile"]
    rows, cols = pod["rows"], pod["cols"]
    words = f"{rows} x {cols} chips as a torus: the last chip of every row and column is linked to the first (dashed)."
    if rows > DRAWN or cols > DRAWN:
        words += f" Drawn is an excerpt of {min(rows, DRAWN)} x {min(cols, DRAWN)}, as if it were the whole pod."
    if pod["cores"] > 1:
        words += f" The {pod['cores']} cores of a chip add up theirs first, on the chip."
    if (h, w) == (1, 1):
        return f"{words} Batch norm: every chip normalizes its own images, in groups of {plan['span']:,}."
    return f"{words} Batch norm: tiles of {h} x {w} chips normalize {plan['span']:,} images together."


# Of each summation: key for the page's script, name of the phase, what happens in it and why that is fast.
PHASES = {
    "torus": (
        ("rows-sum", "Reduce-scatter along rows",
         "Every chip passes pieces of its gradient to the right and adds what comes from the left, until it owns "
         "1/{C} of its row's sum; fast, as all chips send at once and only to a neighbour."),
        ("columns", "All-reduce along columns",
         "The chips of a column own the same piece and sum it over all rows; fast, as just 1/{C} of the gradient "
         "travels."),
        ("rows-share", "All-gather along rows",
         "The finished pieces go round the row until every chip has them all; fast, as they are only copied, and again "
         "all links of the rows work at once."),
    ),
    "torus4": (
        ("first", "Four quarters set out",
         "Two are summed along rows and two along columns, one each way round; fast, as all four links of a chip carry "
         "data at once."),
        ("second", "They change direction",
         "What was summed along rows is now summed along columns, and the other way about; fast, as only the piece "
         "that a chip owns travels."),
        ("share", "They go back",
         "The finished pieces return along the same links until every chip has the whole sum; fast, as they are only "
         "copied, and still on all four links."),
    ),
    "ring": (
        ("sum", "Once round to add",
         "All {N:,} chips form one ring; each passes a piece on and adds its own, until it owns 1/{N:,} of the sum; "
         "every link of the ring works all the time, but the way round is long."),
        ("share", "Once round to share",
         "The finished pieces go round again until every chip has them all; they are only copied, but the number of "
         "hops grows with the number of chips."),
    ),
    "sharded": (
        ("rows-sum", "Reduce-scatter along rows",
         "Every chip passes pieces of its gradient to the right and adds what comes from the left, until it owns "
         "1/{C} of its row's sum; fast, as all chips send at once and only to a neighbour."),
        ("columns", "Along columns, the update, and back",
         "What a chip owns is summed over its column as well; it updates its own 1/{N:,} of the weights, and that goes "
         "back; fast, as each weight is updated once and its momentum is kept once."),
        ("rows-share", "All-gather along rows",
         "The new weights go round the row until every chip has them all; fast, as they are only copied, and again all "
         "links of the rows work at once."),
    ),
    "ring2": (
        ("sum", "Once round to add, both ways",
         "All {N:,} chips form one ring; half of the data goes round it one way and half the other, until each chip "
         "owns 1/{N:,} of both sums; two links of every chip work all the time, but the way round is long."),
        ("share", "Once round to share",
         "The finished pieces go round again, both ways, until every chip has them all; they are only copied, but the "
         "number of hops grows with the number of chips."),
    ),
}  # fmt: skip
XLA = (
    "Every chip asks for the sum of all gradients and the compiler chooses the way; fast, as it knows the links: "
    "on a TPU it takes the two-dimensional way, too."
)


def _phases(plan: Line) -> list[tuple[str, str, str]]:
    """Key, name and words of each phase on a pod of this shape."""
    R, C = plan["pod"]["rows"], plan["pod"]["cols"]
    if R * C == 1:
        return [("none", "One chip", "Its own gradient is the sum already; nothing travels.")]
    phases = PHASES.get(plan["summation"], (("once", "One step", XLA),))
    idle = ("rows-sum", "rows-share") if C == 1 else ("columns",) if R == 1 else ()
    return [(key, name, words.format(C=C, N=R * C)) for key, name, words in phases if key not in idle]


def _hops(plan: Line) -> str:
    """How far the gradients travel on this very pod, however little of it is drawn."""
    R, C = plan["pod"]["rows"], plan["pod"]["cols"]
    ring = 2 * (R * C - 1)
    by_name = {"torus": 2 * (R - 1) + 2 * (C - 1), "torus4": 4 * (max(R, C) - 1), "ring": ring, "ring2": ring}
    by_name["sharded"] = by_name["torus"]
    hops = by_name.get(plan["summation"])
    if not hops:
        return ""
    words = f"On this {R} x {C} pod that takes {hops:,} hops from chip to chip"
    return f"{words}; one ring through all chips would take {ring:,}." if hops < ring else f"{words}."
