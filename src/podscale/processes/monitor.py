"""Look after a process and its peers: one thread polls all checks, and one carries what they publish and read.

A check is a plain object: the heartbeat, the watchdog and the straggler check. The monitor's thread polls each of them
and never waits for anything, so that time which passes is noticed whatever else happens. Asking the key-value store
may wait without a limit, since process 0 keeps it and may be stopped. So a second thread, the store's, does nothing but
let checks exchange values with the other processes.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from podscale.processes.store import Store, StoreError

TICK_S = 0.02  # between two polls


class Check(Protocol):
    """Something that a monitor looks after."""

    def poll(self, now: float) -> bool:
        """Look at what is known at the monotonic time `now`, without waiting; return whether to exchange values."""

    def exchange(self, store: Store) -> None:
        """Publish values and read those of other processes; may wait for them, and raise a StoreError."""


class Monitor:
    """Polls checks until it is stopped.

    Args:
        store: what the processes share; None for a process that is alone, whose checks exchange nothing.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._checks: list[Check] = []
        self._pending: dict[Check, None] = {}  # checks that have something to exchange, in the order of asking
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
        """Poll a check inside the block, and not any more after it."""
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
        """Stop to poll, and wait for an exchange that is under way."""
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            with self._lock:
                for check in self._checks:
                    if check.poll(time.monotonic()) and self._store is not None:
                        self._pending[check] = None
                        self._wake.set()

    def _carry(self, store: Store) -> None:
        while self._wake.wait() and not self._stopped.is_set():
            self._wake.clear()
            with self._lock:
                pending, self._pending = self._pending, {}
            for check in pending:
                with suppress(StoreError):  # no answer: JAX's runtime ends this process if that lasts
                    check.exchange(store)
