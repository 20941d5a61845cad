"""The kinds of input by name, and how to add one."""

from podscale.config.fields import add_choice
from podscale.config.registry import Registry
from podscale.parallel.inputs import HOST_FED, RESIDENT, Input

_BUILT_IN: tuple[Input, ...] = (RESIDENT,)
INPUTS: Registry[Input] = Registry("kind of input", {kind.name: kind for kind in _BUILT_IN})  # as `plan.cache` says


def find_input(cache: str) -> Input:
    """Return the kind of input that `plan.cache` names; what is cached in the hosts' memory is fed from there."""
    return dict(INPUTS).get(cache, HOST_FED)


def register_input(kind: Input) -> None:
    """Make a kind of input available to `plan.cache` under its name.

    Raises:
        UserError: there is already one of this name.
    """
    INPUTS.add(kind.name, kind)
    add_choice("plan.cache", kind.name)
