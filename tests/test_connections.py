"""Connections that a process drops."""

import os
import socket

import pytest

from estimator_mgpu.cluster import connections

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not os.path.isdir('/proc/self/fd'), reason='needs Linux'),
]


def test_connections_to_some_ports_are_dropped():
    """They are still open: whoever has them hears that they have ended, and closes them."""
    with (
        socket.create_server(('127.0.0.1', 0)) as server,
        socket.create_server(('127.0.0.1', 0)) as other_server,
    ):
        dropped = socket.create_connection(server.getsockname())
        kept = socket.create_connection(other_server.getsockname())
        accepted, _ = server.accept()
        other_accepted, _ = other_server.accept()
        with dropped, kept, accepted, other_accepted, socket.socket():
            connections.drop({server.getsockname()[1]})
            assert dropped.recv(1) == b'' and accepted.recv(1) == b''
            other_accepted.sendall(b'x')
            assert kept.recv(1) == b'x'


def test_where_a_process_cannot_know_its_connections(monkeypatch):
    monkeypatch.setattr(connections, '_DESCRIPTORS', '/nowhere')
    connections.drop({1})
