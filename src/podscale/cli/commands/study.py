"""The command `study`: train a grid of recipes and seeds."""

import argparse
from pathlib import Path

from podscale.cli.arguments import collect_fields, make_console, make_log_console, read_options, read_pod
from podscale.cli.imports import import_user_code
from podscale.cli.result import Result
from podscale.recipe import SECTIONS


def run_study(arguments: argparse.Namespace) -> Result:
    """Run a study and print its table."""
    import_user_code(arguments.imports)
    from podscale.study import grid, results

    study = grid.load_study(arguments.study, collect_fields(arguments, SECTIONS), arguments.seeds)
    from podscale.report import terminal
    from podscale.study import run

    folder, pod = Path(arguments.run or Path("runs") / study.name), read_pod(arguments)
    console = make_console(arguments)
    table = run.run_study(study, folder, pod, read_options(arguments), make_log_console(arguments))
    console.print(terminal.format_columns(results.COLUMNS, results.format_rows(table)))
    console.print(
        f"{study.measure}; table: {folder}/study.json, plot: {folder}/study.svg", highlight=False, markup=False
    )
    return Result(table, message=results.describe_failures(table))
