"""Checkpoints: save, list, restore. They are written beside the training, and appear only once they are complete.

A checkpoint is a flat table of named arrays (`params/layers/0/conv/kernel`, ...), the same whatever the pod, so that a
run stopped on one pod resumes on another. The newest few are kept, and the one with the best accuracy.

The checksum of every array is saved with it and compared when it is restored; so is the step, because a checkpoint that
was copied under another number would train other batches. Only what is proven damaged is moved aside (see
`podscale.training.checkpoint.files`).
"""

import json
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from podscale.errors import UserError
from podscale.parallel import checksum
from podscale.processes import group
from podscale.processes.group import is_main_process, run_on_main_process
from podscale.training.checkpoint import files
from podscale.training.checkpoint import orbax as orbax_checkpoint
from podscale.training.checkpoint import save as saving
from podscale.training.checkpoint.folder import Attempt, DamagedFileError
from podscale.training.checkpoint.format import InvalidManifestError, Manifest, find_pieces
from podscale.training.checkpoint.store import CheckpointStore, open_checkpoint_store

T = TypeVar("T")


class DamagedCheckpointError(UserError):
    """A checkpoint exists, but is not whole."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"checkpoint {path} is damaged: {reason}; remove it to resume from the previous one")
        self.path, self.reason = path, reason


class CheckpointNotSavedError(Exception):
    """A checkpoint could not be written: the disk is full, gone or not writable."""


class LastCheckpointNotSavedError(UserError):
    """A run has come to its end, but its last state could not be written; `summary` is its result all the same."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step, self.summary = step, dict[str, Any]()


DAMAGED = "damaged"
INVALID_METADATA = "its metadata is not valid JSON"
OPEN_TIMEOUT_S = 600.0  # in which the main process must have listed the checkpoints


