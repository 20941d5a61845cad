"""Print what a data set contains, what is wrong with it, and how it was prepared."""

import shlex

from rich.console import Console

from podscale.config.json_types import JsonObject
from podscale.report.terminal import format_columns, make_table

MAX_NAMES = 5
MAX_PROBLEMS = 20
MAX_METHODS = 6
MAX_LINES = 30


def show_survey(survey: JsonObject, console: Console) -> None:
    """Print what the index of a data set contains."""
    names, remaining = survey["classes"][:MAX_NAMES], len(survey["classes"]) - MAX_NAMES
    more = f", and {remaining:,} more" if remaining > 0 else ""
    rows = [("source", survey["source"]), ("classes", f"{len(survey['classes']):,}: {', '.join(names)}{more}")]
    for split, facts in survey["splits"].items():
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in facts["extensions"].items())
        sizes = ", ".join(f"{rank} {width} x {height}" for rank, (width, height) in facts["sizes"].items())
        fewest, most = (f"{count:,}" for count in facts["images_per_class"].values())
        each = fewest if fewest == most else f"{fewest} to {most}"
        rows += [
            (split, f"{facts['images']:,} images, {each} per class, {format_bytes(facts['bytes'])}"),
            ("", sizes),
            *([("", kinds)] if kinds else []),
        ]
    if survey["unsplit"]:
        rows.append(("split", "no folders train and val: every fifth image of each class is used for validation"))
    rows += [("warning", text) for text in survey["warnings"]]
    rows += _list_unreadable(survey)
    how = "cached, up to date" if survey["kept"] else "scanned"
    rows.append(("index", f"{how}, {survey['seconds']:.2f} s"))
    if any(facts["extensions"] for facts in survey["splits"].values()):
        rows.append(("train it", f"podscale train imagefolder {_format_data_options(survey)}"))
    console.print(make_table(survey["path"], rows))
    _show_classes(survey, console)


def _list_unreadable(survey: JsonObject) -> list[tuple[str, str]]:
    """Return rows about images that cannot be read, and the command that says why."""
    names = [name for facts in survey["splits"].values() for name in facts["unreadable"]]
    if not names:
        return []
    more = f", and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    advice = f"podscale data check {shlex.quote(survey['path'])} says why"
    return [("unreadable", f"{len(names):,}: {', '.join(names[:MAX_NAMES])}{more}; {advice}")]


def _format_data_options(survey: JsonObject) -> str:
    source = "" if survey["source"] == "folder" else f"--data.source {survey['source']} "
    return f"{source}--data.path {shlex.quote(survey['path'])}"


def _show_classes(survey: JsonObject, console: Console) -> None:
    """Print how many images each class has in each split."""
    counts = {split: facts["class_counts"] for split, facts in survey["splits"].items()}
    lines = [
        [name, *(f"{of_split[label]:,}" for of_split in counts.values())]
        for label, name in enumerate(survey["classes"][:MAX_LINES])
    ]
    console.print(format_columns(["class", *counts], lines))
    if len(survey["classes"]) > MAX_LINES:
        remaining = len(survey["classes"]) - MAX_LINES
        console.print(f"and {remaining:,} more; --json lists them all", highlight=False)


def show_check(check: JsonObject, console: Console) -> None:
    """Print what is wrong with a data set, kind by kind, then how much was examined."""
    for kind, count in check["counts"].items():
        console.print(f"{kind}: {count:,}", style="bold red", highlight=False)
        reasons = [finding["why"] for finding in check["findings"] if finding["kind"] == kind]
        for reason in reasons[:MAX_PROBLEMS]:
            console.print(f"  {reason}", highlight=False, markup=False)
        if count > MAX_PROBLEMS:
            console.print(f"  and {count - MAX_PROBLEMS:,} more; --json lists them all", highlight=False)
    for split, balance in check["classes"].items():
        if balance["uneven"]:
            (few, fewest), (many, most) = balance["fewest"], balance["most"]
            text = f"{split}: {most:,} images of {many}, {fewest:,} of {few}"
            console.print(f"imbalanced classes in {text}", highlight=False, markup=False)
    total, images = sum(check["images"].values()), check["images"].items()
    rows = [
        ("checked", ", ".join(f"{count:,} {split}" for split, count in images)),
        ("problems", "none" if check["clean"] else f"{len(check['findings']):,}"),
        ("time", f"{check['seconds']:.1f} s, {total / max(check['seconds'], 1e-9):,.0f} images/s"),
    ]
    console.print(make_table(check["path"], rows))


def show_preparation(result: JsonObject, console: Console) -> None:
    """Print what was prepared, and how to train from it."""
    images = ", ".join(f"{count:,} {split}" for split, count in result["images"].items())
    methods = [f"{count:,} {method}" for method, count in result["how"].items()]
    remaining = len(methods) - MAX_METHODS
    how = ", ".join(methods[:MAX_METHODS]) + (f", and {remaining} more kinds" if remaining > 0 else "")
    sizes = f"{format_bytes(result['bytes_in'])} -> {format_bytes(result['bytes_out'])}"
    rows = [
        ("images", f"{images}, of {result['classes']:,} classes, in {result['shards']:,} shards"),
        ("how", how),
        ("size", f"{sizes} (x {result['ratio']:.2f})"),
        ("time", "already prepared" if result["already"] else f"{result['seconds']:.1f} s"),
        ("use it", f"--data.source tar --data.path {result['prepared']}"),
    ]
    console.print(make_table("prepared", rows))


def format_bytes(count: int) -> str:
    """Format a number of bytes in a readable unit.

    >>> format_bytes(999), format_bytes(31_324_160)
    ('999 bytes', '31.3 MB')
    """
    number, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{number:.1f} {unit}"
