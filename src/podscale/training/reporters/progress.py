"""How far a training is: a bar on a terminal, a bar in a notebook, a line now and then elsewhere."""

import sys
import time
from html import escape
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from podscale.report.counter import PLAIN_EVERY_S


class Display(Protocol):
    """Shows where training is."""

    def show(self, step: int, text: str) -> None:
        """So many steps are done."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Training is over."""


def display(console: Console, total: int, done: int) -> Display:
    """The one that suits where the process runs: a notebook, a terminal, or neither."""
    if in_notebook() and not console.quiet:
        return Notebook(total, done)
    return Bar(console, total, done) if console.is_terminal else Lines(console, total, done)


class Bar:
    """A progress bar on a terminal."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._console, self._bar = console, Progress(*columns, console=console)
        self._task = self._bar.add_task("first batch", total=total, completed=done)
        self._bar.start()

    def show(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def close(self) -> None:
        self._bar.stop()


class Lines:
    """A line now and then, for logs."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._clock, self._last = console, _Clock(total, done), -PLAIN_EVERY_S

    def show(self, step: int, text: str) -> None:
        if time.monotonic() - self._last >= PLAIN_EVERY_S:
            self._last = time.monotonic()
            self._console.print(f"{text}  {self._clock.left_s(step):.0f} s left", highlight=False)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def close(self) -> None:
        pass


class Notebook:
    """A bar in a notebook's cell, drawn anew in its place, with the evaluations below it."""

    EVERY_S = 0.2

    def __init__(self, total: int, done: int) -> None:
        from IPython.display import HTML, display

        self._html, self._clock, self._total, self._last = HTML, _Clock(total, done), total, 0.0
        self._step, self._text, self._said = done, "first batch", list[str]()
        self._cell: Any = display(HTML(self._drawn()), display_id=True)

    def show(self, step: int, text: str) -> None:
        self._step, self._text = step, f"{text}  {self._clock.left_s(step):.0f} s left"
        if time.monotonic() - self._last >= self.EVERY_S:
            self._update()

    def say(self, text: str) -> None:
        self._said.append(text)
        self._update()

    def close(self) -> None:
        self._update()

    def _update(self) -> None:
        self._last = time.monotonic()
        self._cell.update(self._html(self._drawn()))

    def _drawn(self) -> str:
        bar = f'<progress max="{self._total}" value="{self._step}" style="width: 24em"></progress>'
        said = "".join(f"<br>{escape(line)}" for line in self._said[-12:])
        return f"{bar} {escape(self._text)}{said}"


class _Clock:
    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._began = total, done, time.monotonic()

    def left_s(self, step: int) -> float:
        """Seconds that the rest will take at this rate."""
        return (self._total - step) * (time.monotonic() - self._began) / max(step - self._done, 1)


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"
