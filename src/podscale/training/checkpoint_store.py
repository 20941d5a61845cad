"""Find out where a run's checkpoints are: in its folder, or in the bucket that the folder is a working copy of."""

from pathlib import Path

from podscale.runs.bucket import find_bucket
from podscale.training.checkpoint_bucket import CheckpointBucket
from podscale.training.checkpoint_folder import CheckpointFolder

CheckpointStore = CheckpointFolder | CheckpointBucket


def open_checkpoint_store(folder: Path) -> CheckpointStore:
    """Return the store of a run's checkpoints.

    Args:
        folder: the run's folder of checkpoints.
    """
    bucket = find_bucket(folder.parent)
    return CheckpointBucket(bucket) if bucket else CheckpointFolder(folder.absolute())
