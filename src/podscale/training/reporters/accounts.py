"""The accounts of a run: its evaluations, where its time went, and the summary in the end."""

import time
from dataclasses import dataclass

from podscale.config.json_types import JsonObject
from podscale.config.stop_condition import StopCondition
from podscale.errors import UserError
from podscale.forecast.model import Forecast, compare_step
from podscale.plan import Plan
from podscale.processes.group import is_main_process
from podscale.report.metrics import compute_scores, describe_baseline
from podscale.runs.events import Event
from podscale.runs.folder import Run
from podscale.runs.ledger import History, PhaseTimer
from podscale.runs.startup import clock as start_clock
from podscale.storage.files import to_json, write_atomically

Line = JsonObject  # of a run's journal
SUMMARY_WAIT_S, RETRY_S = 30.0, 1.0  # for a disk that is full in the end


@dataclass(frozen=True)
class Session:
    """One session of a run: from the start, or from a checkpoint, to its end or to a fault.

    Attributes:
        run: the run.
        plan: its plan.
        ledger: measures the phases of the session.
        start: the step that it starts from.
        until: stop at the first evaluation that meets this condition.
        forecast: of the plan's step, for known kinds of chips.
    """

    run: Run
    plan: Plan
    ledger: PhaseTimer
    start: int
    until: StopCondition | None = None
    forecast: Forecast | None = None

    def read_past(self) -> list[Line]:
        """Return the journal up to the checkpoint that the session resumes from; later lines do not count."""
        return [line for line in self.run.metrics() if line["step"] <= self.start] if self.start else []


class SummaryNotSavedError(UserError):
    """A run has come to its end and saved its state, but its summary, which is here, could not be written."""

    def __init__(self, message: str, summary: Line) -> None:
        super().__init__(message)
        self.summary = summary


class Accounts:
    """Keeps the evaluations of a run, notes where the time went at every checkpoint, and writes the summary.

    Attributes:
        summary: of a run that has ended.
    """

    def __init__(self, session: Session, past: list[Line]) -> None:
        self._session = session
        self._evals = [line for line in past if line["event"] == "eval"]
        self.earlier_s = _sum_session_seconds(past)
        ledger, parts = session.ledger, _round(start_clock.get_parts())
        self._history = History(session.run.folder, ledger.start_time, session.start, ledger.start_boot, parts)
        self._updates = 0
        self._scores: Line = {}  # of the last evaluation, in the main process
        self.summary: Line = {}
        self._is_summary_written = False

    def __call__(self, event: Event) -> bool:
        """Take an event into account; return whether the stop condition is met."""
        if event.kind == "train":
            self._updates += 1
        elif event.kind == "eval":
            self._evals.append({"step": event.step, **event.values})
            if is_main_process() and event.details:
                labels, classes = event.details["index"].labels, self._session.plan.counts.classes
                self._scores = compute_scores(labels, event.details["predictions"], classes)
        elif event.kind == "save" and is_main_process():
            self._history.record(event.step, self._session.ledger.get_phases())
        elif event.kind == "end":
            self.summary = self._summarize_session(event.step, event.values["seconds"])
            self._write_summary()
        return self.is_target_reached()

    def _write_summary(self) -> None:
        if is_main_process():
            write_atomically(self._session.run.folder / "summary.json", to_json(self.summary, indent=1))
            self._is_summary_written = True

    def ensure_summary(self) -> None:
        """Write the summary if that failed at the end of the run, as soon as the disk takes it.

        Raises:
            SummaryNotSavedError: it was not taken for `SUMMARY_WAIT_S`.
        """
        deadline_s = time.monotonic() + SUMMARY_WAIT_S
        while is_main_process() and not self._is_summary_written:
            try:
                self._write_summary()
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise SummaryNotSavedError(
                        f"{self._session.run.where} did not accept summary.json for {SUMMARY_WAIT_S:.0f} s: "
                        f"{error.strerror or error}; the last checkpoint is there: free space, and the same command "
                        "writes what is missing",
                        self.summary,
                    ) from None
                time.sleep(RETRY_S)

    def is_target_reached(self) -> bool:
        """Whether an evaluation has met the stop condition."""
        until = self._session.until
        return until is not None and any(until.is_reached(evaluation) for evaluation in self._evals)

    def load_past_summary(self) -> Line:
        """Return the summary of a run that has already ended: the one it wrote, or one from its journal."""
        ending = self._summarize(self._session.start, 0.0)
        written = self._session.run.summary()
        if all(written.get(name) == ending.get(name) for name in ("steps", "until", "accuracy")):
            return written
        return ending | {"images_per_s": None, "train_s": self.earlier_s, "seconds": {}}

    def _summarize_session(self, step: int, train_s: float) -> Line:
        session, phases = self._session, self._session.ledger.get_phases()
        busy_s = phases.get("train", 0.0) + phases.get("input wait", 0.0)
        summary = self._summarize(step, phases.get("compile", 0.0)) | {
            "images_per_s": self._updates * session.plan.recipe.batch.size / busy_s if busy_s else None,
            "train_s": self.earlier_s + train_s,
            "seconds": _round(phases),
            "start_seconds": _round(start_clock.get_parts()),
            "run_seconds": _round(self._history.sum_phases(phases)),
            "goodput": self._history.compute_goodput(phases),
        }
        if session.forecast and step > session.start:
            times = (phases.get(name, 0.0) / (step - session.start) for name in ("train", "input wait"))
            summary["step"] = compare_step(session.forecast, *times)
        if self._scores:
            summary |= {name: self._scores[name] for name in ("majority_baseline", "balanced_accuracy")}
            summary["expected_calibration_error"] = self._scores["calibration"]["expected_error"]
            if warning := describe_baseline(summary["accuracy"], self._scores, self._name_classes()):
                summary["warning"] = warning
        return summary

    def _name_classes(self) -> tuple[str, ...]:
        """Return the names of the classes; their numbers if the run's folder is gone, so that there is a result."""
        try:
            return self._session.run.classes()
        except UserError:
            return tuple(map(str, range(self._session.plan.counts.classes)))

    def _summarize(self, step: int, compile_s: float) -> Line:
        run, until, last = self._session.run, self._session.until, self._evals[-1] if self._evals else {}
        summary = {
            "run": run.where,
            "recipe": run.recipe.name,
            "steps": step,
            "accuracy": last.get("accuracy"),
            "accuracy_top5": last.get("accuracy_top5"),
            "accuracy_s": last.get("run_s"),  # from the first batch to this accuracy; saving after it does not count
            "best_accuracy": max((e["accuracy"] for e in self._evals), default=None),
            "compile_s": compile_s,
        }
        if until:
            at = next((e["run_s"] for e in self._evals if until.is_reached(e)), None)
            summary |= {
                "until": {until.metric: until.value},
                "reached": at is not None,
                "reached_s": at,
                "reached_with_compile_s": None if at is None else at + compile_s,
            }
        return summary


def _round(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(s, 3) for name, s in seconds.items()}


def _sum_session_seconds(lines: list[Line]) -> float:
    """Return the seconds of training that earlier sessions of a run logged."""
    total, session = 0.0, 0.0
    for line in lines:
        if line["event"] == "start":
            total, session = total + session, 0.0
        session = line.get("seconds", session)
    return total + session
