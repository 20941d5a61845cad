"""Stragglers: which process holds the others up, and with what.

All processes of a run take as long as the slowest one: the others wait for it in the next sum, and everybody's clock
shows the same. So each process measures what only its own slowness can change: how long it waits for its pictures, how
long it was kept from running at all, and how long its device takes for a fixed piece of work that needs nobody else.
The first process compares. The numbers travel through JAX's store of keys and values, from a thread of their own, so
that training waits for nothing.
"""

import json
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from podscale.processes.group import key_value_store
from podscale.processes.heartbeat import NotThereError

PACE = "podscale/pace"
WINDOW = 8  # calls that a process's pace is the mean of
EVERY = 4  # calls between two looks
CONFIRMED = 2  # looks in a row that find the same
SHARE = 0.3  # of a call's time: so much more than others may a process wait, or be kept from running
TIMES = 1.8  # so many times the others' may its device take
WARM_UP = 3  # calls that are not measured: the first of everything takes longer
FIRST_PROBES = 12  # calls at the start after each of which the device is timed
SLOWER = 1.4  # a call that takes so many times the usual has the devices timed again
TICK_S = 0.02
PROBE_SIDE = {"cpu": 192}  # of a matrix; other devices multiply larger ones
PROBE_LENGTH = 8


class Pace(NamedTuple):
    """Seconds a call that a process took, all of its own; `step` is for the fixed piece of work, if it was timed."""

    process: int
    host: str
    call_s: float
    input: float
    kept: float
    step: float | None = None


class Straggler(NamedTuple):
    """A process that holds the others up."""

    process: int
    host: str
    part: str
    own_s: float
    others_s: float

    def told(self) -> str:
        """In words.

        >>> Straggler(2, "n3", "input", 0.31, 0.02).told()
        'process 2 on n3 holds the others up: it waits 0.310 s a call for its pictures, the others 0.020 s'
        """
        what = {
            "input": "it waits {own:.3f} s a call for its pictures, the others {others:.3f} s",
            "host": "it is kept from running for {own:.3f} s a call (stopped, swapped or overloaded), "
            "the others for {others:.3f} s",
            "step": "its device takes {own:.4f} s for what the others' do in {others:.4f} s",
        }[self.part].format(own=self.own_s, others=self.others_s)
        return f"process {self.process} on {self.host} holds the others up: {what}"


def judge(paces: Sequence[Pace]) -> list[Straggler]:
    """Who is slower than the rest, and with what.

    >>> usual = [Pace(n, "a", 0.3, 0.01, 0.01, 0.005) for n in range(3)]
    >>> [found.part for found in judge([*usual, Pace(3, "b", 0.3, 0.22, 0.01, 0.005)])]
    ['input']
    """
    found: list[Straggler] = []
    if len(paces) < 2:
        return found
    enough_s = SHARE * statistics.median(pace.call_s for pace in paces)
    input_s, kept_s = (statistics.median_low(getattr(pace, part) for pace in paces) for part in ("input", "kept"))
    timed = [pace.step for pace in paces if pace.step is not None]
    step_s = statistics.median_low(timed) if len(timed) == len(paces) else None
    for pace in paces:
        late_s = pace.kept - kept_s
        waits_s = pace.input - input_s - max(late_s, 0.0)  # while it is kept from running, it waits for all it does
        if max(late_s, waits_s) > enough_s:
            part, own_s, others_s = ("host", pace.kept, kept_s) if late_s > waits_s else ("input", pace.input, input_s)
            found.append(Straggler(pace.process, pace.host, part, own_s, others_s))
        elif pace.step is not None and step_s is not None and pace.step > TIMES * step_s:
            found.append(Straggler(pace.process, pace.host, "step", pace.step, step_s))
    return found


class Stragglers:
    """Measures this process and, in the first one, compares all; a context manager. Alone, it does nothing."""

    def __init__(self) -> None:
        self._several = jax.process_count() > 1
        self._store: Any = key_value_store()
        self._begun = self._calls = 0
        self._paces: deque[tuple[float, float, float, float | None]] = deque(maxlen=WINDOW)
        self._usual: deque[float] = deque(maxlen=64)
        self._last: tuple[float, float, float] | None = None
        self._late = 0.0
        self._news: deque[Straggler] = deque()
        self._seen: dict[tuple[int, str], int] = {}
        self._look, self._over = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"podscale-{work.__name__[1:]}", daemon=True)
            for work in (self._tick, self._compare)
        ]
        if self._several:
            side = PROBE_SIDE.get(jax.local_devices()[0].platform, 2048)
            self._work = jnp.ones((side, side), jnp.float32, device=jax.local_devices()[0])
            self._time_device()  # compiles

    def __enter__(self) -> Self:
        if self._several:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._look.set()
        if self._several:
            for thread in self._threads:
                thread.join()

    def passed(self, input_wait_s: float, metrics: Any) -> None:
        """A call was begun; `input_wait_s` is all that was ever waited for pictures, `metrics` are the call's own."""
        if not self._several:
            return
        now = (time.perf_counter(), input_wait_s, self._late)
        self._begun += 1
        if self._last and self._begun > WARM_UP:
            call_s, waited_s, late_s = (new - old for new, old in zip(now, self._last, strict=True))
            usual = statistics.median(self._usual) if self._usual else call_s
            step = None
            if self._calls < FIRST_PROBES or call_s > SLOWER * usual:
                jax.block_until_ready(metrics)
                step = self._time_device()
            self._usual.append(call_s)
            self._paces.append((call_s, waited_s, late_s, step))
            self._calls += 1
            if self._calls % EVERY == 0:
                self._look.set()
        self._last = (time.perf_counter(), input_wait_s, self._late)

    def news(self) -> list[Straggler]:
        """Who was found since this was last asked; in the first process."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def _time_device(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(_probe(self._work))
        return time.perf_counter() - start

    # --- the threads ---

    def _tick(self) -> None:
        """Counts the time by which a short sleep comes back too late: then this process was not running."""
        before = time.perf_counter()
        while not self._over.wait(TICK_S):
            now = time.perf_counter()
            self._late += max(now - before - TICK_S, 0.0)
            before = now

    def _compare(self) -> None:
        while self._look.wait() and not self._over.is_set():
            self._look.clear()
            with suppress(NotThereError):
                number = jax.process_index()
                self._store.key_value_set(f"{PACE}/{number}", json.dumps(self._pace()), allow_overwrite=True)
                if number == 0:
                    told = self._store.key_value_dir_get(PACE)
                    self._note(judge([Pace(*json.loads(text)) for _, text in told]))

    def _pace(self) -> Pace:
        paces = list(self._paces)
        call_s, waited_s, late_s = (statistics.fmean(column) for column in list(zip(*paces, strict=True))[:3])
        steps = [step for *_, step in paces if step is not None]
        return Pace(
            jax.process_index(),
            socket.gethostname(),
            call_s,
            waited_s,
            late_s,
            statistics.fmean(steps) if len(steps) >= WINDOW // 2 else None,
        )

    def _note(self, found: list[Straggler]) -> None:
        """One slow look may be chance; who stays slow is told once, until that is over."""
        self._seen = {(one.process, one.part): self._seen.get((one.process, one.part), 0) + 1 for one in found}
        self._news.extend(one for one in found if self._seen[one.process, one.part] == CONFIRMED)


@jax.jit
def _probe(array: Any) -> Any:
    """A fixed piece of work for one device."""
    for _ in range(PROBE_LENGTH):
        array = jnp.tanh(array @ array)
    return array
