"""Checkpoints in a folder of the file system: one folder per step, which appears under its name once it is complete.

    checkpoints/34/manifest.json            what it holds; see `format`
    checkpoints/34/arrays-0.bin, ...        a file for each process that wrote
    checkpoints/45-1f3a-2.part/             one that is being written, or was when the process was killed
    checkpoints/12.deleted/                 one that is being deleted

Everything is flushed to the disk before the folder gets its name, and a folder loses its name before its files are
deleted. So a process that is killed, or a machine that loses power, leaves whole checkpoints alone.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from podscale.errors import UserError
from podscale.storage.files import flush, name_file, open_regular
from podscale.storage.lock import FolderReplacedError
from podscale.training.checkpoint import files
from podscale.training.checkpoint import orbax as orbax_checkpoint
from podscale.training.checkpoint.format import MANIFEST, MAX_MANIFEST_BYTES, FilePart, InvalidManifestError, Manifest

PART, DELETED = ".part", ".deleted"
LEFTOVERS = (f"*{PART}", f"*{DELETED}", "*.orbax-checkpoint-tmp")
VISIBLE_S = 10.0  # for which a file that another host has written may be invisible to this one
POLL_S = 0.5


class Attempt(NamedTuple):
    """One attempt to write the checkpoint of a step; the token is its own, so that attempts never share files."""

    step: int
    token: str


class DamagedFileError(Exception):
    """A file of a checkpoint is missing, or has another size than its manifest says."""


class CheckpointFolder:
    """The files of a run's checkpoints. Errors of the file system are raised as they are, with the file's name.

    Args:
        folder: where they are.
        check_owner: called before a checkpoint is completed, deleted or moved; raises a `FolderReplacedError` if the
            folder has become that of another run.
    """

    def __init__(self, folder: Path, check_owner: Callable[[], None] | None = None) -> None:
        self.folder, self._check_owner = folder, check_owner or (lambda: None)

    # --- write ---

    def write_part(self, attempt: Attempt, name: str, blocks: Iterable[Any]) -> None:
        """Write a file of an attempt, and flush it to the disk."""
        folder = self._get_part_folder(attempt)
        folder.mkdir(exist_ok=True)
        _write_durably(folder / name, blocks)

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Make an attempt the checkpoint of its step: all or nothing. All its parts are written."""
        folder, target = self._get_part_folder(attempt), self.get_path(attempt.step)
        for part in manifest.files:
            _check_visible(folder / part.name, part.size)
        _write_durably(folder / MANIFEST, [manifest.to_bytes()])
        flush(folder)
        self._check_owner()
        if os.path.lexists(target):
            self._delete_folder(target)
        os.rename(folder, target)
        flush(self.folder)

    def discard(self, attempt: Attempt) -> None:
        """Delete what there is of an attempt; call it once nobody writes to it."""
        shutil.rmtree(self._get_part_folder(attempt), ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Delete what killed processes have left half written or half deleted; call it while nothing is written."""
        for pattern in LEFTOVERS:
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def delete(self, step: int) -> None:
        """Delete a checkpoint; what cannot be deleted stays, and is whole or has no name."""
        with suppress(OSError, FolderReplacedError):
            self._check_owner()
            self._delete_folder(self.get_path(step))

    def _delete_folder(self, path: Path) -> None:
        hidden, number = path.with_name(f"{path.name}{DELETED}"), 1
        while os.path.lexists(hidden):
            number += 1
            hidden = path.with_name(f"{path.name}-{number}{DELETED}")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _get_part_folder(self, attempt: Attempt) -> Path:
        return self.folder / f"{attempt.step}-{attempt.token}{PART}"

    def move_aside(self, step: int, name: str) -> Path:
        """Move a checkpoint to a folder beside its own that no run reads; return its new path."""
        self._check_owner()
        return files.move_aside(self.folder, step, name)

    # --- read ---

    def get_path(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / str(step)

    def describe(self, step: int) -> str:
        """Return where a checkpoint is."""
        return str(self.get_path(step))

    def list_steps(self) -> list[int]:
        """Return the steps of all checkpoints, whole or not."""
        return files.list_steps(self.folder)

    def has_folder(self, step: int) -> bool:
        """Return whether there is a checkpoint, whole or not."""
        return self.get_path(step).is_dir()

    def find_orbax(self, step: int) -> Path | None:
        """Return the folder of a checkpoint if Orbax wrote it."""
        path = self.get_path(step)
        return path if orbax_checkpoint.is_orbax(path) else None

    def read_manifest(self, step: int) -> bytes:
        """Return the bytes of a manifest.

        Raises:
            OSError: it cannot be read, or does not exist.
            InvalidManifestError: it is too large to be one.
        """
        path = self.get_path(step) / MANIFEST
        with name_file(path), open_regular(path) as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidManifestError("its manifest is too large")
        return data

    def read_part(self, step: int, part: FilePart, reads: Sequence[tuple[int, memoryview]]) -> None:
        """Fill buffers from a file, each from its offset on.

        Raises:
            OSError: the file cannot be read now.
            DamagedFileError: it does not exist, or has another size.
        """
        path = self.get_path(step) / part.name
        try:
            with name_file(path), open_regular(path) as file:
                is_long_enough = all(_read_into(file, offset, view) for offset, view in reads)
                size = os.fstat(file.fileno()).st_size  # proves nothing unless the bytes can be read
            if size != part.size or not is_long_enough:
                raise DamagedFileError(f"{part.name} has {size:,} bytes, not {part.size:,}")
        except (FileNotFoundError, IsADirectoryError):
            if self.get_path(step).is_dir():
                raise DamagedFileError(f"{part.name} is missing") from None
            raise

    # --- the record that there was a checkpoint ---

    def find_steps(self, *, allow_lost: bool = False) -> list[int]:
        """Return the steps of the run's checkpoints; see `files.find_steps`."""
        return files.find_steps(self.folder, allow_lost=allow_lost)

    def check_writable(self) -> None:
        """Make the folder if it does not exist, and refuse one that nothing can be written to."""
        files.check_writable(self.folder)

    def write_record(self, step: int) -> bool:
        """Record that the checkpoint of this step is complete; return whether that could be written."""
        return files.write_record(self.folder, step)

    def read_record(self) -> int | None:
        """Return the step of the last checkpoint that is known to have been completed; None if there was none."""
        return files.read_record(self.folder)

    def remove_record(self) -> None:
        """Forget that there was a checkpoint."""
        files.remove_record(self.folder)

    def make_lost_error(self, state: str) -> UserError:
        """Return the error for a run that had checkpoints, with what has become of them."""
        return files.make_lost_error(self.folder, state)


def _read_into(file: IO[bytes], offset: int, view: memoryview) -> bool:
    """Fill a buffer from a file; return whether the file is long enough."""
    file.seek(offset)
    return file.readinto(view) == len(view)  # type: ignore[attr-defined]


def _write_durably(path: Path, blocks: Iterable[Any]) -> None:
    with name_file(path), path.open("wb", buffering=0) as file:
        for block in blocks:
            view = memoryview(block)
            while view.nbytes:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _check_visible(path: Path, size: int) -> None:
    """Make sure that this process sees what another one has written, perhaps on another host."""
    deadline = time.monotonic() + VISIBLE_S
    while True:
        with suppress(FileNotFoundError), open_regular(path) as file:
            if os.fstat(file.fileno()).st_size == size:
                return
        if time.monotonic() > deadline:
            message = f"{path.name} cannot be seen by process 0; the run needs a folder that all processes share"
            raise OSError(errno.ENOENT, message, str(path))
        time.sleep(POLL_S)
