"""Account for a run's time over all its sessions, and compute goodput: the share that was training which counted.

A session is one process's time on a run, from its start to its end or failure. At every checkpoint it writes to
`ledger.json` how many seconds each phase has taken so far. A run that resumes from a checkpoint computes from that file
what the session before it lost: everything after the checkpoint's note. From the start of the first session to now,
every second is counted once.

Clocks may be set while a run lasts. Within a session all times are monotonic. From the start of one session to that of
the next, the machine's time since its boot counts if both ran on it; between machines, or over a boot, the time of day,
and never less than what the session itself measured. So no part is negative, and goodput is between 0 and 1.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from podscale.config.json_types import JsonObject
from podscale.storage.files import write_atomically

TRAINING, LOST, DOWN = "train", "lost work", "between sessions"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Note:
    """Seconds per phase of a session up to one of its checkpoints; the fields are the keys in ledger.json."""

    step: int
    at: float  # seconds since 1970
    parts: dict[str, float]


@dataclass
class Session:
    """The notes of one session; the fields are the keys in ledger.json."""

    began: float
    resumed: int  # the step it resumed from
    notes: list[Note] = field(default_factory=list)
    ended: float = 0.0  # as far as the next session could see
    boot: str = ""  # identifies the boot of the machine that it ran on; empty: not known
    boot_s: float = 0.0  # seconds from that boot to its start
    start: dict[str, float] = field(default_factory=dict)  # seconds per part of the phase "start"

    def measure_notes(self, limit: float = math.inf) -> float:
        """Return seconds from its start to its last note up to a step: phases sum to the wall time."""
        return max((sum(note.parts.values()) for note in self.notes if note.step <= limit), default=0.0)

    def measure_until(self, later: "Session") -> float:
        """Return seconds from its start to a later session's."""
        is_same_boot = self.boot != "" and self.boot == later.boot
        gap_s = later.boot_s - self.boot_s if is_same_boot else later.began - self.began
        return max(gap_s, self.measure_notes())


class History:
    """The sessions of a run; the last one is the current one.

    Args:
        folder: the run's.
        began: when the current session started, in seconds since 1970.
        resumed: the step it resumed from; 0: the run starts from scratch and has no earlier sessions.
        boot: the machine's boot and seconds from it to the session's start; see `read_boot_clock`.
        start: seconds per part of the current session's phase "start"; see `podscale.runs.startup`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> first = History(folder, began=1000.0, resumed=0)
    >>> first.record(10, {"compile": 20.0, "train": 30.0}, at=1050.0)
    >>> (folder / "metrics.jsonl").touch(); os.utime(folder / "metrics.jsonl", (1057.0, 1057.0))  # its last line
    >>> second = History(folder, began=1060.0, resumed=10)
    >>> second.sum_phases({"compile": 15.0, "train": 25.0})
    {'compile': 35.0, 'train': 55.0, 'lost work': 7.0, 'between sessions': 3.0}
    >>> second.compute_goodput({"compile": 15.0, "train": 25.0})
    0.55
    """

    def __init__(
        self,
        folder: Path,
        began: float,
        resumed: int,
        boot: tuple[str, float] = ("", 0.0),
        start: dict[str, float] | None = None,
    ) -> None:
        self._path = folder / "ledger.json"
        self._sessions = _read_sessions(self._path) if resumed else []
        if self._sessions:
            self._sessions[-1].ended = _get_last_write_time(folder)
        self._sessions.append(Session(began, resumed, [], 0.0, *boot, dict(start or {})))
        self._past_phases = _sum_past_sessions(self._sessions)

    def record(self, step: int, phases: dict[str, float], at: float | None = None) -> None:
        """Write the current session's seconds per phase up to a checkpoint.

        Args:
            step: the checkpoint's.
            phases: seconds per phase.
            at: seconds since 1970; None: now.
        """
        self._sessions[-1].notes.append(Note(step, time.time() if at is None else at, dict(phases)))
        write_atomically(self._path, json.dumps([asdict(session) for session in self._sessions]))

    def sum_phases(self, phases: dict[str, float]) -> dict[str, float]:
        """Return seconds per phase over all sessions; `phases` are the current one's."""
        return _add(phases, self._past_phases)

    def compute_goodput(self, phases: dict[str, float]) -> float:
        """Return the share of the time since the first session's start that went into training which counted."""
        total = self.sum_phases(phases)
        return total.get(TRAINING, 0.0) / max(sum(total.values()), 1e-9)


