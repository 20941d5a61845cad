"""Exceptions that are part of the contract: the user's mistakes, and two ways in which a run ends early.

`UserError` carries one sentence that says what is wrong, where, and what to do. The command line prints that sentence
and exits with code 2; in Python it is an ordinary exception. Any other exception that escapes is a defect of Podscale
and keeps its traceback.
"""

import errno
from types import MappingProxyType


class UserError(Exception):
    """Raised where a request of the user's cannot be fulfilled; the message is one sentence.

    >>> import podscale
    >>> try:
    ...     podscale.load_recipe("digit")
    ... except podscale.UserError as error:
    ...     print(error)
    there is no recipe 'digit': did you mean digits?
    """


class StorageError(UserError):
    """Raised where a store fails: a bucket does not answer, or an object was replaced. No image is to blame."""


ADVICE = MappingProxyType(
    {
        errno.ENOSPC: "free some disk space, or choose another folder",
        errno.EDQUOT: "free some of your disk quota, or choose another folder",
        errno.EMFILE: "this process has too many files open; raise its limit, as `ulimit -n 4096` does",
        errno.ENFILE: "all processes of this machine have too many files open; end some, or raise fs.file-max",
    }
)


def describe_os_error(error: OSError) -> str:
    """Return what the system refused, for which file, and what to do about it.

    >>> describe_os_error(OSError(28, "No space left on device", "runs/one/lock"))
    'No space left on device: runs/one/lock; free some disk space, or choose another folder'
    """
    text = error.strerror or str(error)
    text += f": {error.filename}" if error.filename else ""
    advice = ADVICE.get(error.errno or 0)
    return f"{text}; {advice}" if advice else text


class PreemptedError(Exception):
    """Raised after a run was asked to stop and has saved its state.

    Args:
        step: the last update of the run.
        saved_step: the update that the newest checkpoint was saved after, if not this one: the disk may be full.
        nothing_new: this session has done no update, so there was nothing to save.
    """

    def __init__(self, step: int, saved_step: int | None = None, *, nothing_new: bool = False) -> None:
        if nothing_new:
            text = f"before the first step of this session; the same command {_describe_start(step)}"
        elif saved_step in (None, step):
            text = f"after step {step:,}, which is saved; the same command resumes from there"
        else:
            text = f"after step {step:,}, which could not be saved; the same command {_describe_start(saved_step or 0)}"
        super().__init__(f"stopped on request {text}")
        self.step = step


class SavedInterruptError(KeyboardInterrupt):
    """Raised after Ctrl-C, once the run has saved its state; see `PreemptedError`."""

    def __init__(self, step: int, saved_step: int | None = None) -> None:
        if saved_step in (None, step):
            super().__init__(f"step {step:,} is saved, and the same command resumes from there")
        else:
            again = _describe_start(saved_step or 0)
            super().__init__(f"step {step:,} could not be saved, and the same command {again}")
        self.step = step


def _describe_start(step: int) -> str:
    return f"resumes after step {step:,}" if step else "starts again"


class DivergedError(Exception):
    """Raised where a run's loss stays non-finite although it was rolled back."""
