"""Events: what a training tells those who listen, one at a time, in the order of its steps.

A callback is any function of one event. It is called in the first process alone, in the thread that trains, with plain
numbers, so it can change nothing that is learnt. Events of training come one call late, when the devices have done the
next one's work already: listening never stalls them, but a slow callback does.

    start   the run begins, or goes on, at `step`; values: devices, kind
    train   an update was done; values: loss, accuracy, grad_norm, learning_rate, skipped, images_per_s, spent
    eval    the model was evaluated; values: accuracy, accuracy_top5, loss, examples, seconds, run_s
    end     no more will come; values: seconds

A callback that returns True at an `eval` event ends the training there, with a checkpoint, as an accuracy that was
aimed for does. One that raises ends it, too: what was saved before stays, and the same call goes on from there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened in a training after `step` updates, which is epoch `epoch` of its data."""

    kind: str
    step: int
    epoch: float
    values: dict[str, Any]


Callback = Callable[[Event], object]
