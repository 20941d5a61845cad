"""The commands `plan` and `rehearse`: say what a training would do."""

import argparse
import math
from contextlib import nullcontext

from podscale.cli.arguments import make_console, make_progress_console, read_options, read_pod, read_recipe
from podscale.cli.result import Result
from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.recipe import Recipe


def run_plan(arguments: argparse.Namespace) -> Result:
    """Print how a recipe maps onto a pod; the answer for a pod that is not available is cached."""
    if not 0 <= arguments.read_price < math.inf:
        raise UserError(f"--read-price must be 0 or more USD per million reads, not {arguments.read_price}")
    if arguments.published:
        return Result(_show_published(arguments))
    recipe = read_recipe(arguments)
    if arguments.search:
        return Result(_show_search(arguments, recipe))
    from podscale.planner import plan_cache

    options, key = read_options(arguments), ""
    if arguments.pod and plan_cache.is_cacheable(recipe):
        extra = {"compile": arguments.compile, "read_usd": arguments.read_price}
        key = plan_cache.make_key(recipe, arguments.pod, options, extra)
    result = plan_cache.load_result(key) if key else None
    if result is None:
        result = _plan_on_pod(arguments, recipe, options)
        if key:
            plan_cache.save_result(key, result)
    from podscale.report import terminal

    make_console(arguments).print(terminal.make_table("plan", result["rows"]))
    return Result(result["values"] | (_draw_scaling(arguments, recipe) if arguments.plot else {}))


def _plan_on_pod(arguments: argparse.Namespace, recipe: Recipe, options: Options) -> JsonObject:
    """Plan the recipe on the pod, predict its times, and compile it where asked for."""
    from podscale.planner import queries, topologies
    from podscale.pod import parse_pod

    if arguments.pod:
        topologies.use_cpu_backend()
    pod = parse_pod(arguments.pod) if arguments.pod else read_pod(arguments)
    with make_progress_console().status("compiling") if arguments.compile and arguments.pod else nullcontext():
        return queries.plan_on_pod(recipe, pod, options, arguments.compile, arguments.read_price)._asdict()


def _show_published(arguments: argparse.Namespace) -> JsonObject:
    from podscale.planner import published, topologies
    from podscale.report import terminal

    topologies.use_cpu_backend()
    comparisons = published.compare_runs(arguments.published)
    values = published.to_dict(comparisons)
    make_console(arguments).print(terminal.format_columns(published.HEADER, published.format_rows(comparisons)))
    note = "* further checks, not counted; no constant of a chip comes from any row"
    if arguments.published != "known":
        note = f"{len(comparisons)} rows"
    make_console(arguments).print(
        f"median error {values['median_error']:.1%}, largest {values['largest_error']:.1%} ({note})", highlight=False
    )
    return values


def _show_search(arguments: argparse.Namespace, recipe: Recipe) -> JsonObject:
    from podscale.planner import queries, search
    from podscale.report import terminal

    rows, values = queries.search_pods(recipe, arguments.search, arguments.chip_hours)
    make_console(arguments).print(terminal.format_columns(search.HEADER, rows))
    return values | (_draw_scaling(arguments, recipe) if arguments.plot else {})


def _draw_scaling(arguments: argparse.Namespace, recipe: Recipe) -> JsonObject:
    from podscale.planner import queries

    kind = (arguments.search or arguments.pod).partition(":")[0]
    if not kind:
        raise UserError("--plot needs a kind of chip: add --pod KIND:RxC or --search KIND")
    result = queries.write_scaling_plot(recipe, kind, arguments.plot)
    make_console(arguments).print(f"plot: {arguments.plot}", highlight=False, markup=False)
    return result


def run_rehearse(arguments: argparse.Namespace) -> Result:
    """Go through a training without computing anything."""
    recipe = read_recipe(arguments)
    from podscale.planner import rehearsal
    from podscale.report import terminal

    pod, options, console = read_pod(arguments), read_options(arguments), make_console(arguments)
    with make_progress_console().status("rehearsing") as status:
        result = rehearsal.rehearse(recipe, pod, options, images=arguments.images, report=status.update)
    console.print(terminal.make_table("rehearsal", rehearsal.format_rows(result)))
    return Result(result, message=next(iter(result["decoded"]["unreadable"]), ""))
