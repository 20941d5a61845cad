"""The plan and the end of a run, in words on a terminal."""

import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(title: str, rows: list[tuple[str, str]]) -> Table:
    """Names and values as a small table."""
    grid = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))  # a name of the user's is text, whatever brackets are in it
    return grid


def columns(head: list[str], rows: list[list[str]]) -> Text:
    """A table with a line of names above it, as wide as it must be; columns of numbers stand on the right."""
    lines = [head, *rows]
    places = range(len(head))
    widths = [max(len(line[i]) for line in lines) for i in places]
    numbers = [all(row[i][:1].isdigit() or row[i][:1] in "+-" for row in rows) for i in places]
    texts = (
        "  ".join(f"{line[i]:>{widths[i]}}" if numbers[i] else f"{line[i]:<{widths[i]}}" for i in places).rstrip()
        for line in lines
    )
    first, *rest = texts
    return Text.assemble((first, "bold"), *(f"\n{text}" for text in rest))


def show(summary: dict[str, Any], console: Console) -> None:
    """The summary of a run, and what to do with it next."""
    seconds, folder = summary["seconds"], summary["run"]
    rows = []
    if summary["accuracy"] is not None:
        rows.append(("accuracy", f"{summary['accuracy']:.2%} at the end, {summary['best_accuracy']:.2%} at best"))
    compiled = f", {summary['compile_s']:.1f} s of compilation before" if summary["compile_s"] else ""
    rows.append(("time", f"{summary['train_s']:.1f} s from the first batch{compiled}"))
    if summary["images_per_s"]:
        rows.append(("rate", f"{summary['images_per_s']:,.0f} images/s while training"))
    if "step" in summary:
        rows.append(("step", _step(summary["step"])))
    if seconds:
        rows.append(("where it went", ", ".join(f"{part} {s:.1f} s" for part, s in seconds.items() if s >= 0.05)))
    if "goodput" in summary:
        rows.append(
            ("goodput", f"{summary['goodput']:.0%} of all time since the run began went into training that counted")
        )
    if "until" in summary:
        rows.insert(0, ("until", _target(summary)))
    rows.append(("run", folder))
    rows.append(("report", f"{folder}/report.html"))
    rows.append(("try it", f"{_program()} predict {folder}/sample.png --run {folder}"))
    console.print(table("result", rows))


def _step(step: dict[str, Any]) -> str:
    """The measured step beside the predicted one, and where they differ most."""
    part = step["differs_most"]
    one, other = (step[f"{which}_parts_s"][part] * 1e3 for which in ("measured", "predicted"))
    return (
        f"{step['measured_s'] * 1e3:.1f} ms, {step['predicted_s'] * 1e3:.1f} ms predicted; "
        f"most of the difference: {part} ({one:.1f} ms, {other:.1f} predicted)"
    )


def _program() -> str:
    """The command as it can be typed here: its path where it is in no folder that the shell searches."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "podscale" and not shutil.which("podscale") else "podscale"


def _target(summary: dict[str, Any]) -> str:
    (metric, value), *_ = summary["until"].items()
    if not summary["reached"]:
        return f"{metric} {value} was not reached"
    with_compile = summary["reached_with_compile_s"]
    return f"{metric} {value} reached in {summary['reached_s']:.1f} s ({with_compile:.1f} s with compilation)"


def show_prediction(picture: dict[str, Any], console: Console) -> None:
    """What is on a picture; nothing of one that cannot be read, which is told at the end."""
    if "top" not in picture:
        return
    console.print(picture["image"], style="bold", highlight=False, markup=False)
    for guess in picture["top"]:
        console.print(f"  {guess['probability']:6.1%}  {guess['class']}", highlight=False, markup=False)


def unreadable(pictures: list[dict[str, Any]]) -> str:
    """One sentence about the pictures that could not be read; empty if all could.

    >>> unreadable([{"image": "a.jpg", "top": []}, {"image": "b.jpg", "error": "cannot read b.jpg: it is empty"}])
    'cannot read b.jpg: it is empty'
    """
    problems = [picture["error"] for picture in pictures if "error" in picture]
    if len(problems) < 2:
        return "".join(problems)
    return f"{len(problems)} of {len(pictures)} pictures were left out; the first: {problems[0]}"
