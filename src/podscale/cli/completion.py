"""Complete command lines in a shell, from the parser itself, so that completions cannot be out of date.

`podscale completion bash` prints a few lines for the shell, which run `podscale complete WORD...` when the tab key is
pressed. It prints one candidate per line; a single line `FILES` makes the shell complete paths.
"""

import argparse
import typing
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Literal

from podscale import recipe as recipes
from podscale.config import fields
from podscale.config.options import Options, PodOptions

FILES = "FILES"
SCRIPTS = MappingProxyType(
    {
        "bash": """\
# podscale: put this line into ~/.bashrc:  source <(podscale completion bash)
_podscale() {
    local IFS=$'\\n' candidates
    candidates=$(podscale complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [ "$candidates" = FILES ]; then
        compopt -o default
        COMPREPLY=()
    else
        COMPREPLY=($candidates)
    fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/}
complete -F _podscale podscale
""",
        "zsh": """\
# podscale: put this line into ~/.zshrc, after compinit:  source <(podscale completion zsh)
_podscale() {
    local -a candidates
    candidates=("${(@f)$(podscale complete "${words[@]:1:$((CURRENT - 1))}" 2>/dev/null)}")
    if [[ "$candidates" == FILES ]]; then
        _files
    else
        compadd -- $candidates
    fi
}
compdef _podscale podscale
""",
        "fish": """\
# podscale: run this once:  podscale completion fish > ~/.config/fish/completions/podscale.fish
function __podscale_candidates
    set -l candidates (podscale complete (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)
    if test "$candidates" = FILES
        __fish_complete_path (commandline -ct)
    else
        printf '%s\\n' $candidates
    end
end
complete -c podscale -f -a '(__podscale_candidates)'
""",
    }
)


def list_candidates(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Return what the last of `words` may be completed to.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("--until")
    >>> list_candidates(parser, ["--u"])
    ['--until']
    """
    *before, last = words or [""]
    index = 0  # of the next positional argument
    open_option: argparse.Action | None = None  # an option whose value comes next
    for argument in before:
        if open_option is not None:
            open_option = None
        elif argument.startswith("-"):
            option = parser._option_string_actions.get(argument.partition("=")[0])
            open_option = option if option is not None and option.nargs != 0 and "=" not in argument else None
        elif (inner := _find_subparser(parser, argument)) is not None:
            parser, index = inner, 0
        else:
            index += 1
    if open_option is not None:
        return _filter_by_prefix(_complete_option(open_option), last)
    if last.startswith("-"):
        return _filter_by_prefix([name for name in parser._option_string_actions if name.startswith("--")], last)
    return _filter_by_prefix(_complete_positional(parser, index), last)


def _find_subparser(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser | None:
    commands = getattr(parser, "commands", None)
    return commands.choices.get(name) if commands else None


def _complete_positional(parser: argparse.ArgumentParser, index: int) -> list[str]:
    """Return the values of a positional argument: names of commands, of recipes, or FILES."""
    actions = [action for action in parser._actions if not action.option_strings]
    if not actions:
        return []
    action: Any = actions[min(index, len(actions) - 1)]
    if isinstance(action.choices, dict):  # subcommands
        return list(action.choices)
    if action.dest == "recipe":
        return list(recipes.list_presets()) if index == 0 else []
    return list(map(str, action.choices)) if action.choices else [FILES]


def _complete_option(option: argparse.Action) -> list[str]:
    """Return the values of an option."""
    if option.choices:
        return list(map(str, option.choices))
    section, _, field = option.dest.partition(".")
    kind = {**recipes.SECTIONS, "pod": PodOptions, "plan": Options}.get(section)
    hint = typing.get_type_hints(kind).get(field) if kind and field else None
    if typing.get_origin(hint) is Literal:
        return [*map(str, typing.get_args(hint)), *fields.list_added_choices(option.dest)]
    if hint is bool:
        return ["true", "false"]
    return [FILES]


def _filter_by_prefix(names: Iterable[str], prefix: str) -> list[str]:
    names = list(names)
    return names if names == [FILES] else sorted(name for name in names if name.startswith(prefix))
