"""The verbs: what each command does with its arguments, and what it says. JAX is imported only where it is needed."""

import argparse
import sys
from typing import Any, TextIO, cast

from podscale import recipe as recipes
from podscale.cli.safe_stream import SafeStream
from podscale.config.fields import replace_fields
from podscale.config.options import Options, PodOptions
from podscale.recipe import SECTIONS, Recipe

# --- from arguments to values ------------------------------------------------------------------------------------


def given_fields(arguments: argparse.Namespace, sections: Any) -> dict[str, str]:
    return {k: v for k, v in vars(arguments).items() if k.partition(".")[0] in sections and "." in k}


def read_recipe(arguments: argparse.Namespace) -> Recipe:
    return recipes.override(recipes.load(arguments.recipe), given_fields(arguments, SECTIONS))


def _section(arguments: argparse.Namespace, name: str) -> dict[str, str]:
    return {k.partition(".")[2]: v for k, v in given_fields(arguments, (name,)).items()}


def read_options(arguments: argparse.Namespace) -> Options:
    return replace_fields(Options(), "plan", _section(arguments, "plan"))


def read_pod(arguments: argparse.Namespace) -> Any:
    from podscale import pod
    from podscale.processes import abort_message, group

    options = replace_fields(PodOptions(), "pod", _section(arguments, "pod"))
    group.join(arguments.coordinator, arguments.processes, arguments.process, options.heartbeat_s)
    abort_message.install(*group.rank_and_size())
    return pod.find(options.shape, options.virtual, options.cores)


def make_console(arguments: argparse.Namespace) -> Any:
    """Where people are told of things."""
    from rich.console import Console

    # With --json, stdout carries the one JSON object and everything for people goes to stderr.
    stream = SafeStream(sys.stderr if arguments.json else sys.stdout)
    return Console(file=cast(TextIO, stream), soft_wrap=True, quiet=not is_main_process())


def is_main_process() -> bool:
    """Whether this process talks to people: of several that have joined, only the first does."""
    if "jax" not in sys.modules:
        return True
    from podscale.processes.group import is_main_process

    return is_main_process()
