"""End a run that is stuck, and report which process it is stuck in.

JAX's runtime notices a process that dies. One that is alive but makes no progress (stopped, swapped out, waiting for a
disk that is gone) leaves all others waiting in their next collective for ever. So each process has a thread that
watches the training loop. When the loop has made no progress for too long, the thread writes the stacks of all threads
of its process, names the process that is furthest behind, and exits with a code after which a launcher starts the run
again. Which process that is does not depend on the hosts' clocks, which may differ or be set.
"""

import faulthandler
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Self

import jax

from podscale.config.json_types import JsonObject
from podscale.processes.group import get_key_value_store
from podscale.processes.heartbeat import KeyMissingError

STUCK = 70  # what sysexits.h calls an internal error; the run resumes from its last checkpoint
CHECKS_PER_TIMEOUT = 8  # of the loop in each timeout
MAX_INTERVAL_S = 2.0  # between two checks, so that all processes soon know that one of them is stuck
LINGER_S = 4.0  # for which the main process stays: without it, the others are aborted before they have reported


class Watchdog:
    """Watches the training loop of this process; a context manager.

    Args:
        timeout_s: seconds without progress after which the process ends; 0: never.
        folder: the run's, where the stacks are written.
    """

    def __init__(self, timeout_s: float, folder: Path) -> None:
        self._timeout_s, self._folder = timeout_s, folder
        self._progress: tuple[int, str, float] = (0, "start", time.monotonic())
        self._beats = Beats(timeout_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="podscale-watchdog", daemon=True)

    def record_progress(self, step: int, part: str) -> None:
        """Record that the loop has done `step` updates and starts with `part`."""
        self._progress = (step, part, time.monotonic())

    def __enter__(self) -> Self:
        if self._timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._timeout_s:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(min(self._timeout_s / CHECKS_PER_TIMEOUT, MAX_INTERVAL_S)):
            step, part, since = self._progress
            still_s = time.monotonic() - since
            _publish({"step": step, "part": part, "still_s": still_s})
            if still_s > self._timeout_s / 2:
                self._beats.update(_read_beats(), time.monotonic())
            if still_s > self._timeout_s or _is_peer_stuck():
                self._exit(step, part, still_s)

    def _exit(self, step: int, part: str, still_s: float) -> None:
        number = jax.process_index()
        _publish_stuck()
        text = f"stuck for {still_s:.0f} s after step {step:,} ({part})"
        if jax.process_count() > 1:
            self._beats.update(_read_beats(), time.monotonic())
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
        if number == 0 and jax.process_count() > 1:
            time.sleep(LINGER_S)
        os._exit(STUCK)


def _publish(beat: JsonObject) -> None:
    client = get_key_value_store()
    if client is not None:
        client.key_value_set(f"podscale/beat/{jax.process_index()}", json.dumps(beat), allow_overwrite=True)


def _publish_stuck() -> None:
    client = get_key_value_store()
    if client is not None:
        client.key_value_set("podscale/stuck", "", allow_overwrite=True)


def _is_peer_stuck() -> bool:
    """Return whether a process has reached its timeout: then all end, and each writes its stacks."""
    client = get_key_value_store()
    try:
        return client is not None and client.key_value_try_get("podscale/stuck") is not None
    except KeyMissingError:
        return False


def _read_beats() -> dict[int, str]:
    """Return the last beat of each process, as it was published."""
    client = get_key_value_store()
    if client is None:
        return {}
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get("podscale/beat")}


class Beats:
    """The last beats of all processes, and when each changed by this process's own clock."""

    def __init__(self, timeout_s: float) -> None:
        self._silence_s = timeout_s / 4  # two beats or more
        self._last: dict[int, tuple[str, float]] = {}

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
