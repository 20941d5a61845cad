"""The verbs of `podscale data`: what each does with its arguments, and what it says."""

import argparse
from pathlib import Path
from typing import Any

from podscale.cli.arguments import make_console, read_recipe


def index(arguments: argparse.Namespace) -> Any:
    from podscale.data.tools.survey import survey
    from podscale.report import dataset_tables
    from podscale.report.counter import counting

    console = make_console(arguments)
    with counting(console, "indexing") as progress:
        found = survey(arguments.path, arguments.source, progress)
    dataset_tables.show_survey(found, console)
    return found


def check(arguments: argparse.Namespace) -> Any:
    from podscale.data.tools import check as checks
    from podscale.report import dataset_tables
    from podscale.report.counter import counting

    console = make_console(arguments)
    with counting(console) as progress:
        found = checks.check(arguments.path, arguments.source, progress)
    dataset_tables.show_check(found, console)
    arguments.code = 0 if found["clean"] else 1
    return found


def show(arguments: argparse.Namespace) -> Any:
    recipe = read_recipe(arguments)
    from podscale.planner import samples
    from podscale.report.counter import counting

    console = make_console(arguments)
    with counting(console, "indexing") as progress:
        found = samples.write(
            recipe, Path(arguments.to), arguments.split, arguments.images, arguments.step, progress=progress
        )
    console.print(f"{found['file']}: {found['told']}", highlight=False, markup=False)
    return found


def prepare(arguments: argparse.Namespace) -> Any:
    from podscale.data.tools import prepare as preparing
    from podscale.report import dataset_tables
    from podscale.report.counter import counting

    names = ("longest", "quality", "subsampling", "raw", "shard_mib")
    settings = preparing.Settings(**{name: getattr(arguments, name) for name in names})
    console = make_console(arguments)
    try:
        with counting(console) as progress:
            found = preparing.prepare(arguments.src, arguments.dst, settings, arguments.source, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on after the last whole shard") from None
    dataset_tables.show_prepared(found, console)
    return found
