"""Watchdog: ends a run that is stuck, and says which process it is stuck in.

A process that dies is noticed by JAX's runtime. One that is alive but does not go on, stopped, swapped out, waiting for
a disk that is gone, leaves all others waiting in their next sum for ever. So each process has a thread that watches the
loop go by. When the loop has not moved for too long, the thread writes down where every thread of its process stands,
names the process that is furthest behind, and ends its own with a code that tells a launcher to start the run again.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import jax

from podscale.processes.group import key_value_store
from podscale.processes.heartbeat import NotThereError

STUCK = 70  # what sysexits.h calls an internal error; the run resumes from its last checkpoint
CHECKS = 8  # looks at the loop in each timeout
LONGEST_S = 2.0  # between two looks, so that all processes hear soon that one of them is stuck
FAREWELL_S = 4.0  # for which the first process stays: without it, the others are aborted before they have told all


class Watchdog:
    """Watches the loop of this process; a context manager. `timeout_s` of 0 watches nothing."""

    def __init__(self, timeout_s: float, folder: Path) -> None:
        self._timeout_s, self._folder = timeout_s, folder
        self._at: tuple[int, str, float] = (0, "start", time.monotonic())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="podscale-watchdog", daemon=True)

    def passed(self, step: int, part: str) -> None:
        """The loop has come by: it has done `step` updates and begins with `part`."""
        self._at = (step, part, time.monotonic())

    def __enter__(self) -> Self:
        if self._timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._timeout_s:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(self._timeout_s / CHECKS, LONGEST_S)):
            step, part, since = self._at
            still_s = time.monotonic() - since
            _publish({"step": step, "part": part, "still_s": still_s, "at": time.time()})
            if still_s > self._timeout_s or _another_is_stuck():
                self._end(step, part, still_s)

    def _end(self, step: int, part: str, still_s: float) -> None:
        number = jax.process_index()
        _publish_stuck()
        text = f"stuck for {still_s:.0f} s after step {step:,} ({part})"
        blamed = _furthest_behind(self._timeout_s)
        if blamed is not None:
            text += (
                f"; waiting for {blamed}" if blamed != f"process {number}" else "; it is this process that is behind"
            )
        path = self._folder / f"stuck-{number}.txt"
        try:
            with path.open("w") as file:
                print(text, file=file)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            pass  # a disk that is gone may be why
        print(f"podscale: process {number} is {text}; stacks in {path}", file=sys.stderr, flush=True)
        if number == 0 and jax.process_count() > 1:
            time.sleep(FAREWELL_S)
        os._exit(STUCK)


def _publish(beat: dict[str, Any]) -> None:
    client = key_value_store()
    if client is not None:
        client.key_value_set(f"podscale/beat/{jax.process_index()}", json.dumps(beat), allow_overwrite=True)


def _publish_stuck() -> None:
    client = key_value_store()
    if client is not None:
        client.key_value_set("podscale/stuck", "", allow_overwrite=True)


def _another_is_stuck() -> bool:
    """Whether a process has lost its patience: then all end, and each writes down where it stands."""
    client = key_value_store()
    try:
        return client is not None and client.key_value_try_get("podscale/stuck") is not None
    except NotThereError:
        return False


def _furthest_behind(timeout_s: float) -> str | None:
    """The process that no longer tells where it is; else the one with the fewest updates, or that moved last."""
    client = key_value_store()
    if client is None:
        return None
    told = {key.rpartition("/")[2]: json.loads(text) for key, text in client.key_value_dir_get("podscale/beat")}
    nothing = {"step": 0, "at": 0.0, "still_s": 0.0}
    silent_since = time.time() - timeout_s / 2

    def lead(process: int) -> tuple[bool, int, float]:
        beat = told.get(str(process), nothing)
        return beat["at"] > silent_since, beat["step"], beat["at"] - beat["still_s"]

    return f"process {min(range(jax.process_count()), key=lead)}"
