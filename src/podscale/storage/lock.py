"""Lock a folder for one process."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from podscale.errors import UserError
from podscale.storage.files import name_file, open_regular

LOCK = "lock"
HELD = (errno.EWOULDBLOCK, errno.EACCES)  # what flock reports where another process has the lock


class FolderReplacedError(UserError):
    """A run's folder was moved or deleted, and another training has started in its place."""


class FolderLock:
    """Locks a run's folder for one training, from `acquire` to the end of the `with` block or of the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None
        self._holder = f"process {os.getpid()} on {socket.gethostname()}"

    def acquire(self) -> None:
        """Lock the folder.

        Raises:
            UserError: another training has locked it, and the message names that process; or the file system has no
                locks.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in HELD:
                file.close()
                raise UserError(
                    f"{self._folder} cannot be locked against a second training: {error.strerror}; mount its file "
                    "system with support for flock, or choose a folder on another one with --run"
                ) from None
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"{self._folder} is being trained by {holder}; wait for it, or choose another folder with --run"
            ) from None
        self._file = file
        with name_file(self._folder / LOCK):
            file.truncate(0)
            file.write(self._holder)
            file.flush()

    def check(self) -> None:
        """Refuse to change files at the folder's path if another training has started there, in another folder.

        A folder that is gone is not refused, nor is a link to where the locked one is now.

        Raises:
            FolderReplacedError: one has.
        """
        try:
            file = open_regular(self._folder / LOCK) if self._file else None
        except OSError:
            return  # the folder is gone, or cannot be read: what is done next reports that
        if not (file and self._file):
            return
        with file:
            if os.path.samestat(os.fstat(file.fileno()), os.fstat(self._file.fileno())):
                return
            holder = file.read().decode(errors="replace").strip()
            if holder != self._holder or _is_locked(file):
                raise FolderReplacedError(
                    f"{self._folder} was moved or deleted during this training, and is now trained by "
                    f"{holder or 'another process'}, so this one ends; bring its own folder back, or choose another "
                    "one with --run"
                )

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()


def _is_locked(file: IO[bytes]) -> bool:
    """Return whether another process holds the lock of an open file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in HELD
    return False
