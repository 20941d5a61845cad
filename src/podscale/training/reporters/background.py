"""Write report pages in the background, so that no device waits for one."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs one task at a time in a thread. Of the tasks that come while it is busy, only the last one runs, at the end.

    >>> pages = []
    >>> background = Background()
    >>> background.submit(lambda: pages.append("a page")); background.wait()
    >>> pages
    ['a page']
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "podscale-report")
        self._running: Future[object] | None = None
        self._missed: Callable[[], object] | None = None

    def submit(self, task: Callable[[], object]) -> None:
        """Start the task, unless another is running. Raises what the task before it raised."""
        if self._running is not None and not self._running.done():
            self._missed = task
            return
        self._missed = None
        try:
            self._finish()
        finally:
            self._running = self._pool.submit(task)

    def wait(self) -> None:
        """Wait until everything is done. Raises what a task raised."""
        self._finish()
        if self._missed is not None:
            task, self._missed = self._missed, None
            task()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _finish(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()
