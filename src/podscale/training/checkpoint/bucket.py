"""Checkpoints in a bucket: objects with names of their own for each attempt, and one object that says which count.

It has the methods of `folder.CheckpointFolder`. Parts and manifest are written first; the commit is a change
of the run's `current.json`, which only the owner of the run's lock can make (see `podscale.runs.bucket`).
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from podscale.errors import UserError
from podscale.runs.bucket import CHECKPOINTS, Current, RunBucket, RunTakenOverError
from podscale.training.checkpoint import files
from podscale.training.checkpoint.folder import Attempt, DamagedFileError
from podscale.training.checkpoint.format import MANIFEST, FilePart, Manifest


class CheckpointBucket:
    """The checkpoints of a run in a bucket."""

    def __init__(self, bucket: RunBucket) -> None:
        self._bucket, self._store = bucket, bucket.store

    # --- write ---

    def write_part(self, attempt: Attempt, name: str, blocks: Iterable[Any]) -> None:
        """Write an object of an attempt."""
        self._store.write(f"{_make_key(attempt)}/{name}", b"".join(blocks))

    def commit(self, attempt: Attempt, manifest: Manifest) -> None:
        """Make an attempt the checkpoint of its step, after the run's files, so that the journal reaches as far."""
        key = _make_key(attempt)
        for part in manifest.files:
            if self._store.stat(f"{key}/{part.name}").size != part.size:
                raise OSError(f"{part.name} in {self._bucket.location} is not what was written")
        self._store.write(f"{key}/{MANIFEST}", manifest.to_bytes())
        self._bucket.push()

        def add(current: Current) -> None:
            current["steps"][str(attempt.step)] = {"key": _get_name(attempt), "accuracy": manifest.accuracy}
            current["last"] = attempt.step

        replaced = self._find(attempt.step)
        self._bucket.commit(add)
        if replaced:
            self._bucket.delete_checkpoint(replaced)

    def discard(self, attempt: Attempt) -> None:
        """Delete what there is of an attempt."""
        with suppress(OSError):
            self._bucket.delete_checkpoint(_get_name(attempt))

    def remove_leftovers(self) -> None:
        """Delete what killed processes have left."""
        self._bucket.delete_leftovers()

    def delete(self, step: int) -> None:
        """Delete a checkpoint; what cannot be deleted no longer counts."""
        key = self._find(step)
        with suppress(OSError, RunTakenOverError):
            self._bucket.commit(lambda current: current["steps"].pop(str(step), None))
            if key:
                self._bucket.delete_checkpoint(key)

    def move_aside(self, step: int, name: str) -> str:
        """Drop a checkpoint from the list without deleting it; return where it is."""
        key = self._find(step)

        def move(current: Current) -> None:
            current["aside"][f"{name}/{key}"] = current["steps"].pop(str(step))["key"]

        self._bucket.commit(move)
        return f"{self._bucket.location}/{CHECKPOINTS}/{key}"

    # --- read ---

    def describe(self, step: int) -> str:
        """Return where a checkpoint is."""
        return f"{self._bucket.location}/{CHECKPOINTS}/{self._find(step) or step}"

    def list_steps(self) -> list[int]:
        """Return the steps of all checkpoints, as they are now."""
        return sorted(map(int, self._bucket.refresh().get("steps", {})))

    def read_manifest(self, step: int) -> bytes:
        """Return the bytes of a manifest; `FileNotFoundError` if there is none."""
        return bytes(self._store.read(f"{CHECKPOINTS}/{self._find(step)}/{MANIFEST}"))

    def find_orbax(self, step: int) -> None:
        """Return None: Orbax has never written to a bucket here."""

    def has_folder(self, step: int) -> bool:
        """Return whether the checkpoint counts, whole or not."""
        return self._find(step) is not None

    def read_part(self, step: int, part: FilePart, reads: Sequence[tuple[int, memoryview]]) -> None:
        """Fill buffers from an object, each from its offset on.

        Raises:
            OSError: it cannot be read now.
            DamagedFileError: it does not exist, or has another size.
        """
        key = f"{CHECKPOINTS}/{self._find(step)}/{part.name}"
        try:
            info = self._store.stat(key)
            if info.size != part.size:
                raise DamagedFileError(f"{part.name} has {info.size:,} bytes, not {part.size:,}")
            ranges = [(offset, offset + len(view)) for offset, view in reads]
            for (_, view), data in zip(reads, self._store.read_ranges(key, ranges, info.etag), strict=True):
                view[:] = data
        except FileNotFoundError:
            raise DamagedFileError(f"{part.name} is missing") from None

    def _find(self, step: int) -> str | None:
        entry = self._bucket.current.get("steps", {}).get(str(step))
        return str(entry["key"]) if entry else None

    # --- the record that there was a checkpoint ---

    def find_steps(self, *, allow_lost: bool = False) -> list[int]:
        """Return the steps of the run's checkpoints; see `files.find_steps`."""
        steps = files.retry_reading(self.list_steps, str(self._bucket.location))
        if not steps and self.read_record() is not None and not allow_lost:
            raise self.make_lost_error("there is none")
        return steps

    def check_writable(self) -> None:
        """Nothing to do: the lock has been written."""

    def write_record(self, step: int) -> bool:
        """Return True: the commit of a checkpoint records it."""
        return True

    def read_record(self) -> int | None:
        """Return the step of the last checkpoint that was completed; None if there was none."""
        return self._bucket.current.get("last")

    def remove_record(self) -> None:
        """Forget that there was a checkpoint."""
        if self.read_record() is not None:
            self._bucket.commit(partial(dict.update, last=None))

    def make_lost_error(self, state: str) -> UserError:
        """Return the error for a run that had checkpoints, with what has become of them."""
        return UserError(
            f"the run in {self._bucket.location} had a checkpoint of step {self.read_record():,}, but {state}; give "
            "--from-scratch as well to start again at step 0"
        )


def _get_name(attempt: Attempt) -> str:
    return f"{attempt.step}-{attempt.token}"


def _make_key(attempt: Attempt) -> str:
    return f"{CHECKPOINTS}/{_get_name(attempt)}"
