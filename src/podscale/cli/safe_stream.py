"""Output streams that never fail: what cannot be written is dropped, and the run continues.

A training's output is often redirected to a file on the same disk that the run fills, or to a program that ends, or
stops reading, long before the training does. A terminal may be gone, or stopped by Ctrl-S.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

from podscale.processes.process_end import discard, flush_or_discard

FULL = (errno.ENOSPC, errno.EDQUOT)
GONE = (errno.EPIPE, errno.EIO, errno.ESHUTDOWN, errno.ECONNRESET)  # the reader of a pipe or socket, or the terminal
PIECE_CHARS = 1000  # at most PIPE_BUF bytes in UTF-8: a pipe that can be written to takes so much without waiting
PATIENCE_S = 30.0  # in which a reader may begin to read again


class SafeStream:
    """A stream whose `write` and `flush` neither fail nor wait for long.

    Args:
        stream: where the text goes.
        needs_reader: raise BrokenPipeError once nobody reads it any more: all of the command is for its output.
    """

    def __init__(self, stream: TextIO, *, needs_reader: bool = False) -> None:
        self._stream, self._needs_reader, self._patience_s = stream, needs_reader, PATIENCE_S
        self._poll = None if needs_reader else _make_poll(stream)

    def write(self, text: str) -> int:
        for start in range(0, len(text), PIECE_CHARS) if self._poll else ():
            piece = text[start : start + PIECE_CHARS]
            if self._is_ready():
                self._attempt(self._stream.write, piece)
                self._attempt(self._stream.flush)
        if self._poll is None:
            self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        if self._poll is None:
            self._attempt(self._stream.flush)

    def _is_ready(self) -> bool:
        """Return whether the reader takes more. A reader that timed out is not waited for again until it reads."""
        ready = self._poll is None or bool(self._poll.poll(1000 * self._patience_s))
        self._patience_s = PATIENCE_S if ready else 0.0
        return ready

    def _attempt(self, work: Callable[..., object], *arguments: object) -> None:
        try:
            work(*arguments)
        except OSError as error:
            if error.errno in GONE and not self._needs_reader:
                discard(self._stream)
            elif error.errno not in FULL:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _make_poll(stream: TextIO) -> "select.poll | None":
    """Return a poll object for a stream's reader; None for a stream that is no file, or that waits itself."""
    if isinstance(stream, SafeStream) or not hasattr(select, "poll"):
        return None
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError, io.UnsupportedOperation):
        return None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return poll


def open_standard_streams() -> None:
    """Open standard input, output and error on /dev/null where this process was started without them.

    The next files that are opened would otherwise get their numbers, and a library's messages with them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = cast(TextIO, SafeStream(sys.stderr or os.fdopen(2, "w", closefd=False)))


def separate_native_output() -> None:
    """Send what native libraries print to stderr; Python's stdout stays where it is."""
    flush_or_discard(sys.stdout)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
