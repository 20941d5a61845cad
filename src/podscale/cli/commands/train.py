"""The commands `train` and `launch`."""

import argparse
import importlib
from typing import TYPE_CHECKING

from podscale.cli.arguments import (
    is_elastic,
    is_main_process,
    join_processes,
    make_log_console,
    read_options,
    read_recipe,
)
from podscale.cli.result import Result
from podscale.config.stop_condition import StopCondition
from podscale.errors import UserError
from podscale.processes.garbage import pause_collection

if TYPE_CHECKING:
    from podscale.runs.folder import Run


def run_train(arguments: argparse.Namespace) -> Result:
    """Train a recipe, or resume its run, and print the summary."""
    recipe = read_recipe(arguments)
    until = StopCondition.parse(arguments.until) if arguments.until else None
    allow_changed = [kind.strip() for kind in arguments.allow_changed.split(",") if kind.strip()]
    options = read_options(arguments)
    with pause_collection():
        from podscale.training.program_cache import enable_program_cache

        problem = enable_program_cache()
        if is_elastic():  # joining freezes what is imported, so that the end of a generation need not look through it
            importlib.import_module("podscale.training.loop")
        find_pod = join_processes(arguments, in_thread=True)  # before the other imports, which go on meanwhile
        from podscale.report import terminal
        from podscale.runs.bucket import resolve_folder
        from podscale.runs.folder import Run
        from podscale.runs.startup import clock
        from podscale.training import loop
        from podscale.training.checkpoint.checkpoints import LastCheckpointNotSavedError
        from podscale.training.reporters.accounts import SummaryNotSavedError

    clock.mark("imports")
    pod = find_pod if is_elastic() else find_pod()  # the pod of an elastic run changes, and nothing may hold an old one
    console = make_log_console(arguments)  # after the processes have joined: only the main process prints
    if problem:
        console.print(f"warning: {problem}", style="bold red", markup=False, highlight=False)
    message = ""
    try:
        summary = loop.train(
            recipe,
            pod=pod,
            options=options,
            folder=arguments.run,
            until=until,
            console=console,
            allow_changed=allow_changed,
            from_scratch=arguments.from_scratch,
            track=[name.strip() for name in arguments.track.split(",") if name.strip()],
        )
    except KeyboardInterrupt as error:
        if str(error):
            raise
        run = Run(resolve_folder(arguments.run or Run.default_folder(recipe)), recipe)
        raise type(error)(_describe_resumption(run)) from None
    except (LastCheckpointNotSavedError, SummaryNotSavedError) as error:
        summary, message = error.summary, str(error)
    if is_main_process():
        terminal.show_summary(summary, console)
    return Result(summary, message)


def _describe_resumption(run: "Run") -> str:
    """Return what the same command will do after an interrupt."""
    if run.has_checkpoints():
        return "the same command resumes from the last checkpoint"
    return "there is no checkpoint yet, so the same command starts again"


def run_launch(arguments: argparse.Namespace) -> Result:
    """Run a command as several processes on this machine."""
    if arguments.elastic:
        if arguments.restarts:
            raise UserError("--elastic starts lost processes again by itself; leave --restarts out")
        from podscale.processes.elastic.launcher import launch_elastic

        command, processes = arguments.command, arguments.processes
        return Result(code=launch_elastic(command, processes, arguments.elastic, arguments.logs))
    from podscale.processes.launch import launch_processes

    code = launch_processes(arguments.command, arguments.processes, arguments.restarts, arguments.logs)
    return Result(code=code)
