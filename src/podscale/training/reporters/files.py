"""Reporters that write to the run's folder: journal, trackers, HTML report, list of bad images."""

import errno
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import jax
from rich.console import Console

from podscale.errors import UserError
from podscale.report import mistakes, page
from podscale.runs.events import METRICS, Event, ReporterError
from podscale.runs.folder import Run
from podscale.runs.journal import Journal
from podscale.storage.files import read_lines
from podscale.training.reporters.background import Background
from podscale.training.reporters.progress import print_warning
from podscale.training.reporters.trackers import Tracker, TrackerError, list_trackers, open_tracker

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class JournalReporter:
    """Writes a line to metrics.jsonl for each event.

    Attributes:
        has_space: whether the disk took the last line.
    """

    def __init__(self, run: Run, start: int) -> None:
        self._run, self._start, self.has_space = run, start, False
        self._journal: Journal | None = None

    def __call__(self, event: Event) -> None:
        if event.kind not in METRICS:
            return
        self.has_space = False
        if self._journal is None:  # not before the first event: a run that cannot be compiled keeps its lines
            self._journal = Journal(self._run.folder, self._start)
        self._journal.write(event.kind, event.step, **event.values)
        self.has_space = True

    def close(self) -> None:
        if self._journal:
            self._journal.close()


class TrackerReporter:
    """Passes events to the trackers; what one of them raises does not keep events from the others.

    Some trackers do not survive a full disk, so they get an event only if the journal could be written.
    """

    def __init__(self, run: Run, names: Collection[str], journal: JournalReporter) -> None:
        self._run, self._names, self._journal = run, names, journal
        self._trackers = dict[str, Tracker]()

    def __call__(self, event: Event) -> None:
        if event.kind not in METRICS:
            return
        if event.kind == "start":
            opens = {name: partial(self._open, name) for name in list_trackers(self._names)}
            try:
                _call_all(opens, fatal=UserError)
            finally:
                self._write(event)
        else:
            self._write(event)

    def _write(self, event: Event) -> None:
        if self._journal.has_space:
            _call_all({name: partial(tracker.write, event) for name, tracker in self._trackers.items()})

    def _open(self, name: str) -> None:
        self._trackers[name] = open_tracker(self._run, name)

    def close(self) -> None:
        _call_all({name: tracker.close for name, tracker in self._trackers.items()})


def _call_all(calls: Mapping[str, Callable[[], None]], fatal: type[Exception] | None = None) -> None:
    """Make a call of each tracker, whatever the others raise, unless it is `fatal`.

    Raises:
        OSError: the disk is full.
        TrackerError: at least one failed otherwise; it names them all.
    """
    errors = dict[str, Exception]()
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # other libraries raise anything
            if fatal and isinstance(error, fatal):
                raise
            errors[name] = error
    failed = {name: error for name, error in errors.items() if getattr(error, "errno", None) not in FULL_DISK}
    if failed:
        raise TrackerError(failed) from next(iter(failed.values()))
    if errors:
        raise next(iter(errors.values()))


class PageReporter:
    """Writes the HTML report after every evaluation, in the background, and again in the end."""

    def __init__(self, run: Run, classes: int) -> None:
        self._run, self._classes, self._pages = run, classes, Background()

    def __call__(self, event: Event) -> None:
        if event.kind == "eval":
            self._pages.submit(partial(self._write, event))
        elif event.kind == "end":
            try:
                self._pages.wait()
            finally:
                self._write_page()

    def _write(self, event: Event) -> None:
        predictions, index = event.details["predictions"], event.details["index"]
        with _name_report():
            mistakes.write_mistakes(self._run, event.step, predictions, index, self._classes)
        self._write_page()

    def _write_page(self) -> None:
        with _name_report():
            page.write_report(self._run)

    def close(self) -> None:
        self._pages.close()


@contextmanager
def _name_report() -> Iterator[None]:
    """Turn what the report's code raises, other than errors of the disk, into a `ReporterError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ReporterError("report.html", str(error) or type(error).__name__) from error


class BadImagesReporter:
    """Warns of images that cannot be read, once each, and lists them in the run; each process lists its own."""

    def __init__(self, run: Run, console: Console) -> None:
        self._path, self._console = run.get_bad_images_path(jax.process_index()), console

    def __call__(self, event: Event) -> None:
        if event.kind != "bad images":
            return
        reported = set(read_lines(self._path))
        new = [message for message in event.values["messages"] if message not in reported]
        for message in new:
            print_warning(self._console, message)
        with self._path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{message}\n" for message in new)
