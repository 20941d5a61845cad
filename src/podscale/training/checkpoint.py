"""Checkpoints: save, list, restore. Orbax writes them, asynchronously and atomically.

A checkpoint is a flat table of named arrays (`params/layers/0/conv/kernel`, ...), the same whatever the pod, so that a
run stopped on one pod resumes on another. The newest few are kept, and the one with the best accuracy.

Orbax does not detect flipped bits, so the checksum of every array is saved with it and compared when it is restored; so
is the step, because a checkpoint that was copied under another number would train other batches. Only what is proven
damaged is moved aside (see `podscale.training.checkpoint_files`).
"""

import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from podscale.errors import UserError
from podscale.parallel import checksum
from podscale.processes.group import is_main_process, run_on_main_process
from podscale.processes.heartbeat import CollectiveFailedError
from podscale.training import checkpoint_files as files

T = TypeVar("T")


class DamagedCheckpointError(UserError):
    """A checkpoint exists, but is not whole."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} is damaged: {reason}; remove it to go on from the one before it")
        self.path, self.reason = path, reason


class CheckpointNotSavedError(Exception):
    """A checkpoint could not be written: the disk is full, gone or not writable."""


class LastCheckpointNotSavedError(UserError):
    """A run has come to its end, but its last state could not be written; `summary` is its result all the same."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step, self.summary = step, dict[str, Any]()


logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs every file it touches, and errors that we report
DAMAGED = "damaged"
INVALID_METADATA = "its metadata is not valid JSON"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE, errno.ENFILE)
DISK_REASONS = tuple(map(os.strerror, DISK_ERRORS))


