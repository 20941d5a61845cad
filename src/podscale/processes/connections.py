"""Connections of this process: break those to the processes it trains with, and look whether there is one."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FOLDER = "/proc/self/fd"


def break_connections(address: str) -> None:
    """Shut down all connections of this process from or to an address; sockets that listen there stay."""
    for name in os.listdir(FOLDER):
        with suppress(OSError), _open_copy(int(name)) as end:  # no socket, or closed meanwhile
            if _is_stream(end) and address in (end.getsockname()[0], end.getpeername()[0]):
                end.shutdown(socket.SHUT_RDWR)


def has_connection_to(address: str) -> bool:
    """Return whether this process is connected to HOST:PORT.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     name = f"127.0.0.1:{server.getsockname()[1]}"
    ...     with socket.create_connection(server.getsockname()):
    ...         inside = has_connection_to(name)
    >>> inside, has_connection_to(name)
    (True, False)
    """
    host, _, port = address.rpartition(":")
    for name in os.listdir(FOLDER):
        with suppress(OSError), _open_copy(int(name)) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6):
                peer = end.getpeername()
                if (peer[0].removeprefix("::ffff:"), peer[1]) == (host, int(port)):
                    return True
    return False


def _is_stream(end: socket.socket) -> bool:
    """Return whether a socket is one end of a TCP connection, and does not listen."""
    return end.family == socket.AF_INET and not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


@contextmanager
def _open_copy(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket that shares its connection with a descriptor of this process.

    Raises:
        OSError: it is no socket.
    """
    copy = os.dup(descriptor)
    try:
        end = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with end:
        yield end
