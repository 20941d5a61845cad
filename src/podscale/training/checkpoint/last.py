"""Wait until the last state of a run is on disk, which may be full."""

import time
from collections.abc import Callable, Iterator

from podscale.errors import describe_start
from podscale.processes import group
from podscale.storage.cloud_errors import is_refusal
from podscale.training.checkpoint.checkpoints import CheckpointNotSavedError, Checkpoints, LastCheckpointNotSavedError
from podscale.training.reporters.emitter import Emitter

RETRY_S = 2.0  # between attempts
MAX_WAIT_S = 1800.0  # where plan.timeout_s is 0


def save_last(
    save: Callable[[], None],
    step: int,
    checkpoints: Checkpoints,
    events: Emitter,
    stop_requests: Iterator[bool],
    record_progress: Callable[[], None],
) -> None:
    """Return once the state after the last step is on disk.

    Each attempt is progress, which is recorded: one that never ends, on a disk that hangs, is the watchdog's to end.

    Waits for a full disk, as long as for a stuck run (`plan.timeout_s`), or until the run is asked to stop. It does not
    wait for a store that refuses access, for example because credentials have expired.

    Raises:
        LastCheckpointNotSavedError: in all processes; it never got there.
    """
    limit_s = events.plan.options.timeout_s or MAX_WAIT_S
    start_s = time.monotonic()
    while True:
        record_progress()
        with events.tolerate(CheckpointNotSavedError):
            checkpoints.wait()
        waited_s = time.monotonic() - start_s
        problem = checkpoints.problem or "it is not there"
        is_over = waited_s > limit_s or is_refusal(problem)
        status = group.broadcast_int(2 * checkpoints.is_saved(step) + is_over)  # the main process decides
        if status > 1:
            return
        if status or next(stop_requests):
            advice = "" if is_refusal(problem) else "free space, or make it writable, and "
            raise LastCheckpointNotSavedError(
                f"{events.run.where} did not accept the last checkpoint for {waited_s:.0f} s: {problem}; {advice}"
                f"run the same command again: it {describe_start(checkpoints.newest() or 0)}",
                step,
            )
        time.sleep(RETRY_S)
        with events.tolerate(CheckpointNotSavedError):
            save()