class Checkpoints:
    """The checkpoints of one run; a context manager that exits only once everything is on disk."""

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        *,
        read_only: bool = False,
        about: dict[str, Any] | None = None,
        check_owner: Callable[[], None] | None = None,
    ) -> None:
        """Open the folder; it is created unless it is only read.

        Args:
            folder: the run's folder of checkpoints.
            keep: how many of the newest checkpoints to keep, besides the best.
            read_only: change nothing on disk; a damaged checkpoint raises instead of being moved aside.
            about: facts for people, written beside every checkpoint.
            check_owner: see `open_checkpoint_store`.

        Raises:
            UserError: the folder cannot be read or, unless it is only read, written.
        """
        self._folder, self._store = folder.absolute(), open_checkpoint_store(folder, check_owner)
        self._about, self._keep, self._saves, self._token = about, max(keep, 1), 0, ""
        self.moved = dict[int, Path | str]()  # damaged checkpoints that the main process moved, and where they are now
        self.reasons = dict[int, str]()  # what was wrong with them
        self.problem = ""  # why a checkpoint could not be written the last time
        self._accuracies = dict[int, float | None]()  # of every checkpoint that is complete
        self._pending: saving.BackgroundSave | None = None
        self._unrecorded: int | None = None  # the step of a checkpoint that may still be incomplete
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} should be a folder of checkpoints, but it is a file")
        if read_only:
            self._accuracies, invalid = self._list()
            for step, reason in invalid.items():
                raise DamagedCheckpointError(self._store.describe(step), reason)
        else:
            run_on_main_process(self._prepare_folder)
            self._share_list()

    def _prepare_folder(self) -> None:
        """Remove what is incomplete, and move checkpoints aside whose metadata is invalid."""
        self._store.check_writable()
        if steps := files.retry_reading(self._store.list_steps, self._folder):
            self._store.write_record(steps[-1])
        self._store.remove_leftovers()
        self._accuracies, self.reasons = self._list()
        for step in self.reasons:
            self.moved[step] = self._store.move_aside(step, DAMAGED)

    def _share_list(self) -> None:
        """Share the main process's list of checkpoints: a shared folder may look different in each for a moment."""
        exchange = group.open_exchange()
        if exchange.process == 0:
            exchange.decide(json.dumps([secrets.token_hex(4), list(self._accuracies.items())]))
        self._token, rows = json.loads(exchange.await_decision(OPEN_TIMEOUT_S))
        self._accuracies = dict(rows)

    def _list(self) -> tuple[dict[int, float | None], dict[int, str]]:
        """Return the accuracy of each checkpoint, and what is wrong with those that cannot be listed."""
        accuracies, invalid = dict[int, float | None](), dict[int, str]()
        for step in files.retry_reading(self._store.list_steps, self._folder):
            try:
                read = partial(self._read_accuracy, step)
                accuracies[step] = files.retry_reading(read, self._store.describe(step))
            except InvalidManifestError as error:
                invalid[step] = str(error)
            except ValueError:
                invalid[step] = INVALID_METADATA
        return accuracies, invalid

    def _read_accuracy(self, step: int) -> float | None:
        try:
            return Manifest.from_bytes(self._store.read_manifest(step)).accuracy
        except (FileNotFoundError, NotADirectoryError):
            path = self._store.find_orbax(step)
            return orbax_checkpoint.read_accuracy(path) if path else None
        except IsADirectoryError:
            raise InvalidManifestError(INVALID_METADATA) from None

    def steps(self) -> list[int]:
        """Steps that can be restored, oldest first."""
        return sorted(self._accuracies)

    def is_saved(self, step: int) -> bool:
        """Whether the whole checkpoint of this step is on disk."""
        save = self._pending
        return step in self._accuracies or (save is not None and save.contents.step == step and save.is_complete())

    def newest(self) -> int | None:
        """The step of the newest checkpoint."""
        return max(self._accuracies, default=None)

    def best(self) -> int | None:
        """The step of the checkpoint with the best validation accuracy; the newest if none was evaluated."""
        return _find_best(self._accuracies) or self.newest()

    # --- save ---

    def save(self, step: int, state: Any, accuracy: float | None = None) -> None:
        """Start to write `state` as it is now; returns once the state may change.

        All processes call this, with the same arrays. In each of them an array must be whole.

        Raises:
            CheckpointNotSavedError: the checkpoint before it could not be written. Older ones stay whole.
        """
        previous, reason = self._pending, self._finish()
        arrays, exchange = _flatten(state), group.open_exchange()
        self._saves += 1
        contents = saving.describe_contents(step, arrays, accuracy, self._about, exchange.processes)
        self._pending = saving.BackgroundSave(
            self._store,
            Attempt(step, f"{self._token}-{self._saves}"),
            contents,
            saving.copy_to_host(contents, arrays, exchange.process),
            exchange,
            _find_expired(self._accuracies | {step: accuracy}, self._keep),
        )
        self._pending.start(previous)
        self._unrecorded = step
        if reason:
            raise CheckpointNotSavedError(reason)

    def _finish(self) -> str:
        """Wait for the checkpoint that is being written, if there is one; return why it could not be, or ""."""
        save = self._pending
        if save is None:
            return ""
        reason = save.wait()
        if reason:
            self.problem = reason
        else:
            self._accuracies[save.contents.step] = save.contents.accuracy
            for step in save.expired:
                self._accuracies.pop(step, None)
        return reason

    def record_completed(self) -> None:
        """Record that there is a checkpoint, once the one that was saved last is complete; cheap to call often."""
        if self._unrecorded is None or not is_main_process():
            return
        if self.is_saved(self._unrecorded) and self._store.write_record(self._unrecorded):
            self._unrecorded = None

    def check_nothing_lost(self) -> None:
        """Refuse to start at step 0 if the run had checkpoints; all processes call this.

        Raises:
            UserError: it had, and all of them have turned out damaged.
        """

        def check() -> None:
            if self._store.read_record() is not None:
                where = self._folder.with_name(DAMAGED)
                raise self._store.make_lost_error(f"none is intact, and the damaged ones are in {where}")

        run_on_main_process(check)

    def forget(self) -> None:
        """Forget that there were checkpoints: the run starts at step 0 on purpose; all processes call this."""
        run_on_main_process(self._store.remove_record)

    def wait(self) -> None:
        """Wait until every saved checkpoint is on disk.

        Raises:
            CheckpointNotSavedError: one could not be written.
        """
        reason = self._finish()
        self._join()
        if reason:
            raise CheckpointNotSavedError(reason)
        self.record_completed()

    # --- restore ---

    def restore(self, step: int, like: T) -> T:
        """Return the state saved at `step`, with the structure, types and shardings of `like`.

        Raises:
            DamagedCheckpointError: the checkpoint is not whole, or is that of another step.
            UserError: it does not fit `like`, or cannot be read now.
        """
        target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _flatten(like))
        path = self._store.describe(step)
        try:
            manifest = files.retry_reading(partial(self._read_manifest, step), path)
            arrays = self._restore_orbax(step, target) if manifest is None else self._read(step, manifest, target)
        except (InvalidManifestError, DamagedFileError) as error:
            raise DamagedCheckpointError(path, str(error)) from None
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in _name_leaves(like)])

    def read_about(self, step: int) -> object:
        """Return the facts that were written beside a checkpoint; None for one of Orbax's."""
        manifest = files.retry_reading(partial(self._read_manifest, step), self._store.describe(step))
        return manifest.about if manifest else None

    def _read_manifest(self, step: int) -> Manifest | None:
        """Return a checkpoint's manifest; None if Orbax wrote it."""
        try:
            return Manifest.from_bytes(self._store.read_manifest(step))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if self._store.find_orbax(step):
                return None
            if not self._store.has_folder(step):
                raise
            raise DamagedFileError("its manifest is missing") from None

    def _read(self, step: int, manifest: Manifest, target: dict[str, Any]) -> dict[str, Any]:
        """Return arrays of a checkpoint, verified, where the target's shardings place them."""
        _check_step(step, manifest.step)
        orbax_checkpoint.check_fits(step, {spec.name: spec.shape for spec in manifest.arrays}, target)
        specs = {spec.name: spec for spec in manifest.arrays}
        for name, array in target.items():
            if specs[name].dtype != np.dtype(array.dtype).name:
                raise UserError(
                    f"checkpoint {step} does not fit the model of this recipe: {name} has type {specs[name].dtype}, "
                    f"wanted {np.dtype(array.dtype).name}"
                )
        read = partial(_read_values, self._store, manifest, target)
        return _place(files.retry_reading(read, self._store.describe(step)), target)

    def _restore_orbax(self, step: int, target: dict[str, Any]) -> dict[str, Any]:
        try:
            arrays, metadata = orbax_checkpoint.restore_arrays(self._folder / str(step), target)
        except ValueError as error:
            raise DamagedFileError(str(error)) from None
        _check_step(step, metadata.get("step", step))  # older ones do not have it
        digests = np.asarray(checksum.checksum_arrays(list(arrays.values()))).tolist()
        _check_digests(dict(zip(arrays, digests, strict=True)), metadata["digests"])
        return arrays

    def move_aside(self, step: int, name: str = DAMAGED) -> Path | str:
        """Move a checkpoint to a folder that no run reads; all processes call this.

        Returns:
            Its new path, in the main process; elsewhere the folder that it is in.
        """
        moved: list[Path | str] = [self._folder.with_name(name)]
        run_on_main_process(lambda: moved.append(self._store.move_aside(step, name)))
        self._accuracies.pop(step, None)
        return moved[-1]

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._finish()  # callers that need to know whether it worked call `wait`
        except Exception:
            if kind is None:
                raise
        finally:
            self._join()
        self.record_completed()

    def _join(self) -> None:
        """Wait until nothing more is written or deleted."""
        if self._pending:
            self._pending.join()
            self._pending = None


