"""The files of checkpoints: retry reads, distinguish damage from read errors, move damaged ones aside.

A checkpoint counts as damaged only if its bytes can be read and are wrong. A disk that cannot be read for a moment (no
permission, an input/output error, a stale handle, too many open files, a missing mount) proves nothing about what is
on it: reading is tried again, and then the run ends. So that a missing folder is not taken for a run that never saved,
`last-checkpoint.json` beside the folder records that a checkpoint was completed.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

from podscale.errors import UserError
from podscale.storage.files import read_json, write_atomically

T = TypeVar("T")

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between attempts to read
RECORD = "last-checkpoint.json"
BLOCK_BYTES = 2**20
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
STRUCTURE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)  # a file is missing, or something else is in its place
ACCESS = (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
MOUNT = (errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.ELOOP)
READ_PROBLEMS = tuple(os.strerror(code) for code in (*ACCESS, *MOUNT))  # these prove no damage


class UnreadableCheckpointError(UserError):
    """Checkpoints cannot be read now; that does not mean that they are damaged."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(
            f"cannot read {path}: {reason}; it may still be whole, so nothing was moved; make it readable (is its disk "
            "mounted?) and give the same command again"
        )


def retry_reading(read: Callable[[], T], path: Path | str) -> T:
    """Return what `read` returns, and try again for a while if it raises OSError.

    Not where a file is in the place of a folder: that does not pass.

    Raises:
        UnreadableCheckpointError: the last attempt failed too.
    """
    for delay_s in RETRY_DELAYS_S:
        try:
            return read()
        except NotADirectoryError:
            break
        except OSError:
            time.sleep(delay_s)
    try:
        return read()
    except OSError as error:
        reason = f"{error.strerror or error}"
        reason += "" if isinstance(error, NotADirectoryError) else f", also after {sum(RETRY_DELAYS_S):g} s"
        raise UnreadableCheckpointError(error.filename or path, reason) from error


def find_read_problem(error: Exception) -> str:
    """Return why files could not be read, if that is what an error of the checkpoint library came from; else ""."""
    if isinstance(error, OSError) and error.errno:
        return "" if error.errno in STRUCTURE else os.strerror(error.errno)
    return next((problem for problem in READ_PROBLEMS if problem.lower() in str(error).lower()), "")


def read_every_byte(folder: Path) -> None:
    """Read all files of a checkpoint, to find out whether they can be read; they are in memory then.

    Raises:
        OSError: one cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    for path, _, names in os.walk(folder, onerror=fail):
        for name in names:
            with _open(Path(path, name)) as file:
                while file.read(BLOCK_BYTES):
                    pass


@contextmanager
def _open(path: Path) -> Iterator[FileIO]:
    """Open a file for reading; errors inside the block name it."""
    try:
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        error.filename = str(path)  # what `read` raises has no name
        raise


# --- which checkpoints there are -------------------------------------------------------------------------------------


def find_steps(folder: Path, *, allow_lost: bool = False) -> list[int]:
    """Return the steps of a run's checkpoints, whole or not, oldest first; none if it never completed one.

    Args:
        folder: the run's folder of checkpoints.
        allow_lost: return none, too, if the run had checkpoints that are gone.

    Raises:
        UserError: the folder cannot be read, or the run had checkpoints and none is left.
    """
    expected = not allow_lost and read_record(folder) is not None

    def list_expected_steps() -> list[int]:
        steps = list_steps(folder)
        if expected and not steps:
            raise FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(folder))
        return steps

    try:
        return retry_reading(list_expected_steps, folder)
    except UnreadableCheckpointError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise make_lost_error(folder, "there is none (is its disk mounted?)") from None


def make_lost_error(folder: Path, state: str) -> UserError:
    """Return the error for a run that had checkpoints, with what has become of them."""
    return UserError(
        f"the run in {folder.parent} had a checkpoint of step {read_record(folder):,}, but in {folder} {state}; bring "
        "one back and give the same command again, or give --from-scratch as well to start again at step 0"
    )


def list_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, whole or not, oldest first; none if there is no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    except FileNotFoundError:
        return []


# --- the record that there was a checkpoint --------------------------------------------------------------------------


def write_record(folder: Path, step: int) -> bool:
    """Record that the checkpoint of this step is complete; return whether that could be written."""
    with suppress(OSError):
        write_atomically(_get_record_path(folder), json.dumps({"step": step}))
        return True
    return False


def read_record(folder: Path) -> int | None:
    """Return the step of the last checkpoint that is known to have been completed; None if there was none."""
    path = _get_record_path(folder)
    record = retry_reading(lambda: read_json(path), path)
    if isinstance(record, dict) and isinstance(record.get("step"), int):
        return int(record["step"])
    return 0 if path.exists() else None  # a broken record still proves that there was one


def remove_record(folder: Path) -> None:
    """Forget that there was a checkpoint: the run has rolled back to step 0, or starts there as asked."""
    _get_record_path(folder).unlink(missing_ok=True)


def _get_record_path(folder: Path) -> Path:
    return folder.with_name(RECORD)


# --- changing the folder ---------------------------------------------------------------------------------------------


def move_aside(folder: Path, step: int, name: str) -> Path:
    """Move a checkpoint to a folder beside its own that no run reads, replacing nothing; return its new path."""
    parent = folder.with_name(name)
    parent.mkdir(exist_ok=True)
    target, number = parent / str(step), 1
    while os.path.lexists(target):
        number += 1
        target = parent / f"{step}-{number}"
    shutil.move(folder / str(step), target)
    return target


def check_writable(folder: Path) -> None:
    """Make the folder if it does not exist, and refuse one that nothing can be written to.

    A full disk is not refused: it may have space when the first checkpoint is due.

    Raises:
        UserError: the folder is read-only, or cannot be made.
    """
    probe = folder / f".{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        if error.errno in NOT_WRITABLE or not folder.is_dir():
            raise UserError(
                f"cannot write checkpoints to {folder}: {error.strerror}; make it writable, or choose another folder "
                "with --run"
            ) from None
