"""Connections between processes are broken; others stay."""

import socket

from podscale.processes.connections import break_connections

ADDRESS = "127.107.31.6"


def test_only_connections_of_the_address_are_broken():
    with socket.socket() as listener, socket.socket() as other:
        listener.bind((ADDRESS, 0))
        other.bind(("127.0.0.1", 0))
        ends = []
        for server in (listener, other):
            server.listen()
            ends.append((socket.create_connection(server.getsockname()), server.accept()[0]))
        break_connections(ADDRESS)
        assert [end.recv(1) for end in ends[0]] == [b"", b""]
        ends[1][0].sendall(b"x")
        assert ends[1][1].recv(1) == b"x"
        again = socket.create_connection(listener.getsockname())  # who listens still does
        for end in (*ends[0], *ends[1], again, listener.accept()[0]):
            end.close()
