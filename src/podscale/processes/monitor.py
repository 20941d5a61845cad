"""Monitor a process and its peers: one thread polls all checks, and one carries what they publish and read.

A check is a plain object: the heartbeat, the watchdog and the straggler check. The monitor's thread polls each of them
and never waits for anything, so that time which passes is noticed whatever else happens. Asking the key-value store
may wait without a limit, since process 0 keeps it and may be stopped. So a second thread, the store's, does nothing but
let checks exchange values with the other processes.
"""

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from podscale.processes.key_value_store import KeyValueStore, StoreError

TICK_S = 0.02  # between two polls


class Check(Protocol):
    """A check that a monitor polls."""

    def poll(self, now: float) -> bool:
        """Check the state at the monotonic time `now`, without waiting; return whether to exchange values."""

    def exchange(self, store: KeyValueStore) -> None:
        """Publish values and read those of other processes; may wait for them, and raise a StoreError."""


class Monitor:
    """Polls checks until it is stopped.

    Args:
        store: what the processes share; None for a process that is alone, whose checks exchange nothing.
    """

    def __init__(self, store: KeyValueStore | None = None) -> None:
        self._store = store
        self._checks: list[Check] = []
        self._pending: dict[Check, None] = {}  # checks that have something to exchange, in the order of asking
        self._failed: list[Check] = []  # checks that have failed, which was reported
        self._lock = threading.Lock()  # of both; held while checks are polled
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._run, name="podscale-monitor", daemon=True)]
        if store is not None:
            carry = threading.Thread(target=self._carry, args=(store,), name="podscale-store", daemon=True)
            self._threads.append(carry)
        for thread in self._threads:
            thread.start()

    @contextmanager
    def watch(self, check: Check) -> Iterator[None]:
        """Poll a check inside the block only."""
        self.add(check)
        try:
            yield
        finally:
            with self._lock:
                self._checks.remove(check)

    def add(self, check: Check) -> None:
        """Poll a check until the monitor is stopped."""
        with self._lock:
            self._checks.append(check)

    def stop(self) -> None:
        """Stop polling, and wait for an exchange that is under way."""
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            with self._lock:
                for check in self._checks:
                    if self._poll(check) and self._store is not None:
                        self._pending[check] = None
                        self._wake.set()

    def _poll(self, check: Check) -> bool:
        try:
            return check.poll(time.monotonic())
        except Exception as error:
            self._report(check, error)
            return False

    def _carry(self, store: KeyValueStore) -> None:
        while self._wake.wait() and not self._stopped.is_set():
            self._wake.clear()
            with self._lock:
                pending, self._pending = self._pending, {}
            for check in pending:
                try:
                    check.exchange(store)
                except StoreError:
                    continue  # no answer: JAX's runtime ends this process if that lasts
                except Exception as error:
                    self._report(check, error)

    def _report(self, check: Check, error: Exception) -> None:
        """Print why a check failed, once for each check: the others go on, and so does this one."""
        if check in self._failed:
            return
        self._failed.append(check)
        print(f"podscale: {type(check).__name__} failed, and goes on:", file=sys.stderr)
        traceback.print_exception(error)
