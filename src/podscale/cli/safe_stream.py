"""A stream for console output that tolerates a full disk: the output is lost, but the run continues.

A training's output is often redirected to a file on the same disk that the run fills.
"""

import errno
from typing import Any, TextIO

FULL = (errno.ENOSPC, errno.EDQUOT)


class SafeStream:
    """A stream whose `write` and `flush` do not fail when the disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._ignore_full_disk(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._ignore_full_disk(self._stream.flush)

    def _ignore_full_disk(self, work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except OSError as error:
            if error.errno not in FULL:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
