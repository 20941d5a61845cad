"""Choose the reporters of a session."""

from collections.abc import Collection, Sequence

from rich.console import Console

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.processes.group import is_main_process
from podscale.runs.events import KINDS, METRICS, Callback, Event
from podscale.training.reporters.accounts import Session
from podscale.training.reporters.emitter import Emitter
from podscale.training.reporters.files import BadImagesReporter, JournalReporter, PageReporter, TrackerReporter
from podscale.training.reporters.progress import ProgressReporter


class CallbackReporter:
    """Passes to a callback of the user the kinds of events that it asks for, and closes it if it has a `close`."""

    def __init__(self, callback: Callback) -> None:
        self._callback, self._kinds, self._is_closed = callback, _get_kinds(callback), False

    def __call__(self, event: Event) -> object:
        return self._callback(event) if event.kind in self._kinds and not self._is_closed else None

    def close(self) -> None:
        self._is_closed = True  # what other reporters fail to close is not reported to it
        if close := getattr(self._callback, "close", None):
            close()


def _get_kinds(callback: Callback) -> tuple[str, ...]:
    return tuple(getattr(callback, "kinds", METRICS))


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise a `UserError` at the first callback that asks for events of an unknown kind."""
    for kind in (kind for callback in callbacks for kind in _get_kinds(callback)):
        if kind not in KINDS:
            raise UserError(f"a callback asks for events of kind {kind!r}: {suggest_names(kind, KINDS)}")


def subscribe_reporters(
    events: Emitter, session: Session, console: Console, callbacks: Sequence[Callback], track: Collection[str]
) -> None:
    """Subscribe all reporters but the accounts: those of every process, and those of the main process alone."""
    run, journal = session.run, JournalReporter(session.run, session.start)
    if is_main_process():
        events.subscribe(journal, writes=True)
        events.subscribe(TrackerReporter(run, track, journal), writes=True)
        for callback in callbacks:
            events.subscribe(CallbackReporter(callback), writes=bool(getattr(callback, "writes", False)))
    events.subscribe(ProgressReporter(session.plan, session.ledger, console, session.start))
    events.subscribe(BadImagesReporter(run, console), writes=True)
    if is_main_process():
        events.subscribe(PageReporter(run, session.plan.counts.classes), writes=True)
