"""Choose the reporters of a session."""

from collections.abc import Collection, Sequence

from rich.console import Console

from podscale.processes.group import is_main_process
from podscale.runs.events import Callback
from podscale.training.reporters.accounts import Session
from podscale.training.reporters.emitter import Emitter, select_metrics
from podscale.training.reporters.files import BadImagesReporter, JournalReporter, PageReporter, TrackerReporter
from podscale.training.reporters.progress import ProgressReporter


def subscribe_reporters(
    events: Emitter, session: Session, console: Console, callbacks: Sequence[Callback], track: Collection[str]
) -> None:
    """Subscribe all reporters but the accounts: those of every process, and those of the main process alone."""
    run, journal = session.run, JournalReporter(session.run, session.start)
    if is_main_process():
        events.subscribe(journal, writes=True)
        events.subscribe(TrackerReporter(run, track, journal), writes=True)
        for callback in callbacks:
            events.subscribe(select_metrics(callback))
    events.subscribe(ProgressReporter(session.plan, session.ledger, console, session.start))
    events.subscribe(BadImagesReporter(run, console), writes=True)
    if is_main_process():
        events.subscribe(PageReporter(run, session.plan.counts.classes), writes=True)
