"""What a run tells: metrics.jsonl, TensorBoard, the progress line, and where the time went.

Only the first process speaks. Numbers are read from the devices one call late, so that asking never stalls them.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from podscale.run import to_json, whole_lines, write_atomically

PLAIN_EVERY_S = 5.0  # between lines where there is no terminal to draw a bar on


class Ledger:
    """Seconds by part of the work."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Books the time spent inside to `part`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def parts(self) -> dict[str, float]:
        """All parts, with what was booked nowhere as "other"; they sum to the wall time."""
        wall = time.perf_counter() - self.began
        return {**self.seconds, "other": max(wall - sum(self.seconds.values()), 0.0)}


class Journal:
    """metrics.jsonl and the TensorBoard events of a run; a resumed run continues both at its step."""

    def __init__(self, folder: Path, start: int) -> None:
        from tensorboard.summary import Writer  # slow to import, and only needed here

        path = folder / "metrics.jsonl"
        kept = [line for line in whole_lines(path) if json.loads(line)["step"] <= start] if start else []
        write_atomically(path, "".join(f"{line}\n" for line in kept))
        self._file: TextIO = path.open("a")
        self._board = Writer(str(folder / "tensorboard"))

    def write(self, event: str, step: int, **values: Any) -> None:
        """One line, and one point in each curve."""
        self._file.write(to_json({"event": event, "step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


class Display:
    """A progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self.console = console
        self._last = -PLAIN_EVERY_S
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("compiling", total=total, completed=done)
            self._bar.start()

    def show(self, step: int, text: str) -> None:
        """Where training is."""
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
        elif time.monotonic() - self._last >= PLAIN_EVERY_S:
            self._last = time.monotonic()
            self.console.print(text, highlight=False)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def table(title: str, rows: list[tuple[str, str]]) -> Table:
    """Names and values as a small table."""
    grid = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))  # a name of the user's is text, whatever brackets are in it
    return grid
