"""Checkpoints: save, list, restore. Orbax writes them, asynchronously and atomically.

A checkpoint is a flat table of named arrays (`params/layers/0/conv/kernel`, ...), the same whatever the pod, so that a
run stopped on one pod goes on on another. The newest few are kept, and the one with the best accuracy.

Orbax reads flipped bits without a word, so the digest of every array is written with it and compared on loading.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
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

T = TypeVar("T")


class DamagedError(UserError):
    """A checkpoint that is there but not whole."""

    def __init__(self, where: Path, why: str) -> None:
        super().__init__(f"checkpoint {where} is damaged: {why}; remove it to go on from the one before it")
        self.where, self.why = where, why


class NotSavedError(Exception):
    """A checkpoint could not be written: the disk is full, or gone, or not ours to write to."""


logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax tells of every file it touches, and of what we tell
DAMAGED = "damaged"
NOTES = ("metrics/metrics", "_CHECKPOINT_METADATA")
DISK_REASONS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO))


class Checkpoints:
    """The checkpoints of one run; a context manager that leaves only once everything is on disk."""

    def __init__(
        self, folder: Path, keep: int = 2, *, read_only: bool = False, about: dict[str, Any] | None = None
    ) -> None:
        """`about`: facts for people, written down beside every checkpoint."""
        self._about = about
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} should be a folder of checkpoints, but it is a file")
        if read_only:
            for step in _without_readable_notes(folder):  # Orbax would not open the folder at all
                raise DamagedError(folder / str(step), "its notes cannot be read")
        else:
            run_on_main_process(lambda: _move_aside(folder, *_without_readable_notes(folder)))
        best = policies.BestN(get_metric_fn=_accuracy, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(max(keep, 1)), best]),
            best_fn=_accuracy,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def steps(self) -> list[int]:
        """Steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of this step is on disk, whole."""
        return (Path(str(self._manager.directory)) / str(step)).is_dir()

    def newest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step of the checkpoint with the best validation accuracy; the newest if none was evaluated."""
        return self._manager.best_step() or self._manager.latest_step()

    def save(self, step: int, state: Any, accuracy: float | None = None) -> None:
        """Starts to write `state` as it is now; returns once it may be changed.

        Raises `NotSavedError` if this one, or the one before it, could not be written; older ones stay whole.
        """
        metrics = None if accuracy is None else {"accuracy": accuracy}
        table = _table(state)
        digests = dict(zip(table, np.asarray(checksum.checksum_arrays(list(table.values()))).tolist(), strict=True))

        def start() -> None:
            self._clear_halves()
            self._manager.save(
                step,
                args=ocp.args.StandardSave(table),
                metrics=metrics,
                force=True,
                custom_metadata={"digests": digests, "about": self._about},
            )

        problems = [problem for work in (self._manager.wait_until_finished, start) if (problem := self._problem(work))]
        if problems:
            raise NotSavedError(problems[-1])

    def wait(self) -> None:
        """Returns once all that was saved is on disk; raises `NotSavedError` if it could not be written."""
        if problem := self._problem(self._manager.wait_until_finished):
            raise NotSavedError(problem)

    def _problem(self, work: Callable[[], Any]) -> str:
        """Does `work`; returns what the disk had against it, if anything, and clears away what was half written."""
        try:
            work()
            return ""
        except (OSError, ValueError) as error:
            reason = next((reason for reason in DISK_REASONS if reason.lower() in str(error).lower()), "")
            if not reason:
                raise
        self._clear_halves()
        return reason

    def _clear_halves(self) -> None:
        """Removes what was half written and takes room, while nothing is being written."""
        if is_main_process():
            for half in Path(str(self._manager.directory)).glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(half, ignore_errors=True)

    def restore(self, step: int, like: T) -> T:
        """The state saved at `step`, structured, typed and sharded as `like`; `DamagedError` if it is not whole."""
        wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _table(like))
        where = Path(str(self._manager.directory)) / str(step)
        try:
            self._check_fits(step, wanted)
            found = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
            expected = self._manager.metadata(step).custom_metadata["digests"]
        except UserError:
            raise
        except Exception:  # Orbax has no list of what it raises on files that are not whole, and raises that too
            raise DamagedError(where, "it cannot be read") from None
        digests = np.asarray(checksum.checksum_arrays(list(found.values()))).tolist()
        for name, one in zip(found, digests, strict=True):
            if expected.get(name) != one:
                raise DamagedError(where, f"{name} is not what was saved")
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in _names(like)])

    def set_aside(self, step: int, name: str = DAMAGED) -> Path:
        """Moves a checkpoint out of the way, to where nothing looks for it but a person; all processes call this."""
        folder = Path(str(self._manager.directory))
        run_on_main_process(lambda: _move_aside(folder, step, name=name))
        self._manager.reload()
        return _aside(folder, step, name)

    def _check_fits(self, step: int, wanted: dict[str, Any]) -> None:
        """Compares names and shapes first: Orbax finds out in the middle of its threads, and they say so on stderr."""
        saved = {name: tuple(a.shape) for name, a in self._manager.item_metadata(step).items()}
        for name, array in wanted.items():
            if saved.get(name) != array.shape:
                found = f"has shape {saved[name]}" if name in saved else "is missing"
                raise UserError(
                    f"checkpoint {step} does not fit the model of this recipe: {name} {found}, wanted {array.shape}"
                )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for work in (self._manager.wait_until_finished, self._manager.close):
            self._problem(work)  # whoever wants to know calls `wait`


def _without_readable_notes(folder: Path) -> list[int]:
    """Steps whose metrics or metadata are no JSON."""

    def readable(path: Path) -> bool:
        try:
            return bool(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return True  # found out, and told, when it is needed
        except (OSError, ValueError):
            return False

    steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.exists() else []
    return [step for step in steps if not all(readable(folder / str(step) / note) for note in NOTES)]


def _move_aside(folder: Path, *steps: int, name: str = DAMAGED) -> None:
    for step in steps:
        target = _aside(folder, step, name)
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        (folder / str(step)).rename(target)


def _aside(folder: Path, step: int, name: str) -> Path:
    return folder.with_name(name) / str(step)


def _accuracy(metrics: Any) -> float:
    return metrics["accuracy"] if metrics else float("-inf")


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]


def _table(tree: Any) -> dict[str, Any]:
    return dict(zip(_names(tree), jax.tree.leaves(tree), strict=True))
