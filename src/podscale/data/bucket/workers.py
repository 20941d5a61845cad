"""Threads that wait for a bucket's answers, and how many requests to have in flight."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from podscale.processes.host import count_usable_cores

MIN_REQUESTS, MAX_REQUESTS = 8, 128  # in flight
HEDGE_S, HEDGE_FACTOR = 1.0, 8.0  # a second request after this long, or after so many times the usual wait
MIN_ROUND_S = 0.03  # between two decisions how many requests may be in flight
BUSY_SHARE = 0.8  # of the cores' time, from which on more requests in flight are of no use
T = TypeVar("T")


@dataclass
class RequestCounts:
    """What was asked for: requests, bytes, and second requests for what was slow to come."""

    requests: int = 0
    bytes: int = 0
    hedged: int = 0


class Workers:
    """Daemon threads that run functions, made as they are needed: one that waits for a store must not delay the end."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished, self._lock = 0, threading.Lock()  # tasks that wait or run

    def submit(self, task: Callable[[], None]) -> None:
        """Have a task run at once, by another thread if all are busy; while there are as many as may be, it waits."""
        with self._lock:
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._most):
                self._threads.append(threading.Thread(target=self._work, name=self._name, daemon=True))
                self._threads[-1].start()
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            finally:
                with self._lock:
                    self._unfinished -= 1

    def close(self) -> None:
        """End the threads after what was submitted."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()


def complete(future: "Future[T]", work: Callable[[], T]) -> None:
    """Set a future to the result of some work, or to the exception that it raised."""
    try:
        future.set_result(work())
    except BaseException as error:  # of any kind: who waits raises it
        future.set_exception(error)


@dataclass
class Pace:
    """How fast bytes come: what decides how many requests are in flight."""

    usual_wait: float = 0.0  # seconds of a request, smoothed
    requests: int = 0  # since the last decision
    bytes: int = 0
    since: float = field(default_factory=time.monotonic)
    best: float = 0.0  # bytes per second under the limit before
    cpu_s: float = field(default_factory=time.process_time)
    cores: int = field(default_factory=count_usable_cores)

    def add(self, seconds: float, count: int) -> None:
        self.usual_wait = seconds if not self.usual_wait else 0.9 * self.usual_wait + 0.1 * seconds
        self.requests += 1
        self.bytes += count

    def choose_limit(self, limit: int) -> int:
        """Return the next limit: twice the present one if the last increase made bytes come faster by a quarter.

        It is decided after as many answers as the limit allows requests, which is about as long as one request takes:
        a store that is far away is used fully after a few times its latency. While this process keeps its cores busy,
        more requests would only take more memory.
        """
        elapsed, used = time.monotonic() - self.since, time.process_time() - self.cpu_s
        if self.requests < limit or elapsed < MIN_ROUND_S:
            return limit
        rate, self.requests, self.bytes = self.bytes / elapsed, 0, 0
        self.since, self.cpu_s = self.since + elapsed, self.cpu_s + used
        if used > BUSY_SHARE * elapsed * self.cores or rate < 1.25 * self.best:
            self.best = max(self.best * 0.95, rate)
            return limit
        self.best = rate
        return min(2 * limit, MAX_REQUESTS)


class RequestPool:
    """Requests in flight: how many there may be adapts to what makes the bytes come faster.

    Attributes:
        changed: notified whenever a request ends; also the lock of those who use the pool.
        counts: of requests from the moment they are made.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.counts = RequestCounts()
        self._in_flight, self._limit, self._pace = 0, MIN_REQUESTS, Pace()
        self._workers = Workers(MAX_REQUESTS, "podscale-fetch")

    @property
    def patience(self) -> float:
        """Seconds after which a request takes unusually long."""
        return max(HEDGE_S, HEDGE_FACTOR * self._pace.usual_wait)

    def wait_for_turn(self, is_over: Callable[[], bool]) -> bool:
        """Wait until another request may be made; return False if it is over."""
        with self.changed:
            self.changed.wait_for(lambda: is_over() or self._in_flight < self._limit)
            return not is_over()

    def submit(self, size: int, work: Callable[[], None]) -> None:
        """Make a request for so many bytes in a thread: `work`, which raises nothing."""

        def run() -> None:
            start = time.monotonic()
            work()
            with self.changed:
                self._in_flight -= 1
                self._pace.add(time.monotonic() - start, size)
                self.changed.notify_all()

        with self.changed:
            self._in_flight += 1
            self.counts.requests += 1
            self.counts.bytes += size
        self._workers.submit(run)

    def grow(self) -> None:
        """Allow more requests in flight because a batch has to wait, if the last increase has helped."""
        with self.changed:
            self._limit = self._pace.choose_limit(self._limit)
            self.changed.notify_all()

    def wake(self) -> None:
        """Wake the waiting threads, so that they check whether it is over."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """End the threads after what was submitted."""
        self._workers.close()
