"""The command `study`: train a grid of recipes and seeds."""

import argparse
from pathlib import Path
from typing import Any

from podscale.cli.arguments import collect_fields, make_console, read_options, read_pod
from podscale.recipe import SECTIONS


def run_study(arguments: argparse.Namespace) -> Any:
    """Run a study and print its table."""
    from podscale.study import grid, results

    study = grid.load_study(arguments.study, collect_fields(arguments, SECTIONS), arguments.seeds)
    from podscale.report import terminal
    from podscale.study import run

    folder, pod = Path(arguments.run or Path("runs") / study.name), read_pod(arguments)
    console = make_console(arguments)
    table = run.run_study(study, folder, pod, read_options(arguments), console)
    console.print(terminal.format_columns(results.COLUMNS, results.format_rows(table)))
    console.print(
        f"{study.measure}; table: {folder}/study.json, plot: {folder}/study.svg", highlight=False, markup=False
    )
    arguments.problem = results.describe_failures(table)
    return table
