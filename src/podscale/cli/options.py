"""Options that several commands share, and the parser class that all of them use.

Every field of a recipe is an option, `--section.field VALUE`, and so are the options of the pod and of the plan.
"""

import argparse
import dataclasses
import os
import typing
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias

from podscale import recipe as recipes
from podscale.cli.result import Result
from podscale.config import fields
from podscale.config.options import Options, PodOptions
from podscale.errors import UserError
from podscale.recipe import SECTIONS, Recipe

# Fields that most users set; `--help` lists them before all others.
COMMON_FIELDS = tuple("data.path model.name data.image_size batch.size train.epochs train.seed schedule.peak".split())
PLACEHOLDERS = MappingProxyType({int: "N", float: "X", bool: "true|false", str: "TEXT"})


Function: TypeAlias = Callable[[argparse.Namespace], Result]  # runs a command


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError instead of ending the process.

    Attributes:
        commands: its subcommands; None if it has none.
        fields: options for fields, by "section.field".
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=_Formatter)
        self.register("type", int, _parse_whole_number)
        self.register("type", float, _parse_number)
        self.commands: Commands | None = None
        self.fields: dict[str, argparse.Action] = {}

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists all options)")

    def add_commands(self, metavar: str) -> "Commands":
        """Return the object that subcommands are added to."""
        self.commands = self.add_subparsers(metavar=metavar, parser_class=Parser, title="commands")
        return self.commands


def _parse_whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # argparse has no public name for it


