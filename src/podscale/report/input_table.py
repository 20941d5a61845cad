"""Print the result of `podscale bench input`: tables for a terminal, and a verdict in one sentence."""

import math
from types import MappingProxyType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from podscale.config.json_types import JsonObject

CROPS = MappingProxyType({"train": "training crops", "eval": "evaluation crops"})
WHERE = MappingProxyType({"none": "from files", "encoded": "from files in memory", "decoded": "from pixels in memory"})
GPU_IMAGES_PER_S = 7000.0  # about what ResNet-50 at 224 pixels trains on one H200
QUIET_SHARE = 0.9  # threads that get a smaller share of the cores are disturbed by other work
DISTURBED = "the machine is busy with other work, or the threads wait for each other; do not rely on these figures."


def show_input(result: JsonObject, console: Console) -> None:
    """Print the stages, crops, loader, transfer to the device, and the verdict."""
    _print_line(console, _describe_images(result))
    console.print(_make_stage_table(result))
    console.print(_make_crop_table(result))
    if result["threads"] > 1:
        _print_line(
            console, f"arithmetic alone scales by {result['arithmetic_scaling']:.0%} here: decoding cannot scale better"
        )
    _print_line(console, _describe_hand_over(result["hand_over"]))
    if result["cores_had"] < QUIET_SHARE:
        _print_line(console, f"{_format_threads(result)} had {result['cores_had']:.0%} of the cores: {DISTURBED}")
    _print_line(console, result["verdict"])


def _print_line(console: Console, text: str) -> None:
    console.print(Text(text), highlight=False)


def _describe_images(result: JsonObject) -> str:
    size = result["image_size"]
    return (
        f"{result['images']:,} images of {result['path']}, {result['image_bytes'] / 1e3:,.0f} KB and "
        f"{result['image_pixels'] / 1e6:.2f} megapixels on average, to {size}x{size}; decoder: {result['decoder']}. "
        "Cold: after the kernel was asked to drop the files from its cache; disks may still cache them."
    )


def _make_stage_table(result: JsonObject) -> Table:
    grid = _make_grid("stages, images/s", ["one core", _format_threads(result), "share"])
    for row in result["stages"]:
        share = "" if row["share"] is None else f"{row['share']:.1%}"
        grid.add_row(row["stage"], _format_rate(row["images_per_s_one"]), _format_rate(row["images_per_s_all"]), share)
    return grid


def _make_crop_table(result: JsonObject) -> Table:
    grid = _make_grid("all stages, images/s", ["one core", _format_threads(result), "scaling"])
    for row in result["crops"]:
        cold = ", cold" if row["pages"] == "cold" else ""
        scaling = "" if row["scaling"] is None else f"{row['scaling']:.0%}"
        name = f"{CROPS[row['crop']]} {WHERE[row['kept']]}{cold}"
        grid.add_row(name, _format_rate(row["images_per_s_one"]), _format_rate(row["images_per_s_all"]), scaling)
    for kind, rate in result["loader"].items():
        grid.add_row(f"the loader {WHERE[kind]}", "", _format_rate(rate), "")
    return grid


def _describe_hand_over(result: JsonObject) -> str:
    if not result["copies"]:
        return "hand-over: the CPU keeps the memory it is given; nothing is copied"
    unpinned = result["bytes_per_s_unpinned"]
    comparison = f", from ordinary memory {unpinned / 1e9:,.1f} GB/s" if unpinned else ""
    return (
        f"hand-over: {result['bytes_per_s'] / 1e9:,.1f} GB/s to {result['device']} in batches of "
        f"{result['batch_bytes'] / 1e6:,.1f} MB{comparison}"
    )


def _make_grid(title: str, columns: list[str]) -> Table:
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    grid.add_column("")
    for name in columns:
        grid.add_column(name, justify="right")
    return grid


def _format_threads(result: JsonObject) -> str:
    return f"{result['threads']} thread{'s' * (result['threads'] > 1)}"


def _format_rate(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:,.0f}"


# --- the verdict ---------------------------------------------------------------------------------------------------


def judge_input(result: JsonObject, feed: float) -> JsonObject:
    """Return whether the measured rates feed `feed` images/s (0: the rate of one GPU), their limit, and a verdict."""
    rate, target = result["loader"][result["kept"]] or result["loader"]["none"], feed or GPU_IMAGES_PER_S
    limit, cores = _find_limit(result, rate), math.ceil(target * result["threads"] / rate)
    sources = {"none": "from files", "encoded": "from files kept in memory", "decoded": "from pixels kept in memory"}
    how = (
        f"{rate:,.0f} images/s {sources[result['kept']]} with {result['threads']} thread{'s' * (result['threads'] > 1)}"
    )
    if result["kept"] != "none":
        how += f" ({result['loader']['none']:,.0f} in the first pass)"
    if result["hand_over"]["images_per_s"] < target:
        needs = f"{target:,.0f} images/s exceed what can be transferred to a device"
    else:
        subject = "" if feed else "one GPU that trains on "
        needs = (
            f"{subject}{target:,.0f} images/s need{'s' * (not feed)} about {cores} core{'s' * (cores > 1)} like these"
        )
    if not feed:
        sentence = f"This machine loads {how}; {limit} limits it; {needs}."
    elif rate >= feed:
        sentence = f"This machine can feed {feed:,.0f} images/s: it loads {how}; {limit} limits it."
    else:
        sentence = f"This machine cannot feed {feed:,.0f} images/s: it loads {how}; {limit} limits it; {needs}."
    feeds = rate >= feed if feed else None
    return {"images_per_s": rate, "feed": feed or None, "feeds": feeds, "limit": limit, "verdict": sentence}


def _find_limit(result: JsonObject, rate: float) -> str:
    crops = [
        row for row in result["crops"] if (row["crop"], row["kept"], row["pages"]) == ("train", result["kept"], "warm")
    ]
    if result["hand_over"]["images_per_s"] < 1.25 * rate:
        return "hand-over to the device"
    if rate < 0.75 * (crops[0]["images_per_s_all"] or rate):
        return "what the loader does besides decoding"
    if result["kept"] == "decoded":
        return "the resize"
    slowest = max(result["stages"], key=lambda row: row["share"] or 0.0)
    return f"{slowest['stage']} ({slowest['share']:.0%} of the work)"
