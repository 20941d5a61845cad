"""End a run that is stuck, and report which process it is stuck in.

JAX's runtime notices a process that dies. One that is alive but makes no progress (stopped, swapped out, waiting for a
disk that is gone) leaves all others waiting in their next collective for ever. So a watchdog in each process watches
the training loop. When the loop has made no progress for too long, it writes the stacks of all threads of its process,
names the process that is furthest behind, and exits with a code after which a launcher starts the run again. Which
process that is does not depend on the hosts' clocks, which may differ or be set.
"""

import faulthandler
import json
import math
import os
import sys
import time
from pathlib import Path

import jax

from podscale.processes.exit_codes import STUCK
from podscale.processes.key_value_store import KeyValueStore
from podscale.processes.process_end import LIMIT_S, end_within

CHECKS_PER_TIMEOUT = 8  # of the loop in each timeout
BEAT, STUCK_KEY = "podscale/beat", "podscale/stuck"  # keys of the store
MAX_INTERVAL_S = 2.0  # between two checks, so that all processes soon know that one of them is stuck
ANSWER_S = 2.0  # for which a process that is stuck waits until the store has taken that it is
LINGER_S = 4.0  # for which the main process stays: without it, the others are aborted before they have reported


class Watchdog:
    """Watches the training loop of this process; a monitor polls it.

    Args:
        timeout_s: seconds without progress after which the process ends; 0: never.
        folder: the run's, where the stacks are written.
    """

    def __init__(self, timeout_s: float, folder: Path) -> None:
        self._timeout_s, self._folder = timeout_s, folder
        self._progress: tuple[int, str, float] = (0, "start", time.monotonic())
        self._beats = Beats(timeout_s)
        self._next_check = time.monotonic()
        self._ends_at: float | None = None  # when this process, which is stuck, ends even if process 0 does not answer
        self._is_known = False  # whether the other processes can read that this one is stuck
        self._is_peer_stuck = False  # a process has reached its timeout: then all end, and each writes its stacks

    def record_progress(self, step: int, part: str) -> None:
        """Record that the loop has done `step` updates and starts with `part`."""
        self._progress = (step, part, time.monotonic())

    def poll(self, now: float) -> bool:
        """End this process if its loop, or that of another process, is stuck."""
        if not self._timeout_s:
            return False
        step, part, since = self._progress
        if self._ends_at is None and (now - since > self._timeout_s or self._is_peer_stuck):
            self._ends_at = now + (ANSWER_S if jax.process_count() > 1 else 0.0)
            self._next_check = now
        if self._ends_at is not None and (self._is_known or now >= self._ends_at):
            self._exit(step, part, now - since)
        if now < self._next_check:
            return False
        self._next_check = now + min(self._timeout_s / CHECKS_PER_TIMEOUT, MAX_INTERVAL_S)
        return True

    def exchange(self, store: KeyValueStore) -> None:
        """Publish how far the loop has come, and read whether another process is stuck."""
        step, part, since = self._progress
        still_s, is_stuck = time.monotonic() - since, self._ends_at is not None
        beat = {"step": step, "part": part, "still_s": still_s}
        store.set(f"{BEAT}/{jax.process_index()}", json.dumps(beat))
        if is_stuck:
            store.set(STUCK_KEY, "")
        if is_stuck or still_s > self._timeout_s / 2:
            self._beats.update(store.list_by_process(BEAT), time.monotonic())
        self._is_peer_stuck = store.get(STUCK_KEY) is not None
        self._is_known = is_stuck

    def _exit(self, step: int, part: str, still_s: float) -> None:
        number = jax.process_index()
        linger_s = LINGER_S if number == 0 and jax.process_count() > 1 else 0.0
        end_within(STUCK, LIMIT_S + linger_s)  # the disk that the stacks are written to may be what all wait for
        text = f"stuck for {still_s:.0f} s after step {step:,} ({part})"
        if jax.process_count() > 1:
            culprit = self._beats.find_furthest_behind(jax.process_count())
            text += f"; waiting for process {culprit}" if culprit != number else "; it is this process that is behind"
        path = self._folder / f"stuck-{number}.txt"
        try:
            with path.open("w") as file:
                print(text, file=file)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            pass  # a disk that is gone may be the cause
        print(f"podscale: process {number} is {text}; stacks in {path}", file=sys.stderr, flush=True)
        time.sleep(linger_s)
        os._exit(STUCK)


class Beats:
    """The last beats of all processes, and when each changed by this process's own clock."""

    def __init__(self, timeout_s: float) -> None:
        self._silence_s = timeout_s / 4  # two beats or more
        self._last: dict[int, tuple[str, float]] = {}
        self._now = 0.0

    def update(self, beats: dict[int, str], now: float) -> None:
        """Record the beats that are published at the monotonic time `now`."""
        for process, text in beats.items():
            if self._last.get(process, ("", 0.0))[0] != text:
                self._last[process] = (text, now)
        self._now = now

    def find_furthest_behind(self, processes: int) -> int:
        """Return the process that no longer beats; else the one with the fewest updates, or the longest stillness.

        >>> beats = Beats(timeout_s=8.0)
        >>> beats.update({0: '{"step": 7, "still_s": 4.0}', 1: '{"step": 7, "still_s": 1.0}'}, now=100.0)
        >>> beats.update({0: '{"step": 7, "still_s": 7.0}', 1: '{"step": 7, "still_s": 1.0}'}, now=103.0)
        >>> beats.find_furthest_behind(2)
        1
        """

        def rank(process: int) -> tuple[bool, int, float]:
            text, changed = self._last.get(process, ('{"step": 0, "still_s": 0.0}', -math.inf))
            beat = json.loads(text)
            return self._now - changed <= self._silence_s, beat["step"], -beat["still_s"]

        return min(range(processes), key=rank)
