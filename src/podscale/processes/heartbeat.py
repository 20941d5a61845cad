"""Peers: the processes of a run stand and fall together.

A process that fails leaves the others waiting in their next sum. JAX's runtime notices one that is dead after a while,
and aborts all, but it does not know why, and it knows nothing of a process that refused its input. So every process
tells through JAX's own store of keys and values that it is alive, and the first one listens. Who must end writes down
why and with which code; all read that, say it, and end with the same code.
"""

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import jax

from podscale.errors import UserError

GONE = 69  # what sysexits.h calls unavailable: another process is gone; the run resumes from its last checkpoint
ALIVE, TROUBLE, END = "podscale/alive", "podscale/trouble", "podscale/end"
BEAT_S = 1.0  # between two signs of life, or a tenth of the heartbeat
PATIENCE = 0.7  # of the heartbeat: then we say who is gone, before JAX's runtime aborts without saying it
SILENT_BEATS = 4  # beats missed by a process that is gone, where others already have trouble,
SILENT_SHARE = 1 / 15  # or this share of a long heartbeat: there, signs of life may come late
VERDICT_SILENCES = 2  # silences in which the first process finds out who is gone
FAREWELL_BEATS = 3  # for which the first process stays, so that all can read how it ended
MEETING_S = 3600.0  # for which a process waits for the others to come to the same point
LONGEST_WORDS = 300  # characters of an error that the others are told of
LEFT = "left"
NotThereError = jax.errors.JaxRuntimeError  # of a key, or of the process that keeps the keys


class End(NamedTuple):
    """Why all end, and with which code."""

    code: int
    why: str


class Peers:
    """The other processes, as this one hears of them."""

    def __init__(self, store: Any, process: int, processes: int, heartbeat_s: float) -> None:
        self._store, self._process, self._heartbeat_s = store, process, heartbeat_s
        self._meetings = 0
        self.beat_s = min(BEAT_S, heartbeat_s / 10)
        self._silence_s = max(SILENT_BEATS * self.beat_s, SILENT_SHARE * heartbeat_s)
        self._heard = {number: ("", time.monotonic()) for number in range(processes)}
        self._over, self._busy_ending = threading.Event(), False
        self._thread = threading.Thread(target=self._live, name="podscale-peers", daemon=True)
        self._thread.start()

    def end(self) -> End | None:
        """Why all must end, if they must."""
        try:
            return End(*json.loads(self._store.key_value_try_get(END)))
        except NotThereError:
            return None

    def call_end(self, code: int, why: str) -> End:
        """Has all processes end; whoever calls first says why."""
        with suppress(NotThereError):
            self._store.key_value_set(END, json.dumps((code, why)))
        return self.end() or End(code, why)

    def complain(self, why: str) -> None:
        """A sum has failed: someone may be gone, and the first process shall look at once."""
        with suppress(NotThereError):
            self._store.key_value_set(f"{TROUBLE}/{self._process}", why, allow_overwrite=True)

    def verdict(self, why: str) -> End | None:
        """After a complaint: what it comes to, if the first process finds anyone missing."""
        self._busy_ending = True
        self.complain(why)
        for _ in range(round(VERDICT_SILENCES * self._silence_s / self.beat_s)):
            if found := self.end():
                return found
            time.sleep(self.beat_s)
        return None

    def meet(self) -> None:
        """Waits until all have come here, each for the same time in the same order."""
        self._meetings += 1
        self._store.wait_at_barrier(f"podscale/meeting/{self._meetings}", round(1000 * MEETING_S))

    def farewell(self) -> None:
        """The last thing before an exit that is no success."""
        self._busy_ending = True
        if self._process == 0:
            time.sleep(FAREWELL_BEATS * self.beat_s)

    def part(self) -> None:
        """Leaves in peace: the others need not listen for this process any more."""
        self._over.set()
        self._thread.join()
        with suppress(NotThereError):
            self._store.key_value_set(f"{ALIVE}/{self._process}", LEFT, allow_overwrite=True)

    # --- the thread ---

    def _live(self) -> None:
        number = 0
        while True:
            with suppress(NotThereError):  # no answer: JAX's runtime ends this process if that lasts
                sign = f"{number} {socket.gethostname()}"
                self._store.key_value_set(f"{ALIVE}/{self._process}", sign, allow_overwrite=True)
                if self._process == 0:
                    self._listen()
                found = self.end()
                if found and not self._busy_ending:
                    self._leave(found)
            number += 1
            if self._over.wait(self.beat_s):
                return

    def _listen(self) -> None:
        now = time.monotonic()
        for key, sign in self._store.key_value_dir_get(ALIVE):
            number = int(key.rpartition("/")[2])
            if sign == LEFT or sign != self._heard[number][0]:
                self._heard[number] = (sign, now)
        limit, told = PATIENCE * self._heartbeat_s, ""
        for key, why in self._store.key_value_dir_get(TROUBLE):
            limit, told = min(limit, self._silence_s), f" (process {key.rpartition('/')[2]}: {why})"
        gone = {number: sign for number, (sign, at) in self._heard.items() if now - at > limit}
        if gone:
            named = " and ".join(f"process {number} on {sign.partition(' ')[2]}" for number, sign in gone.items())
            verb = "is" if len(gone) == 1 else "are"
            self.call_end(GONE, f"{named} {verb} gone: no sign of life for {limit:.0f} s{told}")

    def _leave(self, found: End) -> None:
        self.farewell()
        say(found)
        os._exit(found.code)


