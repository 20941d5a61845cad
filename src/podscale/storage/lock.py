"""Lock a folder for one process."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from podscale.errors import UserError
from podscale.storage.files import name_file

LOCK = "lock"
HELD = (errno.EWOULDBLOCK, errno.EACCES)  # what flock reports where another process has the lock


class FolderLock:
    """Locks a run's folder for one training, from `acquire` to the end of the `with` block or of the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None

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
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()
