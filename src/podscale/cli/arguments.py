"""Turn parsed arguments into values: recipe, options, pod and consoles.

JAX is imported only in `read_pod`, so that `--help` and mistakes in a command stay fast.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

from podscale import recipe as recipes
from podscale.cli.imports import import_user_code
from podscale.cli.safe_stream import SafeStream, separate_native_output
from podscale.config.fields import replace_fields
from podscale.config.options import Options, PodOptions
from podscale.processes.elastic import control
from podscale.recipe import SECTIONS, Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from podscale.pod import Pod

T = TypeVar("T")


def read_recipe(arguments: argparse.Namespace) -> Recipe:
    """Return the named recipe with the fields that the command line sets, after `--import`."""
    import_user_code(arguments.imports)
    return recipes.override_recipe(recipes.load_recipe(arguments.recipe), collect_fields(arguments, SECTIONS))


def read_options(arguments: argparse.Namespace) -> Options:
    """Return the machine options (`--plan.*`)."""
    return replace_fields(Options(), "plan", _collect_section(arguments, "plan"))


def read_pod(arguments: argparse.Namespace) -> "Pod":
    """Join the other processes, if there are any, and return the pod (`--pod.*`)."""
    return join_processes(arguments)()


def join_processes(arguments: argparse.Namespace, *, in_thread: bool = False) -> "Callable[[], Pod]":
    """Join the other processes, if there are any, and return a function that finds the pod (`--pod.*`).

    A process by itself may find it in a thread from now on: a GPU takes a second to start, in which Python can import.
    """
    from podscale.processes import host

    host.require_descriptors()  # before JAX is imported, which needs some itself
    from podscale import pod
    from podscale.processes import abort_message, group
    from podscale.runs.startup import clock

    options = replace_fields(PodOptions(), "pod", _collect_section(arguments, "pod"))
    clock.mark("imports")
    if is_elastic():
        separate_native_output()  # all processes have the launcher's stdout, and the main one prints there
    group.join(arguments.coordinator, arguments.processes, arguments.process, options.heartbeat_s)
    abort_message.install(*group.get_rank_and_size())
    clock.mark("join")

    find: Callable[[], Pod] = partial(pod.find_pod, options.shape, options.virtual, options.cores)
    if in_thread and not is_elastic() and group.get_rank_and_size()[1] == 1:
        find = start_in_thread(find)

    def find_pod() -> "Pod":
        devices = find()
        clock.mark("devices")
        return devices

    return find_pod


def start_in_thread(function: Callable[[], T]) -> Callable[[], T]:
    """Call a function in a thread; return a function that waits for its result, or raises what it has raised."""
    pool = ThreadPoolExecutor(1, "podscale-start")
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future.result


def use_program_cache() -> None:
    """Cache the programs that this command compiles, as `podscale train` does; warn if there can be no cache."""
    from podscale.training.program_cache import enable_program_cache

    if problem := enable_program_cache():
        make_progress_console().print(f"warning: {problem}", style="bold red", markup=False, highlight=False)


def collect_fields(arguments: argparse.Namespace, sections: Collection[str]) -> dict[str, str]:
    """Return the fields of these sections that the command line sets, as {"section.field": text}."""
    return {k: v for k, v in vars(arguments).items() if k.partition(".")[0] in sections and "." in k}


def _collect_section(arguments: argparse.Namespace, name: str) -> dict[str, str]:
    return {k.partition(".")[2]: v for k, v in collect_fields(arguments, (name,)).items()}


# --- consoles ------------------------------------------------------------------------------------------------------


def make_console(arguments: argparse.Namespace) -> "Console":
    """Return the console for a command's result, which `--json` prints in another form."""
    return _make_console(sys.stdout, quiet=arguments.json, needs_reader=True)


def make_log_console(arguments: argparse.Namespace) -> "Console":
    """Return the console for the log of a long command: stdout, or stderr with `--json`."""
    return _make_console(sys.stderr if arguments.json else sys.stdout)


def make_progress_console() -> "Console":
    """Return the console for progress, which is no part of the result: stderr."""
    return _make_console(sys.stderr)


def _make_console(stream: TextIO, quiet: bool = False, *, needs_reader: bool = False) -> "Console":
    """Return a console on a stream, quiet in all processes but the main one."""
    from rich.console import Console

    file = cast(TextIO, SafeStream(stream, needs_reader=needs_reader))
    return Console(file=file, soft_wrap=True, quiet=quiet or not (is_elastic() or is_main_process()))


def is_elastic() -> bool:
    """Return whether this process belongs to an elastic run: then it may become the main one, and print, later."""
    return bool(os.environ.get(control.FD))


def is_main_process() -> bool:
    """Return whether this is process 0, without importing JAX in a process that has not joined others."""
    if "jax" not in sys.modules:
        return True
    from podscale.processes.group import is_main_process

    return is_main_process()
