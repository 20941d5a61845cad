"""Until: the accuracy that a training aims for; the paper's headline is the time it takes to get there."""

from dataclasses import dataclass
from typing import Any

from podscale.errors import UserError

METRICS = {"accuracy": "accuracy", "top5": "accuracy_top5"}


@dataclass(frozen=True)
class Until:
    """Training stops at the first evaluation whose `metric` reaches `value`.

    >>> Until.parse("accuracy=0.763").reached({"accuracy": 0.77})
    True
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Until":
        """From "accuracy=0.763"."""
        metric, _, value = text.partition("=")
        try:
            until = cls(METRICS[metric], float(value))
        except (KeyError, ValueError):
            raise UserError(f"--until takes accuracy=NUMBER or top5=NUMBER, not {text!r}") from None
        if not 0 <= until.value <= 1:
            raise UserError(f"--until {text} can never be reached: an accuracy is between 0 and 1")
        return until

    def reached(self, found: dict[str, Any]) -> bool:
        """Whether an evaluation reaches it."""
        return bool(found[self.metric] >= self.value)
