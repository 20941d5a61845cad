"""Report a training: metrics.jsonl, trackers, callbacks, the progress line, and where the time went.

Only the main process reports. Metrics are read from the devices one call late, so that reading never stalls them.
"""

import errno
import math
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from podscale.config.stop_condition import StopCondition
from podscale.data.index.dataset import Index
from podscale.forecast.model import Forecast, compare_step
from podscale.plan import Plan
from podscale.processes.group import broadcast_int, is_main_process
from podscale.processes.stragglers import Straggler
from podscale.report import mistakes, page
from podscale.runs.events import Callback, Event
from podscale.runs.folder import Run
from podscale.runs.journal import Journal
from podscale.runs.ledger import History, PhaseTimer
from podscale.runs.startup import clock as start_clock
from podscale.storage.files import read_lines, to_json, write_atomically
from podscale.training.nonfinite import NonfiniteCounter
from podscale.training.reporters import trackers
from podscale.training.reporters.background import Background
from podscale.training.reporters.progress import Display, make_display
from podscale.training.reporters.trackers import Tracker

FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
WARN_AGAIN_S = 60.0  # after which a problem that lasts is reported again


class Reporter:
    """Reports one training as it runs to journal, display and report page; at its end, writes the summary.

    All processes count alike; only the main process writes and prints.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        ledger: PhaseTimer,
        console: Console,
        start: int,
        until: StopCondition | None,
        forecast: Forecast | None = None,
        callbacks: Sequence[Callback] = (),
        track: Collection[str] = (),
    ) -> None:
        self.run, self.plan, self.ledger, self.console = run, plan, ledger, console
        self.until, self._start, self._forecast = until, start, forecast
        # Evaluations after the checkpoint that the run resumes from do not count.
        past = [line for line in run.metrics() if line["step"] <= start] if start else []
        self._evals = [line for line in past if line["event"] == "eval"]
        self._earlier_s = _sum_session_seconds(past)
        self.nonfinite = NonfiniteCounter(plan.recipe.train.bad_updates, past)
        self._pending: tuple[range, Any] | None = None
        self._images = 0
        self._journal: Journal | None = None
        self._display: Display | None = None
        self._warned_at: dict[str, float] = {}  # by problem
        self._history = History(
            run.folder, ledger.start_time, start, ledger.start_boot, _round(start_clock.get_parts())
        )
        self._logged_phases = dict[str, float]()  # seconds per phase up to the last logged call
        self._pages = Background()
        self._callbacks, self._track, self._trackers = callbacks, track, list[Tracker]()
        self._stop_requested = False

    def start(self) -> None:
        """Open journal, trackers and display, and start the clock; the first batch is about to be loaded."""
        if is_main_process():
            self._journal = Journal(self.run.folder, self._start)
            self._trackers = trackers.open_trackers(self.run, self._track)
        self._display = make_display(self.console, self.plan.steps, self._start)
        self._write("start", self._start, devices=self.plan.pod.size, kind=self.plan.pod.kind)
        self._logged_phases = self.ledger.get_phases()
        self._start_s = self._last_read_s = time.perf_counter()

    def record_call(self, call: range, metrics: Any) -> None:
        """Note a call that has started, and report the one before it: reading this one's metrics would wait for it."""
        self.report_pending_call()
        self._pending = (call, metrics)

    def report_pending_call(self) -> None:
        """Wait for the last call and report it."""
        if self._pending is None:
            return
        (call, metrics), self._pending = self._pending, None
        columns = jax.device_get(metrics)._asdict()
        images, now = len(call) * self.plan.recipe.batch.size, time.perf_counter()
        rate, self._last_read_s = images / (now - self._last_read_s), now
        self._images += images
        spent = self._measure_phases(len(call))
        for i, step in enumerate(call):
            values = {name: float(column[i]) for name, column in columns.items()}
            self._write("train", step + 1, **values, images_per_s=rate, spent=spent)
            self.nonfinite.record(step, skipped=bool(values["skipped"]))
        if self._display:
            self._display.update(call.stop, self._format_progress(call.stop, values, rate))

    def _measure_phases(self, steps: int) -> dict[str, float]:
        """Return seconds per phase since the last logged call, for each of this call's steps."""
        before, self._logged_phases = self._logged_phases, self.ledger.get_phases()
        per_step = {phase: (s - before.get(phase, 0.0)) / steps for phase, s in self._logged_phases.items()}
        return {phase: round(s, 6) for phase, s in per_step.items() if s >= 1e-6}

    def _format_progress(self, step: int, values: dict[str, float], rate: float) -> str:
        waited = self.ledger.seconds["input wait"] / max(time.perf_counter() - self._start_s, 1e-9)
        val = f"val {self._evals[-1]['accuracy']:.2%}  " if self._evals else ""
        return (
            f"epoch {step / self.plan.steps_per_epoch:.1f}  step {step:,}/{self.plan.steps:,}  "
            f"loss {values['loss']:.3f}  train accuracy {values['accuracy']:.1%}  {val}"
            f"{rate:,.0f} images/s  input wait {waited:.0%}"
        )

    def report_evaluation(
        self, step: int, result: dict[str, float], predictions: NDArray[np.float32], index: Index
    ) -> None:
        """Report an evaluation, with the time since the first training batch over all sessions, and its mistakes."""
        seconds = time.perf_counter() - self._start_s
        self._evals.append({"step": step, **result, "seconds": seconds, "run_s": self._earlier_s + seconds})
        self._write("eval", step, **{k: v for k, v in self._evals[-1].items() if k != "step"})
        if self._display:
            epoch = step / self.plan.steps_per_epoch
            accuracy = f"validation accuracy {result['accuracy']:.2%} ({result['examples']:,} images)"
            self._display.print_line(f"epoch {epoch:.1f}: {accuracy} after {self._earlier_s + seconds:.1f} s")
        if is_main_process():
            with self.warn_on(OSError):
                self._pages.submit(partial(self._write_report, step, predictions, index))

    def _write_report(self, step: int, predictions: NDArray[np.float32], index: Index) -> None:
        mistakes.write_mistakes(self.run, step, predictions, index, self.plan.counts.classes)
        page.write_report(self.run)

    def report_bad_images(self, messages: list[str]) -> None:
        """Warn of images that cannot be read, once each, and list them in the run; each process lists its own."""
        if not messages:
            return
        path = self.run.get_bad_images_path(jax.process_index())
        reported = set(read_lines(path))
        new = [message for message in messages if message not in reported]
        for message in new:
            self.console.print(f"warning: {message}", style="bold red", markup=False, highlight=False)
        with self.warn_on(OSError), path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{message}\n" for message in new)

    def report_stragglers(self, step: int, stragglers: list[Straggler]) -> None:
        """Warn of processes that the others wait for."""
        for straggler in stragglers:
            self.console.print(f"warning: {straggler.describe()}", style="bold red", markup=False, highlight=False)
            self._write("straggler", step, **straggler._asdict())

    @contextmanager
    def warn_on(self, *kinds: type[Exception]) -> Iterator[None]:
        """Continue after such an error inside the block, with a warning: a disk that is full now may not stay so."""
        try:
            yield
        except kinds as error:
            problem = getattr(error, "strerror", None) or str(error)
            now = time.monotonic()
            if now - self._warned_at.get(problem, -math.inf) > WARN_AGAIN_S:
                self._warned_at[problem] = now
                fault = "takes no more" if problem in FULL else "cannot be written"
                self.console.print(
                    f"warning: {self.run.folder} {fault}: {problem}; training goes on; what is saved stays whole",
                    style="bold red",
                    markup=False,
                    highlight=False,
                )

    def record_checkpoint(self, step: int) -> None:
        """Store where the time went up to this checkpoint, for the session that resumes from it."""
        if is_main_process():
            with self.warn_on(OSError):
                self._history.record(step, self.ledger.get_phases())

    def restart_rate_clock(self) -> None:
        """Start measuring the training rate again: neither evaluation nor saving counts against it."""
        self._last_read_s = time.perf_counter()

    def is_target_reached(self) -> bool:
        """Whether an evaluation has met the stop condition, or a callback asked to stop; all processes agree."""
        reached = self.until is not None and any(self.until.is_reached(e) for e in self._evals)
        return bool(broadcast_int(reached or self._stop_requested))

    def write_summary(self, step: int) -> dict[str, Any]:
        """Write and return the summary of a run that ends after this step."""
        phases = self.ledger.get_phases()
        busy_s = phases.get("train", 0.0) + phases.get("input wait", 0.0)
        train_s = time.perf_counter() - self._start_s
        summary = self._summarize(step, phases.get("compile", 0.0)) | {
            "images_per_s": self._images / busy_s if busy_s else None,
            "train_s": self._earlier_s + train_s,
            "seconds": _round(phases),
            "start_seconds": _round(start_clock.get_parts()),
            "run_seconds": _round(self._history.sum_phases(phases)),
            "goodput": self._history.compute_goodput(phases),
        }
        if self._forecast and step > self._start:
            steps = step - self._start
            times = (phases.get(name, 0.0) / steps for name in ("train", "input wait"))
            summary["step"] = compare_step(self._forecast, *times)
        self._write("end", step, seconds=train_s)
        if is_main_process():
            with self.warn_on(OSError):
                write_atomically(self.run.folder / "summary.json", to_json(summary, indent=1))
                self._pages.wait()
                page.write_report(self.run)
        return summary

    def load_past_summary(self) -> dict[str, Any]:
        """Return the summary of a run that has already ended: the one it wrote, or one from its journal."""
        ending = self._summarize(self._start, 0.0)
        written = self.run.summary()
        if all(written.get(name) == ending.get(name) for name in ("steps", "until", "accuracy")):
            return written
        return ending | {"images_per_s": None, "train_s": self._earlier_s, "seconds": {}}

    def _summarize(self, step: int, compile_s: float) -> dict[str, Any]:
        last = self._evals[-1] if self._evals else {}
        summary = {
            "run": str(self.run.folder),
            "recipe": self.run.recipe.name,
            "steps": step,
            "accuracy": last.get("accuracy"),
            "accuracy_top5": last.get("accuracy_top5"),
            "accuracy_s": last.get("run_s"),  # from the first batch to this accuracy; saving after it does not count
            "best_accuracy": max((e["accuracy"] for e in self._evals), default=None),
            "compile_s": compile_s,
        }
        if self.until:
            at = next((e["run_s"] for e in self._evals if self.until.is_reached(e)), None)
            summary |= {
                "until": {self.until.metric: self.until.value},
                "reached": at is not None,
                "reached_s": at,
                "reached_with_compile_s": None if at is None else at + compile_s,
            }
        return summary

    def _write(self, event: str, step: int, **values: Any) -> None:
        has_space = False  # on the disk; trackers write to it too, and some do not survive a full one
        if self._journal:
            with self.warn_on(OSError):
                self._journal.write(event, step, **values)
                has_space = True
        if is_main_process():
            record = Event(event, step, step / self.plan.steps_per_epoch, values)
            for tracker in self._trackers if has_space else ():
                with self.warn_on(OSError):
                    tracker.write(record)
            answers = [callback(record) for callback in self._callbacks]
            self._stop_requested |= event == "eval" and any(answer is True for answer in answers)

    def close(self) -> None:
        """Close display, report, journal and trackers."""
        if self._display:
            self._display.close()
        with self.warn_on(OSError):
            self._pages.close()
        if self._journal:
            with self.warn_on(OSError):
                self._journal.close()
        for tracker in self._trackers:
            with self.warn_on(OSError):
                tracker.close()


def _round(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(s, 3) for name, s in seconds.items()}


def _sum_session_seconds(lines: list[dict[str, Any]]) -> float:
    """Return the seconds of training that earlier sessions of a run logged."""
    total, session = 0.0, 0.0
    for line in lines:
        if line["event"] == "start":
            total, session = total + session, 0.0
        session = line.get("seconds", session)
    return total + session
