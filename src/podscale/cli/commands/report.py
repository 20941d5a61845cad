"""The commands `report`, `recipes` and `completion`."""

import argparse
import shutil
from contextlib import suppress
from pathlib import Path

from podscale import recipe as recipes
from podscale.cli.arguments import make_console
from podscale.cli.result import Result
from podscale.errors import UserError


def run_report(arguments: argparse.Namespace) -> Result:
    """Write a run's report, or a comparison of several runs."""
    from podscale.report import compare, page
    from podscale.runs.folder import Run

    runs = [Run.load(folder) for folder in arguments.runs] or [Run.load_newest()]
    if len(runs) > 1:
        path = compare.write_comparison(runs, Path(arguments.to or compare.default_file(runs)))
    elif runs[0].where != str(runs[0].folder):  # in a bucket: its working copy does not stay
        path = Path(shutil.copy(page.write_report(runs[0]), arguments.to or f"report-{runs[0].folder.name}.html"))
    elif arguments.to:
        raise UserError("--to is for comparisons of two or more runs; a single run's report is in its folder")
    else:
        path = page.write_report(runs[0])
    make_console(arguments).print(f"report written to {path}; open it in a browser", highlight=False, markup=False)
    return Result({"report": str(path), "runs": [run.where for run in runs]})


def run_watch(arguments: argparse.Namespace) -> Result:
    """Serve a run's report until Ctrl-C."""
    import threading

    from podscale.report.watch import serve_report
    from podscale.runs.folder import Run

    run = Run.load(arguments.run) if arguments.run else Run.load_newest()
    with serve_report(run, arguments.port) as address:
        print(f"serving the report of {run.where} at {address}; press Ctrl-C to stop", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    return Result({"run": run.where, "address": address})


def run_recipes(arguments: argparse.Namespace) -> Result:
    """Print the recipes that ship with Podscale."""
    presets = recipes.list_presets()
    console = make_console(arguments)
    for name, doc in presets.items():
        console.print(f"[bold]{name}[/bold]", highlight=False)
        for line in doc.splitlines():
            console.print(f"  {line}", highlight=False, markup=False)
    return Result(presets)


def run_completion(arguments: argparse.Namespace) -> Result:
    """Print a shell's completion script."""
    from podscale.cli.completion import SCRIPTS

    script = SCRIPTS[arguments.shell]
    if not arguments.json:
        print(script, end="")
    return Result({"shell": arguments.shell, "script": script})