class Checkpoints:
    """The checkpoints of one run; a context manager that exits only once everything is on disk."""

    def __init__(
        self, folder: Path, keep: int = 2, *, read_only: bool = False, about: dict[str, Any] | None = None
    ) -> None:
        """Open the folder; it is created unless it is only read.

        Args:
            folder: the run's folder of checkpoints.
            keep: how many of the newest checkpoints to keep, besides the best.
            read_only: change nothing on disk; a damaged checkpoint raises instead of being moved aside.
            about: facts for people, written beside every checkpoint.

        Raises:
            UserError: the folder cannot be read or, unless it is only read, written.
        """
        self._about = about
        self.moved = dict[int, Path]()  # damaged checkpoints that the main process moved aside, and where they are now
        self.problem = ""  # why a checkpoint could not be written the last time
        self._unrecorded: int | None = None  # the step of a checkpoint that may still be incomplete
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} should be a folder of checkpoints, but it is a file")
        if read_only:
            for step in files.retry_reading(partial(files.find_invalid_steps, folder), folder):
                raise DamagedCheckpointError(folder / str(step), INVALID_METADATA)
        else:
            run_on_main_process(lambda: self._prepare_folder(folder))
        best = policies.BestN(get_metric_fn=_get_accuracy, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(max(keep, 1)), best]),
            best_fn=_get_accuracy,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def _prepare_folder(self, folder: Path) -> None:
        """Move checkpoints aside whose metadata is invalid, with which Orbax would not open the folder at all."""
        files.check_writable(folder)
        if steps := files.list_steps(folder):
            files.write_record(folder, steps[-1])
        for step in files.retry_reading(partial(files.find_invalid_steps, folder), folder):
            self.moved[step] = files.move_aside(folder, step, DAMAGED)

    @property
    def _folder(self) -> Path:
        return Path(str(self._manager.directory))

    def steps(self) -> list[int]:
        """Steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    def is_saved(self, step: int) -> bool:
        """Whether the whole checkpoint of this step is on disk."""
        return (self._folder / str(step)).is_dir()

    def newest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step of the checkpoint with the best validation accuracy; the newest if none was evaluated."""
        return self._manager.best_step() or self._manager.latest_step()

    def save(self, step: int, state: Any, accuracy: float | None = None) -> None:
        """Start to write `state` as it is now; returns once the state may change.

        Raises:
            CheckpointNotSavedError: this checkpoint, or the one before it, could not be written. Older ones stay whole.
        """
        metrics = None if accuracy is None else {"accuracy": accuracy}
        arrays = _flatten(state)
        digests = dict(zip(arrays, np.asarray(checksum.checksum_arrays(list(arrays.values()))).tolist(), strict=True))

        def start() -> None:
            self._remove_partial_writes()
            self._manager.save(
                step,
                args=ocp.args.StandardSave(arrays),
                metrics=metrics,
                force=True,
                custom_metadata={"step": step, "digests": digests, "about": self._about},
            )
            self._unrecorded = step

        reasons = [reason for work in (self._manager.wait_until_finished, start) if (reason := self._attempt(work))]
        if reasons:
            raise CheckpointNotSavedError(reasons[-1])

    def record_completed(self) -> None:
        """Record that there is a checkpoint, once the one that was saved last is complete; cheap to call often."""
        if self._unrecorded is None or not is_main_process():
            return
        with suppress(OSError):
            if self.is_saved(self._unrecorded) and files.write_record(self._folder, self._unrecorded):
                self._unrecorded = None

    def check_nothing_lost(self) -> None:
        """Refuse to start at step 0 if the run had checkpoints; all processes call this.

        Raises:
            UserError: it had, and all of them have turned out damaged.
        """

        def check() -> None:
            if files.read_record(self._folder) is not None:
                where = self._folder.with_name(DAMAGED)
                raise files.make_lost_error(self._folder, f"none is whole, and what was damaged lies in {where}")

        run_on_main_process(check)

    def forget(self) -> None:
        """Forget that there were checkpoints: the run starts at step 0 on purpose; all processes call this."""
        run_on_main_process(lambda: files.remove_record(self._folder))

    def wait(self) -> None:
        """Wait until every saved checkpoint is on disk.

        Raises:
            CheckpointNotSavedError: one could not be written.
        """
        if reason := self._attempt(self._manager.wait_until_finished):
            raise CheckpointNotSavedError(reason)
        self.record_completed()

    def _attempt(self, work: Callable[[], Any]) -> str:
        """Do `work`. If the disk fails, remove what was partly written and return the reason; otherwise return "".

        Raises:
            CollectiveFailedError: it failed otherwise, and there are other processes, one of which may be gone.
        """
        try:
            work()
            return ""
        except Exception as error:  # Orbax does not document what it raises if a process dies
            reason = _find_disk_reason(error)
            if not reason and jax.process_count() > 1:
                raise CollectiveFailedError(f"cannot save together: {error}") from error
            if not reason:
                raise
        self.problem = reason
        self._remove_partial_writes()
        return reason

    def _remove_partial_writes(self) -> None:
        """Remove partly written checkpoints, which take disk space; call it while nothing is being written."""
        if is_main_process():
            for partial_write in self._folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(partial_write, ignore_errors=True)

    def restore(self, step: int, like: T) -> T:
        """Return the state saved at `step`, with the structure, types and shardings of `like`.

        Raises:
            DamagedCheckpointError: the checkpoint is not whole, or is that of another step.
            UserError: it does not fit `like`, or cannot be read now.
        """
        target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _flatten(like))
        path = self._folder / str(step)
        arrays, metadata = self._read(step, target)
        saved_step, expected = metadata.get("step", step), metadata["digests"]  # older checkpoints do not have it
        if saved_step != step:
            raise DamagedCheckpointError(path, f"it was saved after step {saved_step}, not after step {step}")
        digests = np.asarray(checksum.checksum_arrays(list(arrays.values()))).tolist()
        for name, digest in zip(arrays, digests, strict=True):
            if expected.get(name) != digest:
                raise DamagedCheckpointError(path, f"{name} is not what was saved")
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in _name_leaves(like)])

    def _read(self, step: int, target: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return arrays and metadata of a checkpoint, whose bytes are all read first: that shows what can be read.

        Several processes read together, so that none of them can try again alone once the library has started.
        """
        path = self._folder / str(step)
        delays = list(files.RETRY_DELAYS_S) if jax.process_count() == 1 else []
        while True:
            files.retry_reading(partial(files.read_every_byte, path), path)
            try:
                self._check_fits(step, target)
                arrays = self._manager.restore(step, args=ocp.args.StandardRestore(target))
                metadata = self._manager.metadata(step).custom_metadata
                if isinstance(metadata["digests"], dict):
                    return arrays, metadata
            except (UserError, MemoryError, jax.errors.JaxRuntimeError):
                raise
            except Exception as error:  # Orbax does not document what it raises on damaged files
                if problem := files.find_read_problem(error):
                    if not delays:
                        raise files.UnreadableCheckpointError(path, problem) from None
                    time.sleep(delays.pop(0))
                    continue
            files.retry_reading(partial(files.read_every_byte, path), path)
            raise DamagedCheckpointError(path, "it cannot be read")

    def move_aside(self, step: int, name: str = DAMAGED) -> Path:
        """Move a checkpoint to a folder that no run reads; all processes call this.

        Returns:
            Its new path, in the main process; elsewhere the folder that it is in.
        """
        moved = [self._folder.with_name(name)]
        run_on_main_process(lambda: moved.append(files.move_aside(self._folder, step, name)))
        self._manager.reload()
        return moved[-1]

    def _check_fits(self, step: int, target: dict[str, Any]) -> None:
        """Compare names and shapes first: Orbax fails in the middle of its threads, which then print to stderr."""
        saved = {name: tuple(a.shape) for name, a in self._manager.item_metadata(step).items()}
        for name, array in target.items():
            if saved.get(name) != array.shape:
                problem = f"has shape {saved[name]}" if name in saved else "is missing"
                raise UserError(
                    f"checkpoint {step} does not fit the model of this recipe: {name} {problem}, wanted {array.shape}"
                )

    def __enter__(self) -> "Checkpoints":
        self._late_writes = LateWrites()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            for work in (self._manager.wait_until_finished, self._manager.close):
                self._attempt(work)  # callers that need to know whether it worked call `wait`
            self.record_completed()
        finally:
            self._late_writes.restore()


class LateWrites:
    """Keeps Python from printing the errors of writes that end after one of them has failed, on a full disk.

    Orbax has closed its event loop by then, and nobody waits for them. The failure itself is raised, and reported once.
    """

    def __init__(self) -> None:
        self._excepthook, self._unraisablehook = sys.excepthook, sys.unraisablehook
        sys.excepthook, sys.unraisablehook = self._handle_exception, self._handle_unraisable
        logging.getLogger("asyncio").addFilter(_is_no_disk_failure)  # it may log them when all of this is over

    def restore(self) -> None:
        """Let Python print everything again."""
        sys.excepthook, sys.unraisablehook = self._excepthook, self._unraisablehook

    def _handle_exception(self, kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        if not _is_late_write(error):
            self._excepthook(kind, error, trace)

    def _handle_unraisable(self, unraisable: Any) -> None:
        if not _is_late_write(unraisable.exc_value):
            self._unraisablehook(unraisable)


def _is_late_write(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def _is_no_disk_failure(record: logging.LogRecord) -> bool:
    """Return whether to log what asyncio reports: not an exception that nobody has waited for, if it is a disk's."""
    error = record.exc_info[1] if record.exc_info else None
    return not (error and _find_disk_reason(error) and "never retrieved" in record.getMessage())


def _find_disk_reason(error: BaseException) -> str:
    return next((reason for reason in DISK_REASONS if reason.lower() in str(error).lower()), "")


def _get_accuracy(metrics: Any) -> float:
    return metrics["accuracy"] if metrics else float("-inf")


def _name_leaves(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]


def _flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name, such as `params/layers/0/conv/kernel`."""
    return dict(zip(_name_leaves(tree), jax.tree.leaves(tree), strict=True))
