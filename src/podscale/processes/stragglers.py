"""Find stragglers: which process slows the others down, and by what.

All processes of a run take as long as the slowest one: the others wait for it in the next collective, and all clocks
show the same. So each process measures what only its own slowness can change: how long it waits for its images, how
long it was kept from running at all, and how long its device takes for a fixed amount of work that needs no other
process. The main process compares. The numbers go through the store in the monitor's threads, so that training does not
wait for them. Windows of calls have numbers, and only windows of the same number are compared, each of them once: where
calls take milliseconds, several end before the first of them has arrived.

A machine that is busy with other work delays its processes by chance, now this one and now that one. So only a process
that is slow in several windows one after another, which share no call, is named; and a device is timed by the work that
took least time, and only where no thread of the process had to wait for a core meanwhile.
"""

import json
import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from podscale.processes.host import measure_run_delay
from podscale.processes.key_value_store import KeyValueStore
from podscale.processes.monitor import TICK_S

PACE = "podscale/pace"  # key of the store
WINDOW = 4  # calls that a process's pace is the mean of; each call belongs to one window
CONFIRMATIONS = 3  # consecutive windows that must agree
PUBLISHED = 16  # windows, the last ones: as many may end before the main process compares them
SLOW_SHARE = 0.3  # of a call's time: a process that waits, or is stalled, for this much longer than others is slow
SLOW_DEVICE_RATIO = 1.8  # a device that takes this many times as long as the others is slow
DELAYED_SHARE = 0.05  # of the time that the device takes: a probe whose threads waited longer for a core is discarded
WARM_UP = 3  # calls that are not measured: the first of everything takes longer
FIRST_PROBES = 12  # calls at the start after each of which the device is timed
SLOW_CALL_RATIO = 1.4  # a call that takes this many times the usual has the devices timed again
PROBE_SIDE = MappingProxyType({"cpu": 192})  # of a matrix; other devices multiply larger ones
PROBE_LENGTH = 8


class Pace(NamedTuple):
    """Seconds per call that one process took by itself; `probe_s` is the least for the fixed amount of work."""

    process: int
    host: str
    call_s: float
    input_s: float
    stalled_s: float
    probe_s: float | None = None  # None: not timed


Windows = Sequence[tuple[int, Pace]]  # the last windows of one process, each with its number


class Straggler(NamedTuple):
    """A process that slows the others down; the fields are written to metrics.jsonl."""

    process: int
    host: str
    part: str
    own_s: float
    others_s: float

    def describe(self) -> str:
        """Return it as a sentence.

        >>> Straggler(2, "n3", "input", 0.31, 0.02).describe()
        'process 2 on n3 is a straggler: it waits 0.310 s per call for its images, the others 0.020 s'
        """
        details = {
            "input": "it waits {own:.3f} s per call for its images, the others {others:.3f} s",
            "host": "it could not run for {own:.3f} s per call (stopped, swapped or overloaded), "
            "the others for {others:.3f} s",
            "step": "its device takes {own:.4f} s for what the others' do in {others:.4f} s",
        }[self.part].format(own=self.own_s, others=self.others_s)
        return f"process {self.process} on {self.host} is a straggler: {details}"


def find_stragglers(paces: Sequence[Pace]) -> list[Straggler]:
    """Return the processes that are slower than the others, each with the part that is slowest.

    >>> usual = [Pace(n, "a", 0.3, 0.01, 0.01, 0.005) for n in range(3)]
    >>> [straggler.part for straggler in find_stragglers([*usual, Pace(3, "b", 0.3, 0.22, 0.01, 0.005)])]
    ['input']
    """
    stragglers: list[Straggler] = []
    if len(paces) < 2:
        return stragglers
    limit_s = SLOW_SHARE * statistics.median(pace.call_s for pace in paces)
    input_s = statistics.median_low(pace.input_s for pace in paces)
    stalled_s = statistics.median_low(pace.stalled_s for pace in paces)
    probes = [pace.probe_s for pace in paces if pace.probe_s is not None]
    probe_s = statistics.median_low(probes) if len(probes) == len(paces) else None
    for pace in paces:
        stalls_s = pace.stalled_s - stalled_s
        waits_s = pace.input_s - input_s - max(stalls_s, 0.0)  # a stalled process waits for everything it does
        if max(stalls_s, waits_s) > limit_s:
            slow = ("host", pace.stalled_s, stalled_s) if stalls_s > waits_s else ("input", pace.input_s, input_s)
            stragglers.append(Straggler(pace.process, pace.host, *slow))
        elif pace.probe_s is not None and probe_s is not None and pace.probe_s > SLOW_DEVICE_RATIO * probe_s:
            stragglers.append(Straggler(pace.process, pace.host, "step", pace.probe_s, probe_s))
    return stragglers


