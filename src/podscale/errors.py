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


class JoinError(UserError):
    """Raised where the other processes of a run cannot be joined; they may be there when it is started again."""


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


def get_first_line(error: BaseException, length: int | None = None) -> str:
    """Return the first line of an error's text, or its type's name if it has none, cut to a length.

    >>> get_first_line(ValueError("no such key\\n  in store.cc:12")), get_first_line(KeyboardInterrupt())
    ('no such key', 'KeyboardInterrupt')
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:length]


class PreemptedError(Exception):
    """Raised after a run was asked to stop and has saved its state.

    Args:
        step: the last update of the run.
        saved_step: the update that the newest checkpoint was saved after, if not this one: the disk may be full.
        nothing_new: this session has done no update, so there was nothing to save.
    """

    def __init__(self, step: int, saved_step: int | None = None, *, nothing_new: bool = False) -> None:
        if nothing_new:
            text = f"before the first step of this session; the same command {describe_start(step)}"
        elif saved_step in (None, step):
            text = f"after step {step:,}, which is saved; the same command resumes from there"
        else:
            text = f"after step {step:,}, which could not be saved; the same command {describe_start(saved_step or 0)}"
        super().__init__(f"stopped on request {text}")
        self.step = step


class TerminatedError(KeyboardInterrupt):
    """Raised by SIGTERM or SIGHUP where no training handles them; what cleans up after Ctrl-C cleans up after these."""


class SavedInterruptError(KeyboardInterrupt):
    """Raised after Ctrl-C, once the run has saved its state; see `PreemptedError`."""

    def __init__(self, step: int, saved_step: int | None = None) -> None:
        if saved_step in (None, step):
            super().__init__(f"step {step:,} is saved, and the same command resumes from there")
        else:
            again = describe_start(saved_step or 0)
            super().__init__(f"step {step:,} could not be saved, and the same command {again}")
        self.step = step


def describe_start(step: int) -> str:
    """Return what the same command does to a run whose newest checkpoint is of this step; 0: it has none.

    >>> describe_start(1200), describe_start(0)
    ('resumes after step 1,200', 'starts again')
    """
    return f"resumes after step {step:,}" if step else "starts again"


class DivergedError(Exception):
    """Raised where a run's loss stays non-finite although it was rolled back."""