# --- which to keep ---------------------------------------------------------------------------------------------------


def _find_best(accuracies: Mapping[int, float | None]) -> int | None:
    """Return the step with the best accuracy, the newest of several; None if there was no evaluation."""
    evaluated = [(accuracy, step) for step, accuracy in accuracies.items() if accuracy is not None]
    return max(evaluated)[1] if evaluated else None


def _find_expired(accuracies: Mapping[int, float | None], keep: int) -> list[int]:
    """Return the steps that are neither among the newest nor the best.

    >>> _find_expired({1: None, 2: 0.9, 3: 0.8, 4: None, 5: 0.7}, keep=2)
    [1, 3]
    """
    steps = sorted(accuracies)
    return [step for step in steps[:-keep] if step != _find_best(accuracies)]


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_values(store: CheckpointStore, manifest: Manifest, names: Mapping[str, Any]) -> dict[str, NDArray]:
    """Return the arrays with these names, after comparing their checksums."""
    buffers = {i: np.empty(spec.size, np.uint8) for i, spec in enumerate(manifest.arrays) if spec.name in names}
    start = 0
    for part in manifest.files:
        reads, offset = list[tuple[int, memoryview]](), 0
        for piece in find_pieces(manifest.arrays, range(start, start + part.size)):
            if piece.array in buffers:
                reads.append((offset, buffers[piece.array].data[piece.start : piece.stop]))
            offset += piece.stop - piece.start
        store.read_part(manifest.step, part, reads)
        start += part.size
    values, digests, expected = dict[str, NDArray](), dict[str, int](), dict[str, int]()
    for number, buffer in buffers.items():
        spec = manifest.arrays[number]
        flat = buffer.view(jax.numpy.dtype(spec.dtype))
        digests[spec.name], expected[spec.name] = checksum.checksum_host_array(flat), manifest.digests[number]
        values[spec.name] = flat.reshape(spec.shape)
    _check_digests(digests, expected)
    return values


def _check_step(step: int, saved_step: int) -> None:
    if saved_step != step:
        raise DamagedFileError(f"it was saved after step {saved_step}, not after step {step}")


def _check_digests(digests: Mapping[str, int], expected: Mapping[str, int]) -> None:
    for name, digest in digests.items():
        if expected.get(name) != digest:
            raise DamagedFileError(f"{name} is not what was saved")


def _place(values: Mapping[str, NDArray], target: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return arrays on the devices that the target's shardings name; each process places what it holds of them."""
    shardings = {name: array.sharding for name, array in target.items()}
    local = {name: values[name] for name, sharding in shardings.items() if sharding.is_fully_addressable}
    placed = jax.device_put(local, {name: shardings[name] for name in local})
    for name in shardings.keys() - local.keys():
        host = values[name]
        placed[name] = jax.make_array_from_callback(host.shape, shardings[name], host.__getitem__)
    return dict(placed)


def _name_leaves(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]


def _flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name, such as `params/layers/0/conv/kernel`."""
    return dict(zip(_name_leaves(tree), jax.tree.leaves(tree), strict=True))
