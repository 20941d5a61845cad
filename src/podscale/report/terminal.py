"""Print tables, predictions and the summary of a run on a terminal."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from podscale.config.json_types import JsonObject
from podscale.storage.locations import has_scheme


def make_table(title: str, rows: list[tuple[str, str]]) -> Table:
    """Return names and values as a small table."""
    grid = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))  # a value is text, even if it has brackets that look like markup
    return grid


def format_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Text:
    """Return a table with a header, as wide as its contents; columns of numbers are right-aligned."""
    lines = [head, *rows]
    indices = range(len(head))
    widths = [max(len(line[i]) for line in lines) for i in indices]
    numbers = [all(row[i][:1].isdigit() or row[i][:1] in "+-" for row in rows) for i in indices]
    header, *texts = (
        "  ".join(f"{line[i]:>{widths[i]}}" if numbers[i] else f"{line[i]:<{widths[i]}}" for i in indices).rstrip()
        for line in lines
    )
    return Text.assemble((header, "bold"), *(f"\n{text}" for text in texts))


def show_summary(summary: JsonObject, console: Console) -> None:
    """Print the summary of a run, and what to do with it next."""
    seconds, folder = summary["seconds"], summary["run"]
    rows = []
    if summary["accuracy"] is not None:
        rows.append(("accuracy", f"{summary['accuracy']:.2%} at the end, {summary['best_accuracy']:.2%} at best"))
    if "balanced_accuracy" in summary:
        baseline = f"majority baseline {summary['majority_baseline']:.2%}"
        rows.append(("balanced", f"{summary['balanced_accuracy']:.2%} balanced accuracy; {baseline}"))
    compiled = f", after {summary['compile_s']:.1f} s of compilation" if summary["compile_s"] else ""
    rows.append(("time", f"{summary['train_s']:.1f} s of training and evaluation{compiled}"))
    if summary["images_per_s"]:
        rows.append(("rate", f"{summary['images_per_s']:,.0f} images/s while training"))
    if "step" in summary:
        rows.append(("step", _format_step(summary["step"])))
    if seconds:
        rows.append(("time by phase", ", ".join(f"{part} {s:.1f} s" for part, s in seconds.items() if s >= 0.05)))
    if "goodput" in summary:
        rows.append(("goodput", f"{summary['goodput']:.0%} of wall time spent training"))
    if "until" in summary:
        rows.insert(0, ("until", _format_target(summary)))
    rows.append(("run", folder))
    if has_scheme(folder):
        rows.append(("report", f"{_get_command()} report {shlex.quote(folder)}"))
    else:
        rows.append(("report", f"{folder}/report.html"))
        sample = shlex.quote(f"{folder}/sample.png")
        rows.append(("try it", f"{_get_command()} predict {sample} --run {shlex.quote(folder)}"))
    console.print(make_table("result", rows))
    if summary.get("warning"):
        console.print(f"warning: {summary['warning']}", style="bold red", highlight=False, markup=False)


def _format_step(step: JsonObject) -> str:
    """Return the measured and the predicted step, and where they differ most."""
    part = step["differs_most"]
    measured, predicted = (step[f"{kind}_parts_s"][part] * 1e3 for kind in ("measured", "predicted"))
    return (
        f"{step['measured_s'] * 1e3:.1f} ms, {step['predicted_s'] * 1e3:.1f} ms predicted; "
        f"most of the difference: {part} ({measured:.1f} ms, {predicted:.1f} predicted)"
    )


def _get_command() -> str:
    """Return the command as the user can type it: its path if it is not on the shell's PATH."""
    program = Path(sys.argv[0])
    return shlex.quote(str(program)) if program.name == "podscale" and not shutil.which("podscale") else "podscale"


def _format_target(summary: JsonObject) -> str:
    (metric, value), *_ = summary["until"].items()
    if not summary["reached"]:
        return f"{metric} {value} was not reached"
    with_compile = summary["reached_with_compile_s"]
    return f"{metric} {value} reached in {summary['reached_s']:.1f} s ({with_compile:.1f} s with compilation)"


def show_prediction(prediction: JsonObject, console: Console) -> None:
    """Print the classes of an image; nothing for one that cannot be read, which is reported at the end."""
    if "top" not in prediction:
        return
    console.print(prediction["image"], style="bold", highlight=False, markup=False)
    for guess in prediction["top"]:
        console.print(f"  {guess['probability']:6.1%}  {guess['class']}", highlight=False, markup=False)


def summarize_unreadable(predictions: list[JsonObject]) -> str:
    """Return a sentence about the images that could not be read; empty if all could.

    >>> unreadable = {"image": "b.jpg", "error": "cannot read b.jpg: it is empty"}
    >>> summarize_unreadable([{"image": "a.jpg", "top": []}, unreadable])
    'cannot read b.jpg: it is empty'
    """
    problems = [prediction["error"] for prediction in predictions if "error" in prediction]
    if len(problems) < 2:
        return "".join(problems)
    return f"{len(problems)} of {len(predictions)} images could not be read and were skipped; the first: {problems[0]}"
