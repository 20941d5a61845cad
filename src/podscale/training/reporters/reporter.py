"""What a run tells: metrics.jsonl, trackers, callbacks, the progress line, and where the time went.

Only the first process speaks. Numbers are read from the devices one call late, so that asking never stalls them.
"""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from podscale.config.stop_condition import Until
from podscale.data.index.dataset import Index
from podscale.forecast.model import Forecast, beside
from podscale.plan import Plan
from podscale.processes.group import broadcast_int, is_main_process
from podscale.processes.stragglers import Straggler
from podscale.report import mistakes, page
from podscale.runs.events import Callback, Event
from podscale.runs.folder import Run
from podscale.runs.journal import Journal
from podscale.runs.ledger import History, PhaseTimer
from podscale.storage.files import read_lines, to_json, write_atomically
from podscale.training.nonfinite import NonfiniteCounter
from podscale.training.reporters import trackers
from podscale.training.reporters.background import Background
from podscale.training.reporters.progress import Display, display
from podscale.training.reporters.trackers import Tracker

WARN_AGAIN_S = 60.0  # after which a trouble that lasts is warned of again


class Reporter:
    """Tells of one training as it goes: journal, display and report; and at its end, the summary.

    All processes keep count alike; only the first one writes and shows.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        ledger: PhaseTimer,
        console: Console,
        start: int,
        until: Until | None,
        forecast: Forecast | None = None,
        callbacks: Sequence[Callback] = (),
        track: Collection[str] = (),
    ) -> None:
        self.run, self.plan, self.ledger, self.console = run, plan, ledger, console
        self.until, self._start, self._forecast = until, start, forecast
        # Evaluations of a checkpoint that was lost do not count.
        past = [line for line in run.metrics() if line["step"] <= start] if start else []
        self._evals = [line for line in past if line["event"] == "eval"]
        self._earlier_s = _session_seconds(past)
        self.streak = NonfiniteCounter(plan.recipe.train.bad_updates, past)
        self._waiting: tuple[range, Any] | None = None
        self._images = 0
        self._journal: Journal | None = None
        self._display: Display | None = None
        self._borne: dict[str, float] = {}  # when a trouble was last warned of
        self._history = History(run.folder, ledger.began_at, start)
        self._told = dict[str, float]()  # what the time had gone to when a call was last told of
        self._pages = Background()
        self._callbacks, self._track, self._trackers = callbacks, track, list[Tracker]()
        self._asked_to_stop = False

    def begin(self) -> None:
        """The clock starts: the first batch is about to be asked for."""
        if is_main_process():
            self._journal = Journal(self.run.folder, self._start)
            self._trackers = trackers.opened(self.run, self._track)
        self._display = display(self.console, self.plan.steps, self._start)
        self._write("start", self._start, devices=self.plan.pod.size, kind=self.plan.pod.kind)
        self._told = self.ledger.parts()
        self._began = self._read = time.perf_counter()

    def trained(self, done: range, metrics: Any) -> None:
        """A call was started. Tells of the one before it: reading this one's metrics would wait for it."""
        self.catch_up()
        self._waiting = (done, metrics)

    def catch_up(self) -> None:
        """Waits for the last call and tells of it."""
        if self._waiting is None:
            return
        (done, metrics), self._waiting = self._waiting, None
        found = jax.device_get(metrics)
        images, now = len(done) * self.plan.recipe.batch.size, time.perf_counter()
        rate, self._read = images / (now - self._read), now
        self._images += images
        spent = self._spent(len(done))
        for i, step in enumerate(done):
            values = {name: float(column[i]) for name, column in found._asdict().items()}
            self._write("train", step + 1, **values, images_per_s=rate, spent=spent)
            self.streak.saw(step, skipped=bool(values["skipped"]))
        if self._display:
            self._display.show(done.stop, self._line(done.stop, values, rate))

    def _spent(self, steps: int) -> dict[str, float]:
        """What the time since a call was last told of went to: seconds by part, of each of its steps."""
        before, self._told = self._told, self.ledger.parts()
        shares = {part: (s - before.get(part, 0.0)) / steps for part, s in self._told.items()}
        return {part: round(s, 6) for part, s in shares.items() if s >= 1e-6}

    def _line(self, step: int, values: dict[str, float], rate: float) -> str:
        waited = self.ledger.seconds["input wait"] / max(time.perf_counter() - self._began, 1e-9)
        val = f"val {self._evals[-1]['accuracy']:.2%}  " if self._evals else ""
        return (
            f"epoch {step / self.plan.steps_per_epoch:.1f}  step {step:,}/{self.plan.steps:,}  "
            f"loss {values['loss']:.3f}  train accuracy {values['accuracy']:.1%}  {val}"
            f"{rate:,.0f} images/s  input wait {waited:.0%}"
        )

    def evaluated(self, step: int, found: dict[str, float], answers: NDArray[np.float32], index: Index) -> None:
        """An evaluation, with the time since the first training batch, over restarts; and what it answered."""
        seconds = time.perf_counter() - self._began
        self._evals.append({"step": step, **found, "seconds": seconds, "run_s": self._earlier_s + seconds})
        self._write("eval", step, **{k: v for k, v in self._evals[-1].items() if k != "step"})
        if self._display:
            epoch = step / self.plan.steps_per_epoch
            right = f"{found['accuracy']:.2%} of {found['examples']:,} right"
            self._display.say(f"epoch {epoch:.1f}: {right} after {self._earlier_s + seconds:.1f} s")
        if is_main_process():
            with self.bearing(OSError):
                self._pages.soon(partial(self._show, step, answers, index))

    def _show(self, step: int, answers: NDArray[np.float32], index: Index) -> None:
        mistakes.write(self.run, step, answers, index, self.plan.counts.classes)
        page.write(self.run)

    def met(self, bad_pictures: list[str]) -> None:
        """Tells of pictures that cannot be read, once each, and lists them in the run; each process its own."""
        if not bad_pictures:
            return
        path = self.run.bad_pictures(jax.process_index())
        known = set(read_lines(path))
        fresh = [why for why in bad_pictures if why not in known]
        for why in fresh:
            self.console.print(f"warning: {why}", style="bold red", markup=False, highlight=False)
        with self.bearing(OSError), path.open("a", encoding="utf-8") as file:
            file.writelines(f"{why}\n" for why in fresh)

    def held_up(self, step: int, found: list[Straggler]) -> None:
        """Processes that the others wait for."""
        for slow in found:
            self.console.print(f"warning: {slow.told()}", style="bold red", markup=False, highlight=False)
            self._write("straggler", step, **slow._asdict())

    @contextmanager
    def bearing(self, *kinds: type[Exception]) -> Iterator[None]:
        """Goes on after such an error inside, with a loud warning: a disk that is full now may not stay so."""
        try:
            yield
        except kinds as error:
            why = getattr(error, "strerror", None) or str(error)
            now = time.monotonic()
            if now - self._borne.get(why, -math.inf) > WARN_AGAIN_S:
                self._borne[why] = now
                self.console.print(
                    f"warning: {self.run.folder} takes no more: {why}; training goes on; what is saved stays whole",
                    style="bold red",
                    markup=False,
                    highlight=False,
                )

    def saved(self, step: int) -> None:
        """A checkpoint was begun: whoever goes on from it knows what the time before it went to."""
        if is_main_process():
            with self.bearing(OSError):
                self._history.note(step, self.ledger.parts())

    def resume_clock(self) -> None:
        """Neither evaluation nor saving counts against the training rate."""
        self._read = time.perf_counter()

    def reached(self) -> bool:
        """Whether an evaluation has reached what is aimed for, or a callback wants no more; all processes agree."""
        enough = self.until is not None and any(self.until.reached(e) for e in self._evals)
        return bool(broadcast_int(enough or self._asked_to_stop))

    def summary(self, step: int) -> dict[str, Any]:
        """How the run ended."""
        parts = self.ledger.parts()
        busy_s = parts.get("train", 0.0) + parts.get("input wait", 0.0)
        train_s = time.perf_counter() - self._began
        found = self._ending(step, parts.get("compile", 0.0)) | {
            "images_per_s": self._images / busy_s if busy_s else None,
            "train_s": self._earlier_s + train_s,
            "seconds": {name: round(s, 3) for name, s in parts.items()},
            "run_seconds": {name: round(s, 3) for name, s in self._history.parts(parts).items()},
            "goodput": self._history.goodput(parts),
        }
        if self._forecast and step > self._start:
            done = step - self._start
            times = (parts.get(name, 0.0) / done for name in ("train", "input wait"))
            found["step"] = beside(self._forecast, *times)
        self._write("end", step, seconds=train_s)
        if is_main_process():
            with self.bearing(OSError):
                write_atomically(self.run.folder / "summary.json", to_json(found, indent=1))
                self._pages.wait()
                page.write(self.run)
        return found

    def past_summary(self) -> dict[str, Any]:
        """How a run ended that has nothing left to do: what it wrote then, or what its journal still tells."""
        ending = self._ending(self._start, 0.0)
        written = self.run.summary()
        if all(written.get(name) == ending.get(name) for name in ("steps", "until", "accuracy")):
            return written
        return ending | {"images_per_s": None, "train_s": self._earlier_s, "seconds": {}}

    def _ending(self, step: int, compile_s: float) -> dict[str, Any]:
        last = self._evals[-1] if self._evals else {}
        found = {
            "run": str(self.run.folder),
            "recipe": self.run.recipe.name,
            "steps": step,
            "accuracy": last.get("accuracy"),
            "accuracy_top5": last.get("accuracy_top5"),
            "accuracy_s": last.get("run_s"),  # from the first batch to this accuracy; what is saved after it is apart
            "best_accuracy": max((e["accuracy"] for e in self._evals), default=None),
            "compile_s": compile_s,
        }
        if self.until:
            at = next((e["run_s"] for e in self._evals if self.until.reached(e)), None)
            found |= {
                "until": {self.until.metric: self.until.value},
                "reached": at is not None,
                "reached_s": at,
                "reached_with_compile_s": None if at is None else at + compile_s,
            }
        return found

    def _write(self, event: str, step: int, **values: Any) -> None:
        room = False  # on the disk; trackers write to it, too, and some do not survive a full one
        if self._journal:
            with self.bearing(OSError):
                self._journal.write(event, step, **values)
                room = True
        if is_main_process():
            told = Event(event, step, step / self.plan.steps_per_epoch, values)
            for tracker in self._trackers if room else ():
                with self.bearing(OSError):
                    tracker.write(told)
            wishes = [callback(told) for callback in self._callbacks]
            self._asked_to_stop |= event == "eval" and any(wish is True for wish in wishes)

    def close(self) -> None:
        if self._display:
            self._display.close()
        with self.bearing(OSError):
            self._pages.close()
        if self._journal:
            with self.bearing(OSError):
                self._journal.close()
        for tracker in self._trackers:
            with self.bearing(OSError):
                tracker.close()


def _session_seconds(lines: list[dict[str, Any]]) -> float:
    """Seconds of training that earlier sessions of a run had told of."""
    total, session = 0.0, 0.0
    for line in lines:
        if line["event"] == "start":
            total, session = total + session, 0.0
        session = line.get("seconds", session)
    return total + session