def say(found: End) -> None:
    """The sentence that all end with."""
    hint = "" if found.code == 2 else "; the same command goes on from the last checkpoint"
    sys.stdout.flush()
    print(f"podscale: {found.why}{hint}", file=sys.stderr, flush=True)


_peers: Peers | None = None


def watch(store: Any, process: int, processes: int, heartbeat_s: float) -> None:
    """Live with the other processes from now on; this one has just joined them."""
    global _peers  # noqa: PLW0603  # as there is one JAX runtime in a process
    _peers = Peers(store, process, processes, heartbeat_s)
    atexit.register(part)  # before JAX's own, so that nobody talks to what is no longer there


def part() -> None:
    """Leaves the others in peace, if there are any."""
    global _peers  # noqa: PLW0603
    if _peers:
        _peers.part()
        _peers = None


def meet() -> None:
    """Waits for the other processes, if there are any, for as long as they live.

    To be called before a sum that some may come to much later than others: between CPUs a process that has waited half
    a minute for another one's message gives up.
    """
    if _peers:
        _peers.meet()


@contextmanager
def together(*alike: type[BaseException]) -> Iterator[None]:
    """What fails inside ends all processes, even if this one cannot get out of here; not so what all raise `alike`."""
    try:
        yield
    except alike:
        raise
    except BaseException as error:
        if _peers:
            _fail(_peers, error)
        raise


def _fail(peers: Peers, error: BaseException) -> None:
    if isinstance(error, jax.errors.JaxRuntimeError):
        peers.complain(_first_line(error))
    elif isinstance(error, KeyboardInterrupt):
        peers.call_end(130, "interrupted")
    else:
        peers.call_end(*_end_by(error))


def _end_by(error: BaseException) -> End:
    if isinstance(error, UserError):
        return End(2, str(error))
    return End(1, f"process {jax.process_index()} failed: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:LONGEST_WORDS]


def settle(error: BaseException) -> End | None:
    """How all end after an error that is none of the user's; None: by this error itself, or alone."""
    if not _peers:
        return None
    found = _peers.verdict(_first_line(error)) if isinstance(error, jax.errors.JaxRuntimeError) else None
    if found is None:
        own = _end_by(error)
        found = _peers.call_end(*own)
        found = None if found == own else found
    return found


def farewell(code: int, why: str) -> int:
    """The code that all end with; called last, by a process that does not end well."""
    if not _peers:
        return code
    code = _peers.call_end(code, why).code
    _peers.farewell()
    return code
