"""Reporters that write to the run's folder: journal, trackers, HTML report, list of bad images."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import jax
from rich.console import Console

from podscale.report import mistakes, page
from podscale.runs.events import METRICS, Event
from podscale.runs.folder import Run
from podscale.runs.journal import Journal
from podscale.storage.files import read_lines
from podscale.training.reporters.background import Background
from podscale.training.reporters.progress import print_warning
from podscale.training.reporters.trackers import Tracker, open_trackers


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
    """Passes events to the trackers, each of which tolerates a full disk by itself.

    Some trackers do not survive a full disk, so they get an event only if the journal could be written.
    """

    def __init__(self, run: Run, names: Collection[str], journal: JournalReporter) -> None:
        self._run, self._names, self._journal = run, names, journal
        self._trackers: list[Tracker] = []

    def __call__(self, event: Event) -> None:
        if event.kind not in METRICS:
            return
        if event.kind == "start":
            self._trackers = open_trackers(self._run, self._names)
        if self._journal.has_space:
            _call_all([partial(tracker.write, event) for tracker in self._trackers])

    def close(self) -> None:
        _call_all([tracker.close for tracker in self._trackers])


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls, whatever the disk does; then raise its first error."""
    errors = []
    for call in calls:
        try:
            call()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


class PageReporter:
    """Writes the HTML report after every evaluation, in the background, and again in the end."""

    def __init__(self, run: Run, classes: int) -> None:
        self._run, self._classes, self._pages = run, classes, Background()

    def __call__(self, event: Event) -> None:
        if event.kind == "eval":
            self._pages.submit(partial(self._write, event))
        elif event.kind == "end":
            self._pages.wait()
            page.write_report(self._run)

    def _write(self, event: Event) -> None:
        predictions, index = event.details["predictions"], event.details["index"]
        mistakes.write_mistakes(self._run, event.step, predictions, index, self._classes)
        page.write_report(self._run)

    def close(self) -> None:
        self._pages.close()


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
