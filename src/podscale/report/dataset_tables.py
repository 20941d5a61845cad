"""What a data set holds, and what became of it, in words on a terminal."""

import shlex
from typing import Any

from rich.console import Console

from podscale.report.terminal import columns, table

FIRST_CLASSES = 5
FIRST_FINDINGS = 20
FIRST_WAYS = 6
MOST_LINES = 30


def show_survey(found: dict[str, Any], console: Console) -> None:
    """What the index of a data set says."""
    names, rest = found["classes"][:FIRST_CLASSES], len(found["classes"]) - FIRST_CLASSES
    more = f", and {rest:,} more" if rest > 0 else ""
    rows = [("source", found["source"]), ("classes", f"{len(found['classes']):,}: {', '.join(names)}{more}")]
    for split, facts in found["splits"].items():
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in facts["extensions"].items())
        sizes = ", ".join(f"{rank} {width} x {height}" for rank, (width, height) in facts["sizes"].items())
        fewest, most = (f"{count:,}" for count in facts["pictures_per_class"].values())
        each = fewest if fewest == most else f"{fewest} to {most}"
        rows += [
            (split, f"{facts['pictures']:,} pictures, {each} a class, {in_bytes(facts['bytes'])}"),
            ("", sizes),
            *([("", kinds)] if kinds else []),
        ]
    if found["unsplit"]:
        rows.append(("split", "there are no folders train and val: every fifth picture of a class validates"))
    how = "kept from before and up to date" if found["kept"] else "scanned"
    rows.append(("index", f"{how}, {found['seconds']:.2f} s"))
    if any(facts["extensions"] for facts in found["splits"].values()):
        rows.append(("train it", f"podscale train imagefolder {_data_options(found)}"))
    console.print(table(found["path"], rows))
    _show_classes(found, console)


def _data_options(found: dict[str, Any]) -> str:
    source = "" if found["source"] == "folder" else f"--data.source {found['source']} "
    return f"{source}--data.path {shlex.quote(found['path'])}"


def _show_classes(found: dict[str, Any], console: Console) -> None:
    """How many pictures each class has in each split."""
    counts = {split: facts["class_counts"] for split, facts in found["splits"].items()}
    lines = [
        [name, *(f"{of_split[label]:,}" for of_split in counts.values())]
        for label, name in enumerate(found["classes"][:MOST_LINES])
    ]
    console.print(columns(["class", *counts], lines))
    if len(found["classes"]) > MOST_LINES:
        rest = len(found["classes"]) - MOST_LINES
        console.print(f"and {rest:,} more; --json has them all", highlight=False)


def show_check(found: dict[str, Any], console: Console) -> None:
    """What is wrong with a data set, kind by kind; then how much was looked at."""
    for kind, count in found["counts"].items():
        console.print(f"{kind}: {count:,}", style="bold red", highlight=False)
        all_ = [finding["why"] for finding in found["findings"] if finding["kind"] == kind]
        for why in all_[:FIRST_FINDINGS]:
            console.print(f"  {why}", highlight=False, markup=False)
        if count > FIRST_FINDINGS:
            console.print(f"  and {count - FIRST_FINDINGS:,} more, which --json names", highlight=False)
    for split, balance in found["classes"].items():
        if balance["uneven"]:
            (few, fewest), (many, most) = balance["fewest"], balance["most"]
            told = f"{split}: {most:,} pictures of {many}, but {fewest:,} of {few}"
            console.print(f"uneven classes in {told}", highlight=False, markup=False)
    total, pictures = sum(found["pictures"].values()), found["pictures"].items()
    rows = [
        ("looked at", ", ".join(f"{count:,} {split}" for split, count in pictures)),
        ("found", "nothing wrong" if found["clean"] else _wrong(len(found["findings"]))),
        ("time", f"{found['seconds']:.1f} s, {total / max(found['seconds'], 1e-9):,.0f} pictures/s"),
    ]
    console.print(table(found["path"], rows))


def show_prepared(found: dict[str, Any], console: Console) -> None:
    """What was prepared, and how to train from it."""
    pictures = ", ".join(f"{count:,} {split}" for split, count in found["pictures"].items())
    ways = [f"{count:,} {how}" for how, count in found["how"].items()]
    told = ", ".join(ways[:FIRST_WAYS]) + (f", and {len(ways) - FIRST_WAYS} more kinds" if ways[FIRST_WAYS:] else "")
    rows = [
        ("pictures", f"{pictures}, of {found['classes']:,} classes, in {found['shards']:,} shards"),
        ("how", told),
        ("bytes", f"{in_bytes(found['bytes_in'])} became {in_bytes(found['bytes_out'])}, {found['ratio']:.2f} times"),
        ("time", "it was prepared before" if found["already"] else f"{found['seconds']:.1f} s"),
        ("use it", f"--data.source tar --data.path {found['prepared']}"),
    ]
    console.print(table("prepared", rows))


def in_bytes(count: int) -> str:
    """Bytes in a unit that people read.

    >>> in_bytes(999), in_bytes(31_324_160)
    ('999 bytes', '31.3 MB')
    """
    number, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{number:.1f} {unit}"


def _wrong(count: int) -> str:
    return "1 thing that is wrong" if count == 1 else f"{count:,} things that are wrong"