def read_phase_seconds(folder: Path) -> tuple[int, dict[str, float]]:
    """Return the last recorded step of a run's folder and seconds per phase up to it; (0, {}) if there is none."""
    sessions = _read_sessions(folder / "ledger.json")
    if not sessions or not sessions[-1].notes:
        return 0, {}
    last = sessions[-1].notes[-1]
    return last.step, _add(last.parts, _sum_past_sessions(sessions))


def _add(phases: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    total = dict(phases)
    for phase, seconds in more.items():
        total[phase] = total.get(phase, 0.0) + seconds
    return total


def _sum_past_sessions(sessions: list[Session]) -> dict[str, float]:
    """Return seconds per phase of all sessions but the last."""
    total: dict[str, float] = {}
    for i, session in enumerate(sessions[:-1]):
        resumed = min(later.resumed for later in sessions[i + 1 :])  # no later session used anything beyond it
        counted = [note for note in session.notes if note.step <= resumed]
        whole_s = session.measure_until(sessions[i + 1])
        lasted_s = min(max(session.ended - session.began, session.measure_notes()), whole_s)
        lost = {LOST: lasted_s - session.measure_notes(resumed), DOWN: whole_s - lasted_s}
        total = _add(_add(total, counted[-1].parts if counted else {}), lost)
    return total


def _get_last_write_time(folder: Path) -> float:
    """Return when a run that was killed last wrote a metric."""
    try:
        return os.stat(folder / "metrics.jsonl").st_mtime
    except OSError:
        return 0.0


def _read_sessions(path: Path) -> list[Session]:
    """Return earlier sessions; none if the file is missing or broken: it is for people, and no computation needs it."""
    try:
        entries: list[JsonObject] = json.loads(path.read_text())
        return [
            Session(
                entry["began"],
                entry["resumed"],
                [Note(**note) for note in entry["notes"]],
                entry["ended"],
                entry.get("boot", ""),
                entry.get("boot_s", 0.0),
                entry.get("start", {}),
            )
            for entry in entries
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def read_boot_clock() -> tuple[str, float]:
    """Return what identifies this boot of the machine, and seconds since it; ("", 0.0) where that is not known.

    Unlike the time of day, this time cannot be set, and all processes of the machine share it.
    """
    try:
        return BOOT_ID.read_text().strip(), time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return "", 0.0


class PhaseTimer:
    """Measures seconds per phase of the work.

    Args:
        before_s: seconds of the phase "start" that have passed already.
    """

    def __init__(self, before_s: float = 0.0) -> None:
        now, (boot, boot_s) = time.perf_counter(), read_boot_clock()
        self.start, self.start_time, self.start_boot = now - before_s, time.time() - before_s, (boot, boot_s - before_s)
        self.seconds: dict[str, float] = {"start": before_s} if before_s else {}
        self._phase, self._counted_until = "", now

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count the time spent inside the block for `phase`, and not for the phase around it."""
        self._count()
        outer, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._count()
            self._phase = outer

    def get_phases(self) -> dict[str, float]:
        """Return seconds per phase, with the time outside all of them as "other"; they sum to the wall time."""
        self._count()
        wall = self._counted_until - self.start
        return {**self.seconds, "other": max(wall - sum(self.seconds.values()), 0.0)}

    def _count(self) -> None:
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._counted_until
        self._counted_until = now
