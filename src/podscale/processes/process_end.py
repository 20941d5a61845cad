"""End a process for certain, whatever its disk, its output or its threads are waiting for.

What is still to be said, to a terminal or to a file, may wait for ever: for a disk that is gone, or for a reader that
has stopped. So a timer ends the process first, and then it is said.
"""

import os
import threading
from typing import TextIO

LIMIT_S = 5.0  # for the last words of a process that ends


def end_within(code: int, limit_s: float = LIMIT_S) -> None:
    """End this process with an exit code after some seconds, unless it has ended by then; call it before all else."""
    timer = threading.Timer(limit_s, os._exit, (code,))
    timer.daemon = True
    timer.start()


def flush_or_discard(stream: TextIO) -> None:
    """Flush a stream; if it cannot be written, as on a full disk, drop what it holds and all that follows.

    A stream keeps what it could not write, and would fail again at the next flush, also at that of Python's own end.
    """
    try:
        stream.flush()
    except OSError:
        discard(stream)
        stream.flush()
    except ValueError:  # it is closed
        return


def discard(stream: TextIO) -> None:
    """Point the stream's file at /dev/null, so that all further writes and the stream's buffer are dropped."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
