"""Streak: how many updates in a row had no number; `divergence` says what a run does about it."""

from collections.abc import Sequence
from typing import Any


class DivergenceError(Exception):
    """So many updates in a row had no number; `first` is the step of the first of them."""

    def __init__(self, first: int, state: Any) -> None:
        super().__init__(f"no update after step {first} had a number")
        self.first, self.state = first, state


class NonfiniteCounter:
    """Counts updates without a number.

    >>> streak = Streak(limit=2, journal=[{"event": "train", "step": 7, "skipped": 1.0}])
    >>> streak.saw(7, skipped=True)
    >>> streak.check(None)
    Traceback (most recent call last):
    podscale.training.nonfinite.DivergenceError: no update after step 6 had a number
    """

    def __init__(self, limit: int, journal: Sequence[dict[str, Any]] = ()) -> None:
        """`journal` tells of earlier updates: a run that was stopped inside a streak goes on inside it."""
        self._limit, self._count, self._next = limit, 0, 0
        for line in journal:
            if line["event"] == "train":
                self.saw(line["step"] - 1, skipped=bool(line.get("skipped")))

    def saw(self, step: int, *, skipped: bool) -> None:
        """The update that begins at `step` is done. Those after a full streak no longer count."""
        if self.full:
            return
        self._count, self._next = (self._count + 1 if skipped else 0), step + 1

    @property
    def full(self) -> bool:
        return bool(self._limit) and self._count >= self._limit

    def check(self, state: Any) -> None:
        """Raises `RunawayError` where the streak is full; all processes find the same."""
        if self.full:
            raise DivergenceError(self._next - self._limit, state)
