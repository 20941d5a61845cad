"""Checkpoints: save, list, restore. Orbax writes them, asynchronously and atomically.

A checkpoint is a flat table of named arrays (`params/layers/0/conv/kernel`, ...), the same whatever the pod, so that a
run stopped on one pod goes on on another. The newest few are kept, and the one with the best accuracy.
"""

import logging
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from podscale.errors import UserError

T = TypeVar("T")

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of every file it touches


class Checkpoints:
    """The checkpoints of one run; a context manager that leaves only once everything is on disk."""

    def __init__(
        self, folder: Path, keep: int = 2, *, read_only: bool = False, about: dict[str, Any] | None = None
    ) -> None:
        """`about`: facts for people, written down beside every checkpoint."""
        self._about = about
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} should be a folder of checkpoints, but it is a file")
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

    def newest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step of the checkpoint with the best validation accuracy; the newest if none was evaluated."""
        return self._manager.best_step() or self._manager.latest_step()

    def save(self, step: int, state: Any, accuracy: float | None = None) -> None:
        """Starts to write `state` as it is now; returns once it may be changed."""
        metrics = None if accuracy is None else {"accuracy": accuracy}
        self._manager.save(
            step,
            args=ocp.args.StandardSave(_table(state)),
            metrics=metrics,
            force=True,
            custom_metadata=self._about,
        )

    def restore(self, step: int, like: T) -> T:
        """The state saved at `step`, with the structure, types and sharding of `like`."""
        wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _table(like))
        try:
            self._check_fits(step, wanted)
            found = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except (ValueError, KeyError, OSError, AttributeError):
            where = Path(str(self._manager.directory)) / str(step)
            raise UserError(f"checkpoint {where} is damaged; remove it to go on from the one before it") from None
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in _names(like)])

    def _check_fits(self, step: int, wanted: dict[str, Any]) -> None:
        """Compares names and shapes first: Orbax finds out in the middle of its threads, and they say so on stderr."""
        saved = {name: tuple(a.shape) for name, a in self._manager.item_metadata(step).items()}
        for name, array in wanted.items():
            if saved.get(name) != array.shape:
                found = f"has shape {saved[name]}" if name in saved else "is missing"
                raise UserError(
                    f"checkpoint {step} does not fit the model of this recipe: {name} {found}, wanted {array.shape}"
                )

    def wait(self) -> None:
        """Returns once all that was saved is on disk."""
        self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _accuracy(metrics: Any) -> float:
    return metrics["accuracy"] if metrics else float("-inf")


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]


def _table(tree: Any) -> dict[str, Any]:
    return dict(zip(_names(tree), jax.tree.leaves(tree), strict=True))
