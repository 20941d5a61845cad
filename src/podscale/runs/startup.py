"""Measure where the start of a process goes: interpreter, imports, joining, devices, index, model, folder.

What comes before the run's folder is open happens in many modules, most of which know nothing of a run's ledger. So
there is one clock for the process, which each of them marks when its part is done.
"""

import os
import time
from pathlib import Path


class StartClock:
    """Seconds per part of a start, from the start of the process or of a later session in it.

    >>> clock = StartClock(time.perf_counter())
    >>> clock.mark("index")
    >>> list(clock.get_parts()), clock.begin_session() > 0, clock.begin_session()
    (['index'], True, 0.0)
    """

    def __init__(self, start: float) -> None:
        self._last, self._parts, self._sessions = start, dict[str, float](), 0

    def mark(self, part: str) -> None:
        """Add the time since the last mark to `part`, which has just ended."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def begin_session(self) -> float:
        """Start a session; return seconds of the process's start before it, 0 for all but the first session."""
        self._last, self._sessions = time.perf_counter(), self._sessions + 1
        if self._sessions > 1:
            self._parts = {}
        return sum(self._parts.values(), 0.0)

    def restart(self) -> None:
        """Start again: a process of an elastic run leaves its generation, and begins a session in the next one."""
        self._last, self._parts, self._sessions = time.perf_counter(), {}, 0

    def get_parts(self) -> dict[str, float]:
        """Return seconds per part."""
        return dict(self._parts)


def measure_process_age() -> float:
    """Return seconds since the kernel started this process; 0.0 where that is not known."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the boot; field 22 of proc(5)
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 0.0)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


clock = StartClock(time.perf_counter() - measure_process_age())  # a process starts once