class StragglerCheck:
    """Measures this process and, in the main process, compares all; a monitor polls it. Alone, it does nothing."""

    def __init__(self) -> None:
        self._is_active = jax.process_count() > 1
        self._calls = self._measured_calls = 0
        self._window: list[tuple[float, float, float, float | None]] = []
        self._paces: Windows = ()
        self._ended = self._exchanged = -1  # the last window that has ended, and that needs no further exchange
        self._call_times: deque[float] = deque(maxlen=64)
        self._last: tuple[float, float, float] | None = None
        self._polled_at: float | None = None
        self._stalled_s = 0.0
        self._new: deque[Straggler] = deque()
        self._seen: dict[tuple[int, str], int] = {}
        if self._is_active:
            side = PROBE_SIDE.get(jax.local_devices()[0].platform, 2048)
            self._work = jnp.ones((side, side), jnp.float32, device=jax.local_devices()[0])
            self._time_device()  # compiles

    def record_call(self, input_wait_s: float, metrics: PyTree) -> None:
        """Record that a call of the compiled program was started.

        Args:
            input_wait_s: seconds that this process has waited for images, since the start of the run.
            metrics: results of the call; they are waited for when the device is to be timed.
        """
        if not self._is_active:
            return
        now = (time.perf_counter(), input_wait_s, self._stalled_s)
        self._calls += 1
        if self._last and self._calls > WARM_UP:
            call_s, input_s, stalled_s = (new - old for new, old in zip(now, self._last, strict=True))
            usual_s = statistics.median(self._call_times) if self._call_times else call_s
            probe_s = None
            if self._measured_calls < FIRST_PROBES or call_s > SLOW_CALL_RATIO * usual_s:
                jax.block_until_ready(metrics)
                probe_s = self._time_device()
            self._call_times.append(call_s)
            self._measured_calls += 1
            self.add_call(call_s, input_s, stalled_s, probe_s)
        self._last = (time.perf_counter(), input_wait_s, self._stalled_s)

    def add_call(self, call_s: float, input_s: float, stalled_s: float, probe_s: float | None) -> Pace | None:
        """Add what one call took to the current window; return the window's pace if that completes it."""
        self._window.append((call_s, input_s, stalled_s, probe_s))
        if len(self._window) < WINDOW:
            return None
        call_s, input_s, stalled_s = (statistics.fmean(column) for column in list(zip(*self._window, strict=True))[:3])
        probes = [probe_s for *_, probe_s in self._window if probe_s is not None]
        fastest_s = min(probes) if len(probes) >= WINDOW // 2 else None
        pace = Pace(jax.process_index(), socket.gethostname(), call_s, input_s, stalled_s, fastest_s)
        self._window = []
        self._paces = (*self._paces, (self._ended + 1, pace))[-PUBLISHED:]
        self._ended += 1
        return pace

    def pop_new(self) -> list[Straggler]:
        """Return the stragglers that were found since the last call; only in the main process."""
        return [self._new.popleft() for _ in range(len(self._new))]

    def _time_device(self) -> float | None:
        """Return seconds for the fixed amount of work; None if threads had to wait for a core meanwhile."""
        delayed_s, start = measure_run_delay(), time.perf_counter()
        jax.block_until_ready(_run_probe(self._work))
        took_s = time.perf_counter() - start
        return took_s if measure_run_delay() - delayed_s < DELAYED_SHARE * took_s else None

    # --- called by the monitor ---

    def poll(self, now: float) -> bool:
        """Sum the time by which polls come too late: then this process was not running."""
        if self._polled_at is not None:
            self._stalled_s += max(now - self._polled_at - TICK_S, 0.0)
        self._polled_at = now
        return self._ended > self._exchanged

    def exchange(self, store: KeyValueStore) -> None:
        """Publish the paces of the last windows; the main process compares those of all."""
        number, ended = jax.process_index(), self._ended
        store.set(f"{PACE}/{number}", json.dumps(self._paces))
        if number:
            self._exchanged = ended
            return
        published = store.list_by_process(PACE)
        if all(process in published for process in range(jax.process_count())):
            self.compare([json.loads(published[process]) for process in range(jax.process_count())])

    def compare(self, published: Sequence[Windows]) -> None:
        """Compare the windows that all processes have published and that were not compared before."""
        by_number = [dict(windows) for windows in published]
        for number in sorted(set.intersection(*map(set, by_number))):
            if number > self._exchanged:
                self._note(find_stragglers([Pace(*windows[number]) for windows in by_number]))
                self._exchanged = number

    def _note(self, stragglers: list[Straggler]) -> None:
        """Keep stragglers that several comparisons agree on: one may be chance. Each is reported once until it ends."""
        self._seen = {(s.process, s.part): self._seen.get((s.process, s.part), 0) + 1 for s in stragglers}
        self._new.extend(s for s in stragglers if self._seen[s.process, s.part] == CONFIRMATIONS)


@jax.jit
def _run_probe(array: jax.Array) -> jax.Array:
    """Do a fixed amount of work on one device."""
    for _ in range(PROBE_LENGTH):
        array = jnp.tanh(array @ array)
    return array
