"""What `podscale bench input` found, in tables on a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

CROPS = {"train": "training crops", "eval": "evaluation crops"}
WHERE = {"none": "from files", "encoded": "from files in memory", "decoded": "from pixels in memory"}


def show(found: dict[str, Any], console: Console) -> None:
    """Stages, crops, the loader, the hand-over, and the verdict."""
    _say(console, _what(found))
    console.print(_stages(found))
    console.print(_crops(found))
    _say(console, _hand_over(found["hand_over"]))
    _say(console, found["verdict"])


def _say(console: Console, text: str) -> None:
    console.print(Text(text), highlight=False)


def _what(found: dict[str, Any]) -> str:
    size = found["image_size"]
    return (
        f"{found['pictures']:,} pictures of {found['path']}, {found['picture_bytes'] / 1e3:,.0f} KB and "
        f"{found['picture_pixels'] / 1e6:.2f} megapixels on average, to {size}x{size}; decoder: {found['decoder']}. "
        "Cold is as cold as the kernel lets it be: it was told to forget the files, which a disk may remember."
    )


def _stages(found: dict[str, Any]) -> Table:
    grid = _grid("stages, images/s", ["one core", _threads(found), "share"])
    for row in found["stages"]:
        share = "" if row["share"] is None else f"{row['share']:.1%}"
        grid.add_row(row["stage"], _rate(row["images_per_s_one"]), _rate(row["images_per_s_all"]), share)
    return grid


def _crops(found: dict[str, Any]) -> Table:
    grid = _grid("all stages, images/s", ["one core", _threads(found), "scaling"])
    for row in found["crops"]:
        cold = ", cold" if row["pages"] == "cold" else ""
        scaling = "" if row["scaling"] is None else f"{row['scaling']:.0%}"
        name = f"{CROPS[row['crop']]} {WHERE[row['kept']]}{cold}"
        grid.add_row(name, _rate(row["images_per_s_one"]), _rate(row["images_per_s_all"]), scaling)
    for kept, rate in found["loader"].items():
        grid.add_row(f"the loader {WHERE[kept]}", "", _rate(rate), "")
    return grid


def _hand_over(found: dict[str, Any]) -> str:
    if not found["copies"]:
        return "hand-over: the CPU keeps the memory it is given; nothing is copied"
    unpinned = found["bytes_per_s_unpinned"]
    beside = f", from ordinary memory {unpinned / 1e9:,.1f} GB/s" if unpinned else ""
    return (
        f"hand-over: {found['bytes_per_s'] / 1e9:,.1f} GB/s to {found['device']} in batches of "
        f"{found['batch_bytes'] / 1e6:,.1f} MB{beside}"
    )


def _grid(title: str, columns: list[str]) -> Table:
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    grid.add_column("")
    for name in columns:
        grid.add_column(name, justify="right")
    return grid


def _threads(found: dict[str, Any]) -> str:
    return f"{found['threads']} thread{'s' * (found['threads'] > 1)}"


def _rate(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:,.0f}"
