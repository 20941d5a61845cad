"""Pages written beside the training, so that no device waits for one."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Does one task at a time in a thread. Of those that come while it is busy, only the last is done, at the end.

    >>> told = []
    >>> desk = Background()
    >>> desk.soon(lambda: told.append("a page")); desk.wait()
    >>> told
    ['a page']
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "podscale-report")
        self._doing: Future[object] | None = None
        self._missed: Callable[[], object] | None = None

    def soon(self, task: Callable[[], object]) -> None:
        """Begins the task, unless another is being done; raises what went wrong with the one before."""
        if self._doing is not None and not self._doing.done():
            self._missed = task
            return
        self._missed = None
        try:
            self._settle()
        finally:
            self._doing = self._pool.submit(task)

    def wait(self) -> None:
        """Until all is done; raises what went wrong."""
        self._settle()
        if self._missed is not None:
            task, self._missed = self._missed, None
            task()

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _settle(self) -> None:
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.result()
