"""Find out where a run's checkpoints are: in its folder, or in the bucket that the folder is a working copy of."""

from collections.abc import Callable
from pathlib import Path

from podscale.runs.bucket import find_bucket
from podscale.training.checkpoint.bucket import CheckpointBucket
from podscale.training.checkpoint.folder import CheckpointFolder

CheckpointStore = CheckpointFolder | CheckpointBucket


def open_checkpoint_store(folder: Path, check_owner: Callable[[], None] | None = None) -> CheckpointStore:
    """Return the store of a run's checkpoints.

    Args:
        folder: the run's folder of checkpoints.
        check_owner: called before anything in the folder is changed; raises if it has become that of another run. A
            bucket checks that itself.
    """
    bucket = find_bucket(folder.parent)
    return CheckpointBucket(bucket) if bucket else CheckpointFolder(folder.absolute(), check_owner)
