"""Search for the pod, recipe, summation and micro-batches that train fastest, for a number of chips or a budget."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.options import Options, set_summation
from podscale.config.suggestions import list_divisors, suggest_names
from podscale.errors import UserError
from podscale.forecast import chips
from podscale.forecast.compute import Work
from podscale.forecast.model import Forecast, make_forecast
from podscale.forecast.orthogonalization import choose_group, count_update_bytes
from podscale.optim.optimizers import can_shard
from podscale.parallel.shared_matrices import Kind
from podscale.parallel.strategies import STRATEGIES, list_replicated
from podscale.plan import Counts, Memory, Plan
from podscale.pod import CHIPS, THREE_DIMENSIONS, Pod, parse_pod
from podscale.recipe import Recipe

MAX_CHIPS = 4096
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class SearchRequest:
    """Which pods to search: all of a kind, or those with so many chips, or within so many chip-hours (0: no limit)."""

    kind: str
    chips: int = 0
    chip_hours: float = 0.0

    @classmethod
    def parse(cls, text: str, chip_hours: float = 0.0) -> "SearchRequest":
        """Parse "KIND" or "KIND:CHIPS".

        >>> SearchRequest.parse("v3:256")
        SearchRequest(kind='v3', chips=256, chip_hours=0.0)
        """
        kind, colon, count = text.partition(":")
        if kind not in chips.list_kinds():
            raise UserError(
                f"nothing is known of the speed of chip kind {kind!r}: {suggest_names(kind, chips.list_kinds())}"
            )
        if colon and (not count.isdecimal() or not 0 < int(count) <= 2**16):
            raise UserError(f"--search takes KIND or KIND:CHIPS, such as v3:256, not {text!r}")
        if not 0 <= chip_hours < math.inf:
            raise UserError(f"--chip-hours must be above 0, not {chip_hours:g}")
        return cls(kind, int(count or 0), chip_hours)


def find_fastest_pods(
    request: SearchRequest, recipe: Recipe, counts: Counts, memory: Memory, work: Work
) -> list[Forecast]:
    """Return the best forecast for each number of chips that beats all smaller numbers: fastest last.

    Args:
        request: which pods.
        recipe: it names the model and data; presets that train the same with other batches are tried too.
        counts: of the data.
        memory: bytes of whole arrays, as on one device; each plan adapts them to its pod and summation.
        work: what the recipe's model demands.
    """
    return _keep_pareto(find_best_by_chips(request, recipe, counts, memory, work))


def find_best_by_chips(
    request: SearchRequest, recipe: Recipe, counts: Counts, memory: Memory, work: Work
) -> list[Forecast]:
    """Return the best forecast for each number of chips, smallest first.

    Raises:
        UserError: no pod of the request can train the recipe.
    """
    best: dict[int, Forecast] = {}
    for plan in _iterate_plans(request, recipe, counts, memory, work.matrices):
        forecast, count = make_forecast(plan, work), plan.pod.rows * plan.pod.cols
        within = not request.chip_hours or forecast.chip_hours <= request.chip_hours
        if within and (count not in best or forecast.train_s < best[count].train_s):
            best[count] = forecast
    if not best:
        raise UserError(f"no pod of {_describe_request(request)} trains {recipe.name}; try more chips or chip-hours")
    return [best[count] for count in sorted(best)]


def _keep_pareto(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Return the forecasts that are faster than all with fewer chips; they come by increasing number of chips."""
    pareto: list[Forecast] = []
    for forecast in forecasts:
        if not pareto or forecast.train_s < pareto[-1].train_s:
            pareto.append(forecast)
    return pareto


def _describe_request(request: SearchRequest) -> str:
    limits = [f"{request.chips} chips"] * bool(request.chips) + [f"{request.chip_hours:g} chip-hours"] * bool(
        request.chip_hours
    )
    return " ".join([request.kind, *(["with"] if limits else []), " and ".join(limits)]).strip()


def list_similar_recipes(recipe: Recipe) -> list[Recipe]:
    """Return the recipe, and the presets of the same model and data with other batch sizes."""
    same = [recipes.load_recipe(name) for name in recipes.list_presets()]
    same = [r for r in same if (r.model, r.data.train_samples) == (recipe.model, recipe.data.train_samples)]
    others = [r for r in same if r.batch.size != recipe.batch.size]
    return [recipe, *others] if recipe.data.train_samples else [recipe]


