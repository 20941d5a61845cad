"""Count consecutive non-finite updates; `divergence` decides what a run does about them."""

from collections.abc import Sequence

from jaxtyping import PyTree

from podscale.config.json_types import JsonObject
from podscale.runs.events import Event


class DivergenceError(Exception):
    """Too many consecutive updates were non-finite; `first` is the step of the first of them."""

    def __init__(self, first: int, state: PyTree) -> None:
        super().__init__(f"every update after step {first} was non-finite")
        self.first, self.state = first, state


class NonfiniteCounter:
    """Counts consecutive updates that were skipped because loss or gradient were not finite.

    >>> counter = NonfiniteCounter(limit=2, journal=[{"event": "train", "step": 7, "skipped": 1.0}])
    >>> counter.record(7, skipped=True)
    >>> counter.check(None)
    Traceback (most recent call last):
    podscale.training.nonfinite.DivergenceError: every update after step 6 was non-finite
    """

    def __init__(self, limit: int, journal: Sequence[JsonObject] = ()) -> None:
        """Start a counter.

        Args:
            limit: consecutive skipped updates that are too many; 0 is never.
            journal: earlier updates, so that a resumed run continues an interrupted count.
        """
        self._limit, self._count, self._next = limit, 0, 0
        for line in journal:
            if line["event"] == "train":
                self.record(line["step"] - 1, skipped=bool(line.get("skipped")))

    def __call__(self, event: Event) -> None:
        """Count the update of an event."""
        if event.kind == "train":
            self.record(event.step - 1, skipped=bool(event.values["skipped"]))

    def record(self, step: int, *, skipped: bool) -> None:
        """Count the update that starts at `step`. Updates after the limit no longer count."""
        if self.is_limit_reached:
            return
        self._count, self._next = (self._count + 1 if skipped else 0), step + 1

    @property
    def is_limit_reached(self) -> bool:
        return bool(self._limit) and self._count >= self._limit

    def check(self, state: PyTree) -> None:
        """Raise a `DivergenceError` if the limit is reached; all processes raise the same."""
        if self.is_limit_reached:
            raise DivergenceError(self._next - self._limit, state)
