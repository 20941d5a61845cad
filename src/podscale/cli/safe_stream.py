"""A stream for people that bears a full disk: what cannot be written down is lost, and not the run that says it.

Whoever redirects a training's output to a file has that file on a disk, and often on the one that the run fills.
"""

import errno
from typing import Any, TextIO

FULL = (errno.ENOSPC, errno.EDQUOT)


class SafeStream:
    """All that the stream has, but writing and flushing do not fail for want of room."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._bearing(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._bearing(self._stream.flush)

    def _bearing(self, work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except OSError as error:
            if error.errno not in FULL:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
