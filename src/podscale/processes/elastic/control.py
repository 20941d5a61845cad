"""Messages between the launcher of an elastic run and its processes: lines of JSON over a pair of sockets.

A process inherits its end from the launcher, so there is nothing to connect to and no stranger can join. Each side
notices at once that the other one is gone.
"""

import json
import os
import socket
import threading
from contextlib import suppress

from podscale.config.json_types import JsonObject

FD = "PODSCALE_ELASTIC_FD"  # the environment variable with a process's end of the pair
CHUNK_BYTES = 1 << 16


class Connection:
    """One end of a pair of sockets; any thread may send, one receives.

    >>> here, there = map(Connection, socket.socketpair())
    >>> here.send("ready", snapshot=7)
    >>> there.receive()
    [{'kind': 'ready', 'snapshot': 7}]
    >>> here.close()
    >>> there.receive() is None
    True
    >>> there.close()
    """

    def __init__(self, end: socket.socket) -> None:
        self._end, self._lock, self._buffer = end, threading.Lock(), b""

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._end.fileno()

    def send(self, kind: str, **values: object) -> None:
        """Send a message; it is dropped if the other side is gone, which `receive` reports."""
        with self._lock, suppress(OSError):
            self._end.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")

    def receive(self) -> list[JsonObject] | None:
        """Wait for data and return the messages that are complete; None once the other side is gone."""
        try:
            data = self._end.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def shutdown(self) -> None:
        """Let the other side know that nothing more is sent or read."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


def open_inherited() -> Connection | None:
    """Return this process's connection to the launcher; None in a process that no elastic launch has started."""
    number = os.environ.get(FD, "")
    if not number:
        return None
    os.set_inheritable(int(number), False)  # not for the processes that this one starts
    return Connection(socket.socket(fileno=int(number)))
