"""The commands train and launch."""

import argparse
from typing import Any

from podscale.cli.arguments import make_console, read_options, read_pod, read_recipe
from podscale.config.stop_condition import Until


def train(arguments: argparse.Namespace) -> Any:
    recipe = read_recipe(arguments)
    until = Until.parse(arguments.until) if arguments.until else None
    allowed = [kind.strip() for kind in arguments.allow_changed.split(",") if kind.strip()]
    from podscale.report import terminal
    from podscale.training import loop

    pod, options = read_pod(arguments), read_options(arguments)
    console = make_console(arguments)  # after the processes have joined: only the first one's says anything
    summary = loop.train(
        recipe,
        pod=pod,
        options=options,
        folder=arguments.run,
        until=until,
        console=console,
        allow_changed=allowed,
        track=[name.strip() for name in arguments.track.split(",") if name.strip()],
    )
    terminal.show(summary, console)
    return summary


def launch(arguments: argparse.Namespace) -> Any:
    from podscale.processes.launch import launch

    arguments.code = launch(arguments.command, arguments.processes, arguments.restarts, arguments.logs)
