"""The commands plan and rehearse."""

import argparse
from contextlib import nullcontext
from typing import Any

from podscale.cli.arguments import make_console, read_options, read_pod, read_recipe
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.recipe import Recipe


def plan(arguments: argparse.Namespace) -> Any:
    if arguments.published:
        return _published(arguments)
    recipe = read_recipe(arguments)
    if arguments.search:
        return _searched(arguments, recipe)
    from podscale.planner import answer_cache

    options, name = read_options(arguments), ""
    if arguments.pod and answer_cache.follows_from(recipe):
        name = answer_cache.key(recipe, arguments.pod, options, arguments.compile)
    answer = answer_cache.kept(name) if name else None
    if answer is None:
        answer = _asked(arguments, recipe, options)
        if name:
            answer_cache.keep(name, answer)
    from podscale.report import terminal

    make_console(arguments).print(terminal.table("plan", answer["rows"]))
    return answer["values"] | (_drawn(arguments, recipe) if arguments.plot else {})


def _asked(arguments: argparse.Namespace, recipe: Recipe, options: Options) -> dict[str, Any]:
    from podscale import pod
    from podscale.planner import described_devices, questions

    if arguments.pod:
        described_devices.leave_chips_alone()
    where = pod.named(arguments.pod) if arguments.pod else read_pod(arguments)
    with make_console(arguments).status("compiling") if arguments.compile and arguments.pod else nullcontext():
        return questions.about(recipe, where, options, arguments.compile)._asdict()


def _published(arguments: argparse.Namespace) -> Any:
    from podscale.planner import described_devices, published
    from podscale.report import terminal

    described_devices.leave_chips_alone()
    found = published.compare()
    values = published.to_dict(found)
    make_console(arguments).print(terminal.columns(published.HEAD, published.rows(found)))
    make_console(arguments).print(
        f"median error {values['median_error']:.1%}, largest {values['largest_error']:.1%} "
        "(* further checks, not counted; no constant comes from any row)",
        highlight=False,
    )
    return values


def _searched(arguments: argparse.Namespace, recipe: Recipe) -> Any:
    from podscale.planner import questions, search
    from podscale.report import terminal

    rows, values = questions.searched(recipe, arguments.search, arguments.chip_hours)
    make_console(arguments).print(terminal.columns(search.HEAD, rows))
    return values | (_drawn(arguments, recipe) if arguments.plot else {})


def _drawn(arguments: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    from podscale.planner import questions

    kind = (arguments.search or arguments.pod).partition(":")[0]
    if not kind:
        raise UserError("--plot needs a kind of chip: give --pod KIND:RxC or --search KIND")
    found = questions.drawn(recipe, kind, arguments.plot)
    make_console(arguments).print(f"drawn: {arguments.plot}", highlight=False, markup=False)
    return found


def rehearse(arguments: argparse.Namespace) -> Any:
    recipe = read_recipe(arguments)
    from podscale.planner import rehearsal
    from podscale.report import terminal

    pod, options, console = read_pod(arguments), read_options(arguments), make_console(arguments)
    with console.status("rehearsing") as status:
        found = rehearsal.rehearse(recipe, pod, options, images=arguments.images, tell=status.update)
    console.print(terminal.table("rehearsal", rehearsal.rows(found)))
    if found["decoded"]["unreadable"]:
        arguments.problem = found["decoded"]["unreadable"][0]
    return found
