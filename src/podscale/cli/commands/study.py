"""The command study."""

import argparse
from pathlib import Path
from typing import Any

from podscale.cli.arguments import given_fields, make_console, read_options, read_pod
from podscale.recipe import SECTIONS


def study(arguments: argparse.Namespace) -> Any:
    from podscale.study import grid, results

    asked = grid.load(arguments.study, given_fields(arguments, SECTIONS), arguments.seeds)
    from podscale.report import terminal
    from podscale.study import run

    folder, pod = Path(arguments.run or Path("runs") / asked.name), read_pod(arguments)
    console = make_console(arguments)
    found = run.run(asked, folder, pod, read_options(arguments), console)
    console.print(terminal.columns(results.HEAD, results.rows(found)))
    console.print(
        f"{asked.measure}; table: {folder}/study.json, plot: {folder}/study.svg", highlight=False, markup=False
    )
    arguments.problem = results.failures(found)
    return found
