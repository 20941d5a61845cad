"""Describe the pod: its shape, and what happens in each phase when gradients are summed on it."""

import re
from types import MappingProxyType

from podscale.config.json_types import JsonObject
from podscale.parallel.exchanges import make_paths
from podscale.parallel.routes import PATHS, count_hops

MAX_DRAWN = 8  # rows and columns of chips; the page's script draws only an excerpt of larger pods
Line = JsonObject


def describe_pod(plan: Line) -> str:
    """Return a description of the drawing, and of the chips that normalize together.

    >>> describe_pod({"pod": {"rows": 1, "cols": 1, "cores": 1}, "tile": (1, 1), "span": 32})
    'One chip, which normalizes its images in groups of 32.'
    """
    shape, (h, w) = plan["pod"], plan["tile"]
    slices, rows, cols = _get_shape(plan)
    if slices * rows * cols == 1:
        return f"One chip, which normalizes its images in groups of {plan['span']:,}."
    text = f"{rows} x {cols} chips as a torus: the last chip of every row and column is linked to the first (dashed)."
    if slices > 1:
        text = f"One of {slices} slices. {text} Between slices, chips in the same place sum the pieces that they own."
    if rows > MAX_DRAWN or cols > MAX_DRAWN:
        drawn = f"{min(rows, MAX_DRAWN)} x {min(cols, MAX_DRAWN)}"
        text += f" The drawing shows {drawn} of them, as if that were the whole pod."
    if shape["cores"] > 1:
        text += f" The {shape['cores']} cores of a chip first add up their gradients on the chip."
    if (h, w) == (1, 1):
        return f"{text} Batch norm: every chip normalizes its own images, in groups of {plan['span']:,}."
    return f"{text} Batch norm: tiles of {h} x {w} chips normalize {plan['span']:,} images together."


def _get_shape(plan: Line) -> tuple[int, int, int]:
    """Return the slices of the pod, and the rows and columns of each."""
    slices = plan["pod"].get("slices", 1)
    return slices, plan["pod"]["rows"] // slices, plan["pod"]["cols"]


# By summation: the key for the page's script, the name of the phase, what happens in it and why it is fast.
PHASES = MappingProxyType({
    "torus": (
        ("rows-sum", "Reduce-scatter along rows",
         "Every chip passes pieces of its gradient to the right and adds what comes from the left, until it owns "
         "1/{C} of its row's sum; fast, because all chips send at once, and only to a neighbour."),
        ("columns", "All-reduce along columns",
         "The chips of a column own the same piece and sum it over all rows; fast, because only 1/{C} of the "
         "gradient travels."),
        ("rows-share", "All-gather along rows",
         "The finished pieces go around the row until every chip has them all; fast, because they are only copied, and "
         "again all links of the rows work at once."),
    ),
    "torus4": (
        ("first", "Four quarters start",
         "Two are summed along rows and two along columns, one in each direction; fast, because all four links of a "
         "chip carry data at once."),
        ("second", "They change direction",
         "What was summed along rows is now summed along columns, and vice versa; fast, because only the piece that a "
         "chip owns travels."),
        ("share", "They go back",
         "The finished pieces return along the same links until every chip has the whole sum; fast, because they are "
         "only copied, and still on all four links."),
    ),
    "ring": (
        ("sum", "Around the ring to sum",
         "All {N:,} chips form one ring; each passes a piece on and adds its own, until it owns 1/{N:,} of the sum; "
         "every link of the ring is always busy, but the way around is long."),
        ("share", "Around the ring to share",
         "The finished pieces go around again until every chip has them all; they are only copied, but the number of "
         "hops grows with the number of chips."),
    ),
    "sharded": (
        ("rows-sum", "Reduce-scatter along rows",
         "Every chip passes pieces of its gradient to the right and adds what comes from the left, until it owns "
         "1/{C} of its row's sum; fast, because all chips send at once, and only to a neighbour."),
        ("columns", "Along columns, the update, and back",
         "What a chip owns is summed over its column as well; it updates its own 1/{N:,} of the weights, and the "
         "result goes back; fast, because each weight is updated once and its momentum is kept once."),
        ("rows-share", "All-gather along rows",
         "The new weights go around the row until every chip has them all; fast, because they are only copied, and "
         "again all links of the rows work at once."),
    ),
    "ring2": (
        ("sum", "Around the ring to sum, both ways",
         "All {N:,} chips form one ring; half of the data goes around it one way and half the other, until each chip "
         "owns 1/{N:,} of both sums; two links of every chip are always busy, but the way around is long."),
        ("share", "Around the ring to share",
         "The finished pieces go around again, both ways, until every chip has them all; they are only copied, but the "
         "number of hops grows with the number of chips."),
    ),
})  # fmt: skip
SWING = (
    "Every chip exchanges half of what it holds with a near chip, alternating between rows and columns, until "
    "it owns 1/{N:,} of the sum, and gets the other parts back the same way. The number of exchanges grows "
    "with the logarithm of the number of chips."
)
SWING_LATENCY = (
    "Every chip exchanges all it has with a near chip, along rows and then along columns, and adds what it receives; "
    "fast for small sums, because no other strategy needs fewer messages."
)
XLA = "The compiler chooses the algorithm; it knows the links, and on a TPU it also sums along both dimensions."
OTHER = "A strategy that the training program has registered sums the gradients of all chips."


def get_main_summation(plan: Line) -> str:
    """Return the strategy of the largest sums, where the plan has several by size."""
    text: str = plan["summation"]
    return text.rpartition(",")[2] if re.fullmatch(r"(\w+:\d+,)+\w+", text) else text


def list_phases(plan: Line) -> list[tuple[str, str, str]]:
    """Return key, name and text of each phase on a pod of this shape."""
    slices, R, C = _get_shape(plan)
    if slices * R * C == 1:
        return [("none", "One chip", "Its own gradient already is the sum; nothing travels.")]
    name = get_main_summation(plan)
    in_one = {
        "xla": ("One step", XLA),
        "swing": ("Exchanges of halves", SWING),
        "swing_latency": ("Exchanges", SWING_LATENCY),
    }
    phases = PHASES.get(name, (("once", *in_one.get(name, ("One step", OTHER))),))
    idle = ("rows-sum", "rows-share") if C == 1 else ("columns",) if R == 1 else ()
    return [(key, name, text.format(C=C, N=R * C)) for key, name, text in phases if key not in idle]


def describe_hops(plan: Line) -> str:
    """Return the number of hops on the whole pod, even if only an excerpt is drawn."""
    slices, R, C = _get_shape(plan)
    name = get_main_summation(plan)
    paths = make_paths(R, C) if name == "swing" else PATHS.get(name, ())
    ring, count = (count_hops(each, R, C, slices) for each in (PATHS["ring"], paths))
    if not count:
        return ""
    text = f"On this {R} x {C} pod, the sum takes {count:,} hops from chip to chip"
    return f"{text}; one ring through all chips would take {ring:,}." if count < ring else f"{text}."
