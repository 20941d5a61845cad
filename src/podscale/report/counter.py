"""Show the progress of scanning or preparing a data set, without importing JAX."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 5.0  # between lines, where there is no terminal to draw a bar on


@contextmanager
def show_progress(console: Console, activity: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that reports progress: a transient bar on a terminal, a line every few seconds elsewhere.

    Args:
        console: where to report.
        activity: the verb before the name of what is counted, such as "indexing"; empty if the name begins with one.

    Yields:
        A function of the name of what is counted, the number done, and the total.
    """
    last = time.monotonic()  # a short count gets no line

    def print_line(name: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_INTERVAL_S:
            last = time.monotonic()
            console.print(f"{activity} {name}: {done:,} of {total:,}".strip(), highlight=False)

    if not console.is_terminal:
        yield print_line
        return
    columns = (BarColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", visible=False)

        def move_bar(name: str, done: int, total: int) -> None:
            bar.update(task, description=f"{activity} {name}".strip(), completed=done, total=total, visible=True)

        yield move_bar
