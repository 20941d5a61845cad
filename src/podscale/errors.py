"""Exceptions that are part of the contract: the user's mistakes, and two ways in which a run ends early.

`UserError` carries one sentence that says what is wrong, where, and what to do. The command line prints that sentence
and exits with code 2; in Python it is an ordinary exception. Any other exception that escapes is a defect of Podscale
and keeps its traceback.
"""

import errno


class UserError(Exception):
    """Raised where a request of the user's cannot be fulfilled; the message is one sentence.

    >>> import podscale
    >>> try:
    ...     podscale.load_recipe("digit")
    ... except podscale.UserError as error:
    ...     print(error)
    there is no recipe 'digit': did you mean digits?
    """


ADVICE = {
    errno.ENOSPC: "free some disk space, or choose another folder",
    errno.EDQUOT: "free some of your disk quota, or choose another folder",
    errno.EMFILE: "this process has too many files open; raise its limit, as `ulimit -n 4096` does",
    errno.ENFILE: "all processes of this machine have too many files open; end some, or raise fs.file-max",
}


def describe_os_error(error: OSError) -> str:
    """Return what the system refused, for which file, and what to do about it.

    >>> describe_os_error(OSError(28, "No space left on device", "runs/one/lock"))
    'No space left on device: runs/one/lock; free some disk space, or choose another folder'
    """
    text = error.strerror or str(error)
    text += f": {error.filename}" if error.filename else ""
    return f"{text}; {ADVICE[error.errno]}" if error.errno in ADVICE else text


class PreemptedError(Exception):
    """Raised after a run was asked to stop and has saved its state.

    Args:
        step: the last update of the run.
        nothing_new: this session has done no update, so there was nothing to save.
    """

    def __init__(self, step: int, *, nothing_new: bool = False) -> None:
        saved = f"stopped on request after step {step:,}, which is saved; the same command resumes from there"
        again = f"resumes after step {step:,}" if step else "starts again"
        unsaved = f"stopped on request before the first step of this session; the same command {again}"
        super().__init__(unsaved if nothing_new else saved)
        self.step = step


class DivergedError(Exception):
    """Raised where a run's loss stays non-finite although it was rolled back."""
