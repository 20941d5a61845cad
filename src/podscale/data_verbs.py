"""The verbs of `podscale data`: what each does with its arguments, and what it says."""

import argparse
from pathlib import Path
from typing import Any

from podscale.verbs import console_of, recipe_of


def index(arguments: argparse.Namespace) -> Any:
    from podscale.data.survey import survey
    from podscale.report import data_words
    from podscale.report.counting import counting

    console = console_of(arguments)
    with counting(console, "indexing") as progress:
        found = survey(arguments.path, arguments.source, progress)
    data_words.show_survey(found, console)
    return found


def check(arguments: argparse.Namespace) -> Any:
    from podscale.data import check
    from podscale.report import data_words
    from podscale.report.counting import counting

    console = console_of(arguments)
    with counting(console) as progress:
        found = check.check(arguments.path, arguments.source, progress)
    data_words.show_check(found, console)
    arguments.code = 0 if found["clean"] else 1
    return found


def show(arguments: argparse.Namespace) -> Any:
    recipe = recipe_of(arguments)
    from podscale.data import show as sheet
    from podscale.report.counting import counting

    console = console_of(arguments)
    with counting(console, "indexing") as progress:
        found = sheet.write(
            recipe, Path(arguments.to), arguments.split, arguments.images, arguments.step, progress=progress
        )
    console.print(f"{found['file']}: {found['told']}", highlight=False, markup=False)
    return found


def prepare(arguments: argparse.Namespace) -> Any:
    from podscale.data import prepare as preparing
    from podscale.report import data_words
    from podscale.report.counting import counting

    names = ("longest", "quality", "subsampling", "raw", "shard_mib")
    settings = preparing.Settings(**{name: getattr(arguments, name) for name in names})
    console = console_of(arguments)
    try:
        with counting(console) as progress:
            found = preparing.prepare(arguments.src, arguments.dst, settings, arguments.source, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on after the last whole shard") from None
    data_words.show_prepared(found, console)
    return found
