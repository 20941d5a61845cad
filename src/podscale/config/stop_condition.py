"""StopCondition: the accuracy at which a training stops; the paper's headline is the time it takes to get there."""

from dataclasses import dataclass
from types import MappingProxyType

from podscale.config.json_types import JsonObject
from podscale.errors import UserError

METRICS = MappingProxyType({"accuracy": "accuracy", "top5": "accuracy_top5"})


@dataclass(frozen=True)
class StopCondition:
    """Stops training at the first evaluation whose `metric` reaches `value`.

    Args:
        metric: "accuracy" or "accuracy_top5".
        value: share of the validation images, between 0 and 1.

    >>> StopCondition.parse("accuracy=0.763").is_reached({"accuracy": 0.77})
    True
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "StopCondition":
        """Return the condition that a text such as "accuracy=0.763" stands for.

        Raises:
            UserError: the text has another form, or the value can never be reached.
        """
        metric, _, value = text.partition("=")
        try:
            condition = cls(METRICS[metric], float(value))
        except (KeyError, ValueError):
            raise UserError(f"--until takes accuracy=NUMBER or top5=NUMBER, not {text!r}") from None
        if not 0 <= condition.value <= 1:
            raise UserError(f"--until {text} can never be reached: an accuracy is between 0 and 1")
        return condition

    def is_reached(self, evaluation: JsonObject) -> bool:
        """Return whether an evaluation's values satisfy the condition."""
        return bool(evaluation[self.metric] >= self.value)
