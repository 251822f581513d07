"""Connections that a process drops."""

import os
import socket

import pytest

from estimator_mgpu.cluster import connections

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not os.path.isdir('/proc/self/fd'), reason='needs Linux'),
]


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost', '::ffff:127.0.0.1'])
def test_connections_to_some_peers_are_dropped(host):
    """They are still open: whoever has them hears that they have ended, and closes them."""
    with (
        socket.create_server(('127.0.0.1', 0)) as server,
        socket.create_server(('127.0.0.1', 0)) as other_server,
    ):
        port = server.getsockname()[1]
        dropped = socket.create_connection((host, port))
        kept = socket.create_connection(other_server.getsockname())
        accepted, _ = server.accept()
        other_accepted, _ = other_server.accept()
        with dropped, kept, accepted, other_accepted, socket.socket():
            peers = connections.peers_at([f'127.0.0.1:{port}', 'no.such.host.invalid:1'])
            assert peers == {('127.0.0.1', port)}
            connections.drop({('127.0.0.2', port)})
            dropped.sendall(b'y')
            assert accepted.recv(1) == b'y'
            connections.drop(peers)
            assert dropped.recv(1) == b'' and accepted.recv(1) == b''
            other_accepted.sendall(b'x')
            assert kept.recv(1) == b'x'


def test_where_a_process_cannot_know_its_connections(monkeypatch):
    monkeypatch.setattr(connections, '_DESCRIPTORS', '/nowhere')
    connections.drop({('127.0.0.1', 1)})
