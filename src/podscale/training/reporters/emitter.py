"""Emit the events of a training, in terms of its loop, to the reporters that subscribe to them.

All processes emit alike; which reporters there are in each is decided where they subscribe (`make.py`).
"""

import errno
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MappingProxyType

import jax
import numpy as np
from numpy.typing import NDArray

from podscale.config.json_types import JsonObject
from podscale.data.index.dataset import Index
from podscale.plan import Plan
from podscale.processes.group import broadcast_int
from podscale.processes.stragglers import Straggler
from podscale.runs.events import Callback, Event, ReporterError
from podscale.runs.folder import Run
from podscale.runs.ledger import PhaseTimer
from podscale.training.step import Metrics

FULL = MappingProxyType(
    {
        os.strerror(code): f"{fault}; checkpoints are not being written"
        for code, fault in ((errno.ENOSPC, "disk full"), (errno.EDQUOT, "disk quota exceeded"))
    }
)
WARN_AGAIN_S = 60.0  # after which a problem that lasts is reported again


class Emitter:
    """Turns what the loop reports into events, and passes each to all reporters in the order of their subscription.

    Args:
        run: the run.
        plan: its plan.
        ledger: measures the phases of this session.
        earlier_s: seconds of training in earlier sessions.
    """

    def __init__(self, run: Run, plan: Plan, ledger: PhaseTimer, earlier_s: float = 0.0) -> None:
        self.run, self.plan, self.ledger = run, plan, ledger
        self._earlier_s = earlier_s
        self._reporters: list[tuple[Callback, bool]] = []
        self._closing = ExitStack()
        self._stop_requested = False
        self._pending: tuple[range, Metrics] | None = None
        self._warned_at = dict[str, float]()  # by problem
        self._logged_phases = dict[str, float]()  # seconds per phase up to the last logged call
        self._start_s = self._last_read_s = time.perf_counter()

    def subscribe(self, reporter: Callback, *, writes: bool = False) -> None:
        """Pass all further events to a reporter, and close it in the end if it has a `close`.

        With `writes`, training goes on with a warning where the disk takes no more, or it raises a `ReporterError`.
        """
        self._reporters.append((reporter, writes))
        if close := getattr(reporter, "close", None):
            self._closing.callback(self._call, close, writes)

    def emit(self, kind: str, step: int, values: JsonObject, **details: object) -> None:
        """Pass an event to all reporters."""
        event = Event(kind, step, step / self.plan.steps_per_epoch, values, details)
        answers = [self._call(partial(reporter, event), writes) for reporter, writes in self._reporters]
        self._stop_requested |= kind == "eval" and any(answer is True for answer in answers)

    def _call(self, work: Callable[[], object], writes: bool) -> object:
        if not writes:
            return work()
        with self.tolerate(OSError, ReporterError):
            return work()
        return None

    def close(self) -> None:
        """Close all reporters, the last one first."""
        self._closing.close()

    # --- what the loop reports ---

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the time spent inside the block for a phase of the session."""
        return self.ledger.measure(name)

    def report_start(self, step: int) -> None:
        """Start the clock: the first batch is about to be loaded."""
        self.emit("start", step, {"devices": self.plan.pod.size, "kind": self.plan.pod.kind})
        self._logged_phases = self.ledger.get_phases()
        self._start_s = self._last_read_s = time.perf_counter()

    def report_call(self, call: range, metrics: Metrics) -> None:
        """Note a call that has started, and report the one before it: reading this one's metrics would wait for it."""
        self.report_pending_call()
        self._pending = (call, metrics)

    def report_pending_call(self) -> None:
        """Wait for the last call and report its updates."""
        if self._pending is None:
            return
        (call, metrics), self._pending = self._pending, None
        columns = jax.device_get(metrics)._asdict()
        images, now = len(call) * self.plan.recipe.batch.size, time.perf_counter()
        rate, self._last_read_s = images / (now - self._last_read_s), now
        spent = self._measure_phases(len(call))
        for i, step in enumerate(call):
            values = {name: float(column[i]) for name, column in columns.items()}
            self.emit(
                "train", step + 1, {**values, "images_per_s": rate, "spent": spent}, ends_call=step + 1 == call.stop
            )

    def _measure_phases(self, steps: int) -> dict[str, float]:
        """Return seconds per phase since the last logged call, for each of this call's steps."""
        before, self._logged_phases = self._logged_phases, self.ledger.get_phases()
        per_step = {phase: (s - before.get(phase, 0.0)) / steps for phase, s in self._logged_phases.items()}
        return {phase: round(s, 6) for phase, s in per_step.items() if s >= 1e-6}

    def report_evaluation(
        self, step: int, result: dict[str, float], predictions: NDArray[np.float32], index: Index
    ) -> None:
        """Report an evaluation, with the time since the first training batch over all sessions."""
        seconds = time.perf_counter() - self._start_s
        values = {**result, "seconds": seconds, "run_s": self._earlier_s + seconds}
        self.emit("eval", step, values, predictions=predictions, index=index)

    def report_checkpoint(self, step: int) -> None:
        """Report a checkpoint; neither it nor the evaluation before it counts against the training rate."""
        self.emit("save", step, {})
        self._last_read_s = time.perf_counter()

    def report_bad_images(self, step: int, messages: list[str]) -> None:
        """Report images that cannot be read."""
        if messages:
            self.emit("bad images", step, {"messages": messages})

    def report_stragglers(self, step: int, stragglers: list[Straggler]) -> None:
        """Report processes that the others wait for."""
        for straggler in stragglers:
            self.warn(straggler.describe(), step)
            self.emit("straggler", step, straggler._asdict())

    def report_end(self, step: int) -> None:
        """Report that the run ends after this step."""
        self.emit("end", step, {"seconds": time.perf_counter() - self._start_s})

    def warn(self, message: str, step: int = 0) -> None:
        """Report that something went wrong, and that training goes on."""
        self.emit("warning", step, {"message": message})

    @contextmanager
    def tolerate(self, *kinds: type[Exception]) -> Iterator[None]:
        """Turn such an error inside the block into a warning: a full disk may have space again later."""
        try:
            yield
        except kinds as error:
            if isinstance(error, ReporterError):
                self._warn_now_and_then(error.source, f"{error}; training continues")
                return
            problem = getattr(error, "strerror", None) or str(error)
            fault = FULL.get(problem, f"cannot be written: {problem}")
            message = f"{self.run.where}: {fault}; existing checkpoints are intact; training continues"
            self._warn_now_and_then(problem, message)

    def _warn_now_and_then(self, problem: str, message: str) -> None:
        now = time.monotonic()
        if now - self._warned_at.get(problem, -math.inf) > WARN_AGAIN_S:
            self._warned_at[problem] = now
            self.warn(message)

    def is_stop_requested(self) -> bool:
        """Whether a reporter has asked to stop at an evaluation; all processes agree."""
        return bool(broadcast_int(self._stop_requested))
