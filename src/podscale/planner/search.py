"""Search: which pod, recipe, summation and slicing would train soonest, for a number of chips or a budget."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.config.suggestions import divisors, suggest_names
from podscale.errors import UserError
from podscale.forecast import chips
from podscale.forecast.compute import Work
from podscale.forecast.model import Forecast, forecast
from podscale.parallel.summation import STRATEGIES
from podscale.plan import Counts, Memory, Plan
from podscale.pod import CHIPS, THREE_DIMENSIONS, Pod, named
from podscale.recipe import Recipe

MOST_CHIPS = 4096
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Wanted:
    """What is searched: all pods of a kind, or those of so many chips, or those that stay within so many chip-hours."""

    kind: str
    chips: int = 0
    chip_hours: float = 0.0

    @classmethod
    def parse(cls, text: str, chip_hours: float = 0.0) -> "Wanted":
        """From "KIND" or "KIND:CHIPS".

        >>> Wanted.parse("v3:256")
        Wanted(kind='v3', chips=256, chip_hours=0.0)
        """
        kind, colon, count = text.partition(":")
        if kind not in chips.kinds():
            raise UserError(
                f"nothing is known of the speed of chip kind {kind!r}: {suggest_names(kind, chips.kinds())}"
            )
        if colon and (not count.isdecimal() or not 0 < int(count) <= 2**16):
            raise UserError(f"--search takes KIND or KIND:CHIPS, such as v3:256, not {text!r}")
        if not 0 <= chip_hours < math.inf:
            raise UserError(f"--chip-hours must be above 0, not {chip_hours:g}")
        return cls(kind, int(count or 0), chip_hours)


def search(wanted: Wanted, recipe: Recipe, counts: Counts, memory: Memory, work: Work) -> list[Forecast]:
    """The best forecast for each number of chips that no smaller number beats: soonest last.

    `recipe` names the model and data; the presets that train the same with other batches are tried too.
    """
    return _pareto(by_chips(wanted, recipe, counts, memory, work))


def by_chips(wanted: Wanted, recipe: Recipe, counts: Counts, memory: Memory, work: Work) -> list[Forecast]:
    """The best forecast for each number of chips, smallest first."""
    best: dict[int, Forecast] = {}
    for plan in _plans(wanted, recipe, counts, memory):
        found, count = forecast(plan, work), plan.pod.rows * plan.pod.cols
        within = not wanted.chip_hours or found.chip_hours <= wanted.chip_hours
        if within and (count not in best or found.train_s < best[count].train_s):
            best[count] = found
    if not best:
        raise UserError(f"no pod of {_words(wanted)} trains {recipe.name}; try more chips or chip-hours")
    return [best[count] for count in sorted(best)]


def _pareto(found: Iterable[Forecast]) -> list[Forecast]:
    """By growing number of chips, those that are faster than all before them."""
    kept: list[Forecast] = []
    for one in found:
        if not kept or one.train_s < kept[-1].train_s:
            kept.append(one)
    return kept


def _words(wanted: Wanted) -> str:
    limits = [f"{wanted.chips} chips"] * bool(wanted.chips) + [f"{wanted.chip_hours:g} chip-hours"] * bool(
        wanted.chip_hours
    )
    return " ".join([wanted.kind, *(["with"] if limits else []), " and ".join(limits)]).strip()


def alike(recipe: Recipe) -> list[Recipe]:
    """The recipe, and the presets of the same model and data with other batches."""
    same = [recipes.load(name) for name in recipes.presets()]
    same = [r for r in same if (r.model, r.data.train_samples) == (recipe.model, recipe.data.train_samples)]
    others = [r for r in same if r.batch.size != recipe.batch.size]
    return [recipe, *others] if recipe.data.train_samples else [recipe]


def shapes(kind: str, count: int) -> Iterator[Pod]:
    """The pods of so many chips: tori up to four times as long as wide; nodes of GPUs, or a part of one node.

    >>> [pod.dims for pod in shapes("v4", 128)]
    [(16, 8), (8, 4, 4), (4, 8, 4)]
    """
    row = chips.chip(kind)
    if not row.torus:
        per_node = CHIPS[kind][1]
        if count <= per_node or count % per_node == 0:
            yield named(f"{kind}:{max(1, count // per_node)}x{min(count, per_node)}")
        return
    for rows in divisors(count):
        if rows <= count // rows <= max(4 * rows, 2):
            yield named(f"{kind}:{rows}x{count // rows}")
    if kind in THREE_DIMENSIONS:
        yield from _cubes(kind, count)


def _cubes(kind: str, count: int) -> Iterator[Pod]:
    """Three-dimensional tori are built of cubes of 4x4x4 chips."""
    for depth in (d for d in divisors(count) if d % 4 == 0):
        for rows in (r for r in divisors(count // depth) if r % 4 == 0 and r >= depth):
            cols = count // depth // rows
            if cols % 4 == 0 and depth <= cols and max(rows, cols) <= 4 * depth:
                yield named(f"{kind}:{rows}x{cols}x{depth}")


def _plans(wanted: Wanted, recipe: Recipe, counts: Counts, memory: Memory) -> Iterator[Plan]:
    sizes = [wanted.chips] if wanted.chips else [2**i for i in range(MOST_CHIPS.bit_length())]
    for count in sizes:
        for pod in shapes(wanted.kind, count):
            for one in alike(recipe):
                yield from _sliced(one, pod, counts, memory)


def _sliced(recipe: Recipe, pod: Pod, counts: Counts, memory: Memory) -> Iterator[Plan]:
    """The recipe on the pod in every slicing that fits its memory, with every summation."""
    for micro_batches in MICRO_BATCHES:
        try:
            plan = plans.make_plan(recipe, pod, counts, Options(micro_batches=micro_batches), memory)
        except UserError:  # this batch does not divide so, or no tile fits
            continue
        if memory.total(plan.micro_images, plan.input_images) <= plans.SPARE * pod.memory_bytes:
            for summation in STRATEGIES:
                yield replace(plan, summation=summation)


def shape(pod: Pod) -> str:
    """As `--pod` takes it, after the kind."""
    x, y, *z = pod.dims
    return "x".join(map(str, (y, x, *z)))


def rows(found: list[Forecast]) -> list[list[str]]:
    """The table: one line for each number of chips."""
    return [
        [
            f"{f.plan.pod.rows * f.plan.pod.cols:,}",
            shape(f.plan.pod),
            f"{f.train_s / 60:,.2f}",
            f"{f.chip_hours:,.1f}",
            f"{f.images_per_s:,.0f}",
            f.limit,
            f.plan.recipe.name,
            f"{f.plan.tile[0]}x{f.plan.tile[1]}",
            f.plan.summation,
            f"{f.plan.micro_batches}",
        ]
        for f in found
    ]


HEAD = ["chips", "shape", "minutes", "chip-hours", "images/s", "limited by", "recipe", "tile", "summation", "slices"]
