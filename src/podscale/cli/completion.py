"""Shell completion: what may come next on a command line, from the parser itself, so that it cannot be out of date.

`podscale completion bash` prints a few lines for the shell, which ask `podscale complete WORD...` at every press of the
tab key. The answer is one candidate a line; a line that is only `FILES` lets the shell complete paths.
"""

import argparse
import typing
from collections.abc import Iterable
from typing import Any, Literal

from podscale import recipe as recipes
from podscale.config import fields
from podscale.config.options import Options, PodOptions

FILES = "FILES"
SCRIPTS = {
    "bash": """\
# podscale: put this line into ~/.bashrc:  source <(podscale completion bash)
_podscale() {
    local IFS=$'\\n' found
    found=$(podscale complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [ "$found" = FILES ]; then
        compopt -o default
        COMPREPLY=()
    else
        COMPREPLY=($found)
    fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/}
complete -F _podscale podscale
""",
    "zsh": """\
# podscale: put this line into ~/.zshrc, after compinit:  source <(podscale completion zsh)
_podscale() {
    local -a found
    found=("${(@f)$(podscale complete "${words[@]:1:$((CURRENT - 1))}" 2>/dev/null)}")
    if [[ "$found" == FILES ]]; then
        _files
    else
        compadd -- $found
    fi
}
compdef _podscale podscale
""",
    "fish": """\
# podscale: run this once:  podscale completion fish > ~/.config/fish/completions/podscale.fish
function __podscale_found
    set -l found (podscale complete (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)
    if test "$found" = FILES
        __fish_complete_path (commandline -ct)
    else
        printf '%s\\n' $found
    end
end
complete -c podscale -f -a '(__podscale_found)'
""",
}


def candidates(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """What the last of `words` may become.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("--until")
    >>> candidates(parser, ["--u"])
    ['--until']
    """
    *before, last = words or [""]
    place = 0  # of the next positional argument
    waiting: argparse.Action | None = None
    for word in before:
        if waiting is not None:
            waiting = None
        elif word.startswith("-"):
            option = parser._option_string_actions.get(word.partition("=")[0])
            waiting = option if option is not None and option.nargs != 0 and "=" not in word else None
        elif (inner := _subparser(parser, word)) is not None:
            parser, place = inner, 0
        else:
            place += 1
    if waiting is not None:
        return _starting(_values(waiting), last)
    if last.startswith("-"):
        return _starting([name for name in parser._option_string_actions if name.startswith("--")], last)
    return _starting(_positional(parser, place), last)


def _subparser(parser: argparse.ArgumentParser, word: str) -> argparse.ArgumentParser | None:
    action = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
    return action.choices.get(word) if action else None


def _positional(parser: argparse.ArgumentParser, place: int) -> list[str]:
    """What may stand at a place: names of verbs, of recipes, or of files."""
    actions = [action for action in parser._actions if not action.option_strings]
    if not actions:
        return []
    action: Any = actions[min(place, len(actions) - 1)]
    if isinstance(action, argparse._SubParsersAction):
        return [name for name in action.choices if name != "complete"]
    if action.dest == "recipe":
        return list(recipes.presets()) if place == 0 else []
    return list(map(str, action.choices)) if action.choices else [FILES]


def _values(option: argparse.Action) -> list[str]:
    """What an option may be given."""
    if option.choices:
        return list(map(str, option.choices))
    section, _, field = option.dest.partition(".")
    kind = {**recipes.SECTIONS, "pod": PodOptions, "plan": Options}.get(section)
    hint = typing.get_type_hints(kind).get(field) if kind and field else None
    if typing.get_origin(hint) is Literal:
        return [*map(str, typing.get_args(hint)), *fields.ADDED_CHOICES.get(option.dest, ())]
    if hint is bool:
        return ["true", "false"]
    return [FILES]


def _starting(names: Iterable[str], start: str) -> list[str]:
    names = list(names)
    return names if names == [FILES] else sorted(name for name in names if name.startswith(start))