class _Formatter(argparse.HelpFormatter):
    """Leaves the options enough space for their names."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, max_help_position=30, **settings)


def add_command(commands: "Commands", name: str, function: Function, text: str, **more: str) -> "Parser":
    """Add a command that `function` runs, with `--json`; return its parser.

    Args:
        commands: what `Parser.add_commands` returned.
        name: of the command.
        function: takes the parsed arguments.
        text: one sentence without its full stop.
        **more: `example`, without `podscale`; `arguments`, the positional ones in the usage line.
    """
    parser = commands.add_parser(
        name,
        help=text,
        description=text[:1].upper() + text[1:] + ".",
        epilog=f"example: podscale {more['example']}",
        usage=f"%(prog)s {more.get('arguments', '')} [options]".replace("  ", " "),
    )
    parser.set_defaults(function=function)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    return parser


def make_help_function(parser: Parser) -> Function:
    """Return the function of a command that was given without its subcommand."""

    def run(_: argparse.Namespace) -> Result:
        parser.print_help()
        return Result()

    return run


def expand_path(text: str) -> str:
    """Return a path with a leading ~ replaced by the home folder, which shells do not do after `=`."""
    return os.path.expanduser(text)


def add_recipe_options(parser: Parser, default: str) -> None:
    """Add a recipe's name, all its fields, and the machine's options."""
    add_recipe(parser, default)
    add_fields(parser, SECTIONS.items())
    add_import_option(parser)
    add_machine_options(parser)


def add_recipe(parser: Parser, default: str) -> None:
    """Add the name of a recipe."""
    text = f"a recipe's name (`podscale recipes` lists them) or TOML file (default: {default})"
    parser.add_argument("recipe", nargs="?", default=default, metavar="RECIPE", type=expand_path, help=text)


def add_machine_options(parser: Parser) -> None:
    """Add the options of the pod, of the plan, and of the processes."""
    add_fields(parser, (("pod", PodOptions), ("plan", Options)))
    text = "Detected under Slurm, Open MPI, Kubernetes and on TPUs; `podscale launch` sets them on one machine."
    group = parser.add_argument_group("processes", text)
    group.add_argument("--coordinator", default="", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--processes", type=int, default=0, metavar="N", help="number of processes")
    group.add_argument("--process", type=int, default=-1, metavar="I", help="number of this process, from 0")


def add_run_options(parser: Parser) -> None:
    """Add the choice of a run and a checkpoint, for commands that use a trained model."""
    text = "the run's folder (default: the newest one under runs/ that has a checkpoint)"
    parser.add_argument("--run", metavar="DIR", type=expand_path, help=text)
    add_checkpoint_option(parser)
    add_import_option(parser)


def add_run_argument(parser: Parser, text: str, *, several: bool = False) -> None:
    """Add the choice of a run as an argument, or as `--run`, which other commands take."""
    both = parser.add_mutually_exclusive_group()
    nargs, dest = ("*", "runs") if several else ("?", "run")
    both.add_argument(dest, nargs=nargs, default=argparse.SUPPRESS, metavar="RUN", type=expand_path, help=text)
    settings: dict[str, Any] = {"action": "append", "default": []} if several else {}
    both.add_argument("--run", dest=dest, metavar="DIR", type=expand_path, help="the same", **settings)


def add_checkpoint_option(parser: Parser) -> None:
    """Add the choice of a checkpoint."""
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best, newest, or a step (default: best)")


def add_import_option(parser: Parser) -> None:
    """Add `--import`."""
    text = "run a Python file or module first, such as one that registers your own model; may be repeated"
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="FILE.py", help=text)


def add_source_option(parser: Parser, more: tuple[str, ...] = ()) -> None:
    """Add the kind of a data set, and the memory that an image may take."""
    kinds = ("folder", "tar", "tfrecord", "parquet", *more)
    text = "kind of the data set (default: detected)"
    parser.add_argument("--source", choices=kinds, default="", metavar="|".join(kinds), help=text)
    text, default = "memory limit for decoding one image, in MiB (default: 1024)", Recipe().data.max_image_mib
    parser.add_argument("--max-image-mib", type=_parse_mib, default=default, metavar="N", help=text)


def _parse_mib(text: str) -> int:
    return Recipe().override({"data.max_image_mib": text}).data.max_image_mib


# --- fields --------------------------------------------------------------------------------------------------------


def add_fields(parser: Parser, sections: Iterable[tuple[str, type]]) -> None:
    """Add an option for every field of the sections, given as (name, dataclass); common ones come first in the help."""
    for name, kind in sections:
        kinds, group = typing.get_type_hints(kind), None
        for field in dataclasses.fields(kind):
            dotted = f"{name}.{field.name}"
            settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": field.metadata["doc"].replace("%", "%%")}
            settings["metavar"] = _describe_values(dotted, kinds[field.name])
            if dotted in COMMON_FIELDS:
                option = parser.add_argument(f"--{dotted}", **settings)
            else:
                group = group or parser.add_argument_group(name, str(kind.__doc__).partition("\n")[0])
                option = group.add_argument(f"--{dotted}", **settings)
            parser.fields[dotted] = option
            if name not in SECTIONS:
                _add_default(option, field.default)


def _describe_values(dotted: str, kind: type) -> str:
    """Return the placeholder of an option: its choices, or a letter for a number."""
    if typing.get_origin(kind) is Literal:
        return "|".join([*map(str, typing.get_args(kind)), *fields.list_added_choices(dotted)])
    if typing.get_origin(kind) is tuple:
        return "A,B,..." if typing.get_args(kind)[0] is str else "X,Y,..."
    return PLACEHOLDERS[kind]


def show_recipe_defaults(parser: Parser, argv: list[str]) -> None:
    """Add the values of the recipe that a command line names to the help of the fields."""
    while parser.commands is not None:
        name, argv = next((argument for argument in argv if argument in parser.commands.choices), None), argv[1:]
        if name is None:
            return
        parser = parser.commands.choices[name]
    default = parser.get_default("recipe")
    if default is None:
        return
    known = recipes.list_presets()
    name = next((argument for argument in argv if argument in known or argument.endswith(".toml")), default)
    try:
        recipe = recipes.load_recipe(name)
    except UserError:
        recipe = recipes.load_recipe(default)
    parser.description = f"{parser.description} Defaults below are those of the recipe {recipe.name}."
    for section, values in recipe.to_dict().items():
        for field, value in values.items():
            if option := parser.fields.get(f"{section}.{field}"):
                _add_default(option, value)


def _add_default(option: argparse.Action, value: object) -> None:
    if value not in ("", (), []):
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        option.help = f"{option.help} (default: {text})"
