"""The one exception that means: the user asked for something that cannot be. Two others mean the end of a run.

Every part raises the first with a single sentence that says what is wrong, where, and what to do.
The command line prints that sentence and exits with code 2; in Python it is an ordinary exception.
Anything else that escapes is our own mistake and keeps its traceback.
"""


class UserError(Exception):
    """What the user asked for cannot be done; the message is one sentence."""


class PreemptedError(Exception):
    """A run was asked to stop, and has saved what it knew."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped as asked after step {step:,}, which is saved; the same command goes on from there")
        self.step = step


class DivergedError(Exception):
    """A run has no number to learn from any more, and going back did not help."""
