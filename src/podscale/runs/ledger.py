"""Goodput: where the time of a run went, over all its sessions, and what share of it was training that counted.

A session is one process from start to end, or to whatever ended it. At every checkpoint it notes in `ledger.json` what
its time went to so far. A run that goes on from a checkpoint knows from that what was lost with the session before it:
all that came after the checkpoint's note. From the first session's start to now, every second is booked once.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from podscale.storage.files import write_atomically

TRAINING, LOST, DOWN = "train", "lost work", "between sessions"


@dataclass(frozen=True)
class Note:
    """What a session's time had gone to when it wrote a checkpoint."""

    step: int
    at: float  # seconds since 1970
    parts: dict[str, float]


@dataclass
class Session:
    """The notes of one session."""

    began: float
    resumed: int  # the step it went on from
    notes: list[Note] = field(default_factory=list)
    ended: float = 0.0  # as far as the next session could tell


class History:
    """The sessions of a run; the last one is this.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> first = History(folder, began=1000.0, resumed=0)
    >>> first.note(10, {"compile": 20.0, "train": 30.0}, at=1050.0)
    >>> (folder / "metrics.jsonl").touch(); os.utime(folder / "metrics.jsonl", (1057.0, 1057.0))  # its last line
    >>> again = History(folder, began=1060.0, resumed=10)
    >>> again.parts({"compile": 15.0, "train": 25.0})
    {'compile': 35.0, 'train': 55.0, 'lost work': 7.0, 'between sessions': 3.0}
    >>> again.goodput({"compile": 15.0, "train": 25.0}, now=1100.0)
    0.55
    """

    def __init__(self, folder: Path, began: float, resumed: int) -> None:
        self._path = folder / "ledger.json"
        self._sessions = _load(self._path) if resumed else []
        if self._sessions:
            last = self._sessions[-1]
            noted = last.notes[-1].at if last.notes else last.began
            last.ended = min(max(noted, _last_sign(folder)), began)
        self._sessions.append(Session(began, resumed))
        self._before = _booked(self._sessions)

    def note(self, step: int, parts: dict[str, float], at: float | None = None) -> None:
        """Writes down where this session's time went up to a checkpoint."""
        self._sessions[-1].notes.append(Note(step, time.time() if at is None else at, dict(parts)))
        write_atomically(self._path, json.dumps([asdict(session) for session in self._sessions]))

    def parts(self, now_parts: dict[str, float]) -> dict[str, float]:
        """Seconds by part over all sessions; `now_parts` are this one's."""
        found = dict(now_parts)
        for part, seconds in self._before.items():
            found[part] = found.get(part, 0.0) + seconds
        return found

    def goodput(self, now_parts: dict[str, float], now: float | None = None) -> float:
        """The share of the time since the first session began that went into training which counted."""
        wall = (time.time() if now is None else now) - self._sessions[0].began
        return self.parts(now_parts).get(TRAINING, 0.0) / max(wall, 1e-9)


def so_far(folder: Path) -> tuple[int, dict[str, float]]:
    """The last step that was noted in a run's folder, and seconds by part up to there; (0, {}) if none was."""
    sessions = _load(folder / "ledger.json")
    if not sessions or not sessions[-1].notes:
        return 0, {}
    last = sessions[-1].notes[-1]
    found = dict(last.parts)
    for part, seconds in _booked(sessions).items():
        found[part] = found.get(part, 0.0) + seconds
    return last.step, found


def _booked(sessions: list[Session]) -> dict[str, float]:
    """What the time of all sessions but the last went to."""
    found: dict[str, float] = {}
    for i, session in enumerate(sessions[:-1]):
        reached = min(later.resumed for later in sessions[i + 1 :])  # nothing beyond it was of use to anyone
        counted = [note for note in session.notes if note.step <= reached]
        kept = counted[-1] if counted else Note(0, session.began, {})
        for part, seconds in kept.parts.items():
            found[part] = found.get(part, 0.0) + seconds
        found[LOST] = found.get(LOST, 0.0) + max(session.ended - kept.at, 0.0)
        found[DOWN] = found.get(DOWN, 0.0) + max(sessions[i + 1].began - session.ended, 0.0)
    return found


def _last_sign(folder: Path) -> float:
    """When a run that was killed last wrote anything."""
    try:
        return os.stat(folder / "metrics.jsonl").st_mtime
    except OSError:
        return 0.0


def _load(path: Path) -> list[Session]:
    """Earlier sessions; none where the file is missing or makes no sense: it is for people, and nothing hangs on it."""
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())
        return [
            Session(one["began"], one["resumed"], [Note(**note) for note in one["notes"]], one["ended"])
            for one in found
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []


class PhaseTimer:
    """Seconds by part of the work."""

    def __init__(self) -> None:
        self.began, self.began_at = time.perf_counter(), time.time()
        self.seconds: dict[str, float] = {}
        self._part, self._since = "", self.began  # what is being measured, and booked up to when

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Books the time spent inside to `part`, and to no part around it."""
        self._book()
        outer, self._part = self._part, part
        try:
            yield
        finally:
            self._book()
            self._part = outer

    def parts(self) -> dict[str, float]:
        """All parts, with what was booked nowhere as "other"; they sum to the wall time."""
        self._book()
        wall = self._since - self.began
        return {**self.seconds, "other": max(wall - sum(self.seconds.values()), 0.0)}

    def _book(self) -> None:
        now = time.perf_counter()
        if self._part:
            self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._since
        self._since = now