def iterate_pods(kind: str, count: int) -> Iterator[Pod]:
    """Yield the pods of so many chips: tori up to four times as long as wide; GPU nodes, or a part of one node.

    Where that is more than the largest slice has, they are slices of that size.

    >>> [pod.dims for pod in iterate_pods("v4", 128)]
    [(16, 8), (8, 4, 4), (4, 8, 4)]
    >>> [pod.shape for pod in iterate_pods("v5e", 1024)]
    ['16x16*4']
    """
    row = chips.get_chip(kind)
    if not row.is_torus:
        per_node = CHIPS[kind][1]
        if count <= per_node or count % per_node == 0:
            yield parse_pod(f"{kind}:{max(1, count // per_node)}x{min(count, per_node)}")
        return
    side = row.largest or count
    slices, remainder = divmod(count, side**2)
    if slices > 1:
        if not remainder:
            yield parse_pod(f"{kind}:{side}x{side}*{slices}")
        return
    for rows in list_divisors(count):
        if rows <= count // rows <= min(max(4 * rows, 2), side):
            yield parse_pod(f"{kind}:{rows}x{count // rows}")
    if kind in THREE_DIMENSIONS:
        yield from _iterate_cubes(kind, count)


def _iterate_cubes(kind: str, count: int) -> Iterator[Pod]:
    """Yield the three-dimensional tori of so many chips; they are built of cubes of 4x4x4 chips."""
    for depth in (d for d in list_divisors(count) if d % 4 == 0):
        for rows in (r for r in list_divisors(count // depth) if r % 4 == 0 and r >= depth):
            cols = count // depth // rows
            if cols % 4 == 0 and depth <= cols and max(rows, cols) <= 4 * depth:
                yield parse_pod(f"{kind}:{rows}x{cols}x{depth}")


def _iterate_plans(
    request: SearchRequest, recipe: Recipe, counts: Counts, memory: Memory, matrices: Mapping[str, Kind]
) -> Iterator[Plan]:
    sizes = [request.chips] if request.chips else [2**i for i in range(MAX_CHIPS.bit_length())]
    for count in sizes:
        for pod in iterate_pods(request.kind, count):
            for similar in list_similar_recipes(recipe):
                yield from _iterate_variants(similar, pod, counts, memory, matrices)


def _iterate_variants(
    recipe: Recipe, pod: Pod, counts: Counts, memory: Memory, matrices: Mapping[str, Kind]
) -> Iterator[Plan]:
    """Yield the plans of the recipe on the pod that fit its memory: all summations, all numbers of micro-batches.

    Those that share out the update, and so need less memory, are among them if the recipe's optimizer can update a part
    of an array.
    """
    for name in STRATEGIES if can_shard(recipe) else list_replicated():
        options = choose_group(set_summation(Options(), name, -1), pod, matrices, recipe.optimizer.newton_schulz)
        memory = replace(memory, update=count_update_bytes(options, pod, matrices))
        for micro_batches in MICRO_BATCHES:
            try:
                plan = plans.make_plan(recipe, pod, counts, replace(options, micro_batches=micro_batches), memory)
            except UserError:  # the batch does not divide into these micro-batches, or no tile fits
                continue
            if plan.fits_memory:
                yield plan


def format_shape(pod: Pod) -> str:
    """Return the pod's shape as `--pod` takes it after the kind."""
    x, y, *z = pod.dims
    return "x".join(map(str, (y, x, *z))) + (f"*{pod.slices}" if pod.slices > 1 else "")


def format_rows(forecasts: list[Forecast]) -> list[list[str]]:
    """Return the rows of the table, one for each number of chips."""
    return [
        [
            f"{f.plan.pod.rows * f.plan.pod.cols:,}",
            format_shape(f.plan.pod),
            f"{f.train_s / 60:,.2f}",
            f"{f.chip_hours:,.1f}",
            f"{f.images_per_s:,.0f}",
            f.limit,
            f.plan.recipe.name,
            f"{f.plan.tile[0]}x{f.plan.tile[1]}",
            f.plan.options.summation,
            f"{f.plan.micro_batches}",
        ]
        for f in forecasts
    ]


HEADER = ("chips", "shape", "minutes", "chip-hours", "images/s", "limited by", "recipe", "tile", "summation", "parts")
