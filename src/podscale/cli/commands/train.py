"""The commands `train` and `launch`."""

import argparse
from typing import Any

from podscale.cli.arguments import make_console, read_options, read_pod, read_recipe
from podscale.config.stop_condition import StopCondition


def run_train(arguments: argparse.Namespace) -> Any:
    """Train a recipe, or resume its run, and print the summary."""
    recipe = read_recipe(arguments)
    until = StopCondition.parse(arguments.until) if arguments.until else None
    allow_changed = [kind.strip() for kind in arguments.allow_changed.split(",") if kind.strip()]
    from podscale.report import terminal
    from podscale.training import loop
    from podscale.training.checkpoint import LastCheckpointNotSavedError
    from podscale.training.program_cache import enable_program_cache

    problem = enable_program_cache()
    pod, options = read_pod(arguments), read_options(arguments)
    console = make_console(arguments)  # after the processes have joined: only the main process prints
    if problem:
        console.print(f"warning: {problem}", style="bold red", markup=False, highlight=False)
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
    except LastCheckpointNotSavedError as error:
        summary, arguments.problem = error.summary, str(error)
    terminal.show_summary(summary, console)
    return summary


def run_launch(arguments: argparse.Namespace) -> Any:
    """Run a command as several processes on this machine."""
    from podscale.processes.launch import launch_processes

    arguments.code = launch_processes(arguments.command, arguments.processes, arguments.restarts, arguments.logs)
