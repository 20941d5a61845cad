"""Result: what a command gives back to the command line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """The outcome of a command.

    Attributes:
        value: what `--json` prints.
        message: a problem that did not keep the command from its other work; printed at the end, on stderr.
        code: the exit code.

    >>> Result({"images": 3}).code, Result(message="cannot read b.jpg").code
    (0, 2)
    """

    value: object = None
    message: str = ""
    code: int = -1

    def __post_init__(self) -> None:
        if self.code < 0:
            object.__setattr__(self, "code", 2 if self.message else 0)
