"""Events that a training passes to its reporters, one at a time, in the order of its steps.

A reporter is any function of one event; callbacks of the user are reporters. Those of the user are called only in the
main process, in the thread that trains, with plain numbers, so they cannot change what is learnt. Events of training
come one call late, when the devices already work on the next one: reading the numbers never stalls the devices, but a
slow reporter does.

    start       the run begins, or resumes, at `step`; values: devices, kind
    train       an update was done; values: loss, accuracy, grad_norm, learning_rate, skipped, images_per_s, spent
    eval        the model was evaluated; values: accuracy, accuracy_top5, loss, examples, seconds, run_s
    save        a checkpoint is being written, or failed to be; values: none
    straggler   the others wait for a process; values: which, and why
    bad images  images cannot be read; values: messages
    warning     something went wrong, and training goes on; values: message
    end         the last event; values: seconds

A reporter that returns True at an `eval` event ends the training there, with a checkpoint: so does a stop condition. A
callback that raises ends it, too: earlier checkpoints stay, and the same call resumes from them. A callback's `kinds`
are the kinds of events that it gets (`METRICS` by default), and with `writes = True` an error of the disk, or a
`ReporterError`, becomes a warning. If it has a `close`, that is called in the end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from podscale.config.json_types import JsonObject

KINDS = ("start", "train", "eval", "save", "straggler", "bad images", "warning", "end")
METRICS = (
    "start",
    "train",
    "eval",
    "straggler",
    "end",
)  # the kinds that journals and trackers get; callbacks by default


@dataclass(frozen=True)
class Event:
    """One event of a training.

    Args:
        kind: one of `KINDS`.
        step: updates done so far.
        epoch: the same in passes over the training data.
        values: what the kind of event carries; see the module.
        details: what else there is to know, for the reporters of this package.

    >>> Event("eval", 34, 3.0, {"accuracy": 0.91}).values["accuracy"]
    0.91
    """

    kind: str
    step: int
    epoch: float
    values: JsonObject
    details: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


Callback = Callable[[Event], object]


class ReporterError(Exception):
    """A reporter that writes could not do its work; training goes on with a warning.

    Args:
        source: what failed, such as "tracker mlflow"; warnings of the same source are not repeated at every event.
        reason: why.

    >>> print(ReporterError("tracker mlflow", "connection refused"))
    tracker mlflow failed: connection refused
    """

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source} failed: {reason}")
        self.source = source
