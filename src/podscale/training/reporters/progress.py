"""Show the progress of a training: a bar on a terminal or in a notebook, a line now and then elsewhere."""

import time
from html import escape
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from podscale.plan import Plan
from podscale.report.counter import LINE_INTERVAL_S
from podscale.report.notebook import is_notebook
from podscale.runs.events import Event
from podscale.runs.ledger import PhaseTimer


class ProgressReporter:
    """Prints how far a training is, its evaluations and warnings, to a console that other processes have muted."""

    def __init__(self, plan: Plan, ledger: PhaseTimer, console: Console, start: int) -> None:
        self._plan, self._ledger, self._console, self._start = plan, ledger, console, start
        self._display: Display | None = None
        self._accuracy = ""  # of the newest evaluation, as the bar shows it
        self._update_event: Event | None = None  # of the newest update
        self._start_s = time.perf_counter()

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self._display = make_display(self._console, self._plan.steps, self._start)
            self._start_s = time.perf_counter()
        elif event.kind == "warning":
            print_warning(self._console, event.values["message"])
        elif self._display and event.kind == "train" and event.details["ends_call"]:
            self._update_event = event
            self._show_progress()
        elif self._display and event.kind == "eval":
            self._accuracy = f"val {event.values['accuracy']:.2%}  "
            images = f"({event.values['examples']:,} images)"
            accuracy = f"validation accuracy {event.values['accuracy']:.2%} {images}"
            self._display.print_line(f"epoch {event.epoch:.1f}: {accuracy}, {event.values['run_s']:.1f} s")
            self._show_progress()

    def _show_progress(self) -> None:
        if self._display and self._update_event:
            self._display.update(self._update_event.step, self._format_progress(self._update_event))

    def _format_progress(self, event: Event) -> str:
        waited = self._ledger.seconds["input wait"] / max(time.perf_counter() - self._start_s, 1e-9)
        values = event.values
        return (  # the most important first: a narrow terminal cuts off the end
            f"step {event.step:,}/{self._plan.steps:,}  loss {values['loss']:.3f}  {self._accuracy}"
            f"{values['images_per_s']:,.0f} images/s  epoch {event.epoch:.1f}  "
            f"train accuracy {values['accuracy']:.1%}  input wait {waited:.0%}"
        )

    def close(self) -> None:
        if self._display:
            self._display.close()


def print_warning(console: Console, message: str) -> None:
    """Print a warning, in red where there are colors."""
    console.print(f"warning: {message}", style="bold red", markup=False, highlight=False)


class Display(Protocol):
    """Shows how far a training is."""

    def update(self, step: int, text: str) -> None:
        """Show that this many steps are done."""

    def print_line(self, text: str) -> None:
        """Print a line that stays."""

    def close(self) -> None:
        """End the display: training is over."""


def make_display(console: Console, total: int, done: int) -> Display:
    """Return the display that suits where the process runs: a notebook, a terminal, or neither."""
    if is_notebook() and not console.quiet:
        return Notebook(total, done)
    return Bar(console, total, done) if console.is_terminal else Lines(console, total, done)


class Bar:
    """A progress bar on a terminal."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        bar_width = 40 if console.width >= 140 else 12
        columns = (  # without a minimum, a long text would squeeze out bar and time on a narrow terminal
            BarColumn(bar_width, table_column=Column(min_width=bar_width)),
            TimeRemainingColumn(table_column=Column(min_width=len("0:00:00"))),
            TextColumn("left  {task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        )
        self._console, self._bar = console, Progress(*columns, console=console, expand=True)
        self._task = self._bar.add_task("first batch", total=total, completed=done)
        self._bar.start()

    def update(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text)

    def print_line(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def close(self) -> None:
        self._bar.stop()


class Lines:
    """A line now and then, for logs."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._clock, self._last = console, _Clock(total, done), -LINE_INTERVAL_S

    def update(self, step: int, text: str) -> None:
        if time.monotonic() - self._last >= LINE_INTERVAL_S:
            self._last = time.monotonic()
            self._console.print(
                f"{text}  {format_duration(self._clock.estimate_remaining_s(step))} left", highlight=False
            )

    def print_line(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def close(self) -> None:
        pass


class Notebook:
    """A bar in a notebook's cell, updated in place, with the evaluations below it."""

    UPDATE_INTERVAL_S = 0.2

    def __init__(self, total: int, done: int) -> None:
        from IPython.display import HTML, display

        self._html, self._clock, self._total, self._last = HTML, _Clock(total, done), total, 0.0
        self._step, self._text, self._lines = done, "first batch", list[str]()
        self._cell: Any = display(HTML(self._render()), display_id=True)

    def update(self, step: int, text: str) -> None:
        self._step, self._text = step, f"{text}  {format_duration(self._clock.estimate_remaining_s(step))} left"
        if time.monotonic() - self._last >= self.UPDATE_INTERVAL_S:
            self._update()

    def print_line(self, text: str) -> None:
        self._lines.append(text)
        self._update()

    def close(self) -> None:
        self._update()

    def _update(self) -> None:
        self._last = time.monotonic()
        self._cell.update(self._html(self._render()))

    def _render(self) -> str:
        bar = f'<progress max="{self._total}" value="{self._step}" style="width: 24em"></progress>'
        lines = "".join(f"<br>{escape(line)}" for line in self._lines[-12:])
        return f"{bar} {escape(self._text)}{lines}"


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds.

    >>> format_duration(86399.6), format_duration(75)
    ('24:00:00', '0:01:15')
    """
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{remainder:02}"


class _Clock:
    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._start_s = total, done, time.monotonic()

    def estimate_remaining_s(self, step: int) -> float:
        """Return the seconds that the remaining steps take at this rate."""
        return (self._total - step) * (time.monotonic() - self._start_s) / max(step - self._done, 1)
