"""Events that a training passes to callbacks, one at a time, in the order of its steps.

A callback is any function of one event. It is called only in the main process, in the thread that trains, with plain
numbers, so it cannot change what is learnt. Events of training come one call late, when the devices already work on the
next one: reading the numbers never stalls the devices, but a slow callback does.

    start   the run begins, or resumes, at `step`; values: devices, kind
    train   an update was done; values: loss, accuracy, grad_norm, learning_rate, skipped, images_per_s, spent
    eval    the model was evaluated; values: accuracy, accuracy_top5, loss, examples, seconds, run_s
    end     the last event; values: seconds

A callback that returns True at an `eval` event ends the training there, with a checkpoint, as a stop condition does. A
callback that raises ends it, too: earlier checkpoints stay, and the same call resumes from them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One event of a training.

    Args:
        kind: "start", "train", "eval" or "end".
        step: updates done so far.
        epoch: the same in passes over the training data.
        values: what the kind of event carries; see the module.

    >>> Event("eval", 34, 3.0, {"accuracy": 0.91}).values["accuracy"]
    0.91
    """

    kind: str
    step: int
    epoch: float
    values: dict[str, Any]


Callback = Callable[[Event], object]
