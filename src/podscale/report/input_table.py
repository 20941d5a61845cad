"""What `podscale bench input` found: tables for a terminal, and one sentence."""

import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

CROPS = {"train": "training crops", "eval": "evaluation crops"}
WHERE = {"none": "from files", "encoded": "from files in memory", "decoded": "from pixels in memory"}
GPU_IMAGES_PER_S = 7000.0  # about what ResNet-50 at 224 pixels trains on one H200
QUIET = 0.9  # threads that have less of the cores than this are disturbed
DISTURBED = "other work runs on this machine, or they wait for one another; trust no figure of theirs."


def show(found: dict[str, Any], console: Console) -> None:
    """Stages, crops, the loader, the hand-over, and the verdict."""
    _say(console, _what(found))
    console.print(_stages(found))
    console.print(_crops(found))
    if found["threads"] > 1:
        _say(
            console, f"arithmetic alone scales by {found['arithmetic_scaling']:.0%} here: decoding cannot scale better"
        )
    _say(console, _hand_over(found["hand_over"]))
    if found["cores_had"] < QUIET:
        _say(console, f"{_threads(found)} had {found['cores_had']:.0%} of the cores: {DISTURBED}")
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


# --- the verdict ---------------------------------------------------------------------------------------------------


def judge(found: dict[str, Any], feed: float) -> dict[str, Any]:
    """Whether what was measured feeds `feed` images/s (0: what a GPU would take), what limits it, and a sentence."""
    rate, wanted = found["loader"][found["kept"]] or found["loader"]["none"], feed or GPU_IMAGES_PER_S
    limit, cores = _limit(found, rate), math.ceil(wanted * found["threads"] / rate)
    where = {"none": "from files", "encoded": "from files kept in memory", "decoded": "from pixels kept in memory"}
    how = f"{rate:,.0f} images/s {where[found['kept']]} with {found['threads']} thread{'s' * (found['threads'] > 1)}"
    if found["kept"] != "none":
        how += f" ({found['loader']['none']:,.0f} in the first pass)"
    if found["hand_over"]["images_per_s"] < wanted:
        needs = f"{wanted:,.0f} images/s are more than a device takes over"
    else:
        whose = "" if feed else "one GPU that trains on "
        needs = f"{whose}{wanted:,.0f} images/s need{'s' * (not feed)} about {cores} core{'s' * (cores > 1)} like these"
    if not feed:
        sentence = f"This machine loads {how}; {limit} limits it; {needs}."
    elif rate >= feed:
        sentence = f"This machine can feed {feed:,.0f} images/s: it loads {how}; {limit} limits it."
    else:
        sentence = f"This machine cannot feed {feed:,.0f} images/s: it loads {how}; {limit} limits it; {needs}."
    feeds = rate >= feed if feed else None
    return {"images_per_s": rate, "feed": feed or None, "feeds": feeds, "limit": limit, "verdict": sentence}


def _limit(found: dict[str, Any], rate: float) -> str:
    crops = [
        row for row in found["crops"] if (row["crop"], row["kept"], row["pages"]) == ("train", found["kept"], "warm")
    ]
    if found["hand_over"]["images_per_s"] < 1.25 * rate:
        return "hand-over to the device"
    if rate < 0.75 * (crops[0]["images_per_s_all"] or rate):
        return "what the loader does besides decoding"
    if found["kept"] == "decoded":
        return "the resize"
    slowest = max(found["stages"], key=lambda row: row["share"] or 0.0)
    return f"{slowest['stage']} ({slowest['share']:.0%} of the work)"
