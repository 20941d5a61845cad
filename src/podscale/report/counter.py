"""How far a long count is: of what is scanned, or prepared. It needs no JAX."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 5.0  # between lines where there is no terminal to draw a bar on


@contextmanager
def counting(console: Console, doing: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Tells what is counted, how many are done and of how many: by a bar that goes away again, or a line now and then.

    `doing` is the verb before what is counted, unless that begins with one of its own.
    """
    last = time.monotonic()  # a short count is not worth a line
    columns = (BarColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False)

        def tell(what: str, done: int, total: int) -> None:
            nonlocal last
            text = f"{doing} {what}".strip()
            bar.update(task, description=text, completed=done, total=total, visible=True)
            if not console.is_terminal and time.monotonic() - last >= PLAIN_EVERY_S:
                last = time.monotonic()
                console.print(f"{text}: {done:,} of {total:,}", highlight=False)

        yield tell
