"""What is at an address, by real connections."""

import contextlib
import http.server
import socket
import threading
import time

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import reach
from towers import free_addresses

pytestmark = pytest.mark.core

TASK = '/job:worker/task:0'


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(reach, '_TIMEOUT', 0.5)


@contextlib.contextmanager
def listening(answer=None):
    """A port; each connection gets what `answer` makes of what it says, or with None nothing."""
    with socket.create_server(('127.0.0.1', 0)) as server:

        def serve():
            with contextlib.suppress(OSError):  # until the port is closed
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(answer(connection.recv(64)))

        thread = threading.Thread(target=serve, daemon=True)
        if answer:
            thread.start()
        yield '{}:{}'.format(*server.getsockname())
        server.shutdown(socket.SHUT_RDWR)
        if answer:
            thread.join()


NO_ANSWERS = {
    'silent': None,
    'breaks off': lambda said: b'',
    'connected to itself': lambda said: said,
}


@pytest.mark.parametrize('answer', NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_a_port_without_an_answer(answer):
    """There's no telling whose it is, so it's no error."""
    with listening(answer) as address:
        assert reach.listens(address) and not reach.is_server(address)
        reach.check_server(TASK, address)
    assert not reach.listens(address)
    reach.check_server(TASK, address)


def test_another_program():
    with listening(lambda said: b'SSH-2.0-OpenSSH_9.2\r\n') as address:
        match = f"^{TASK} should be at {address}, but another program .*answers b'SSH-2.0-OpenSSH"
        with pytest.raises(RuntimeError, match=match):
            reach.check_server(TASK, address)
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever).start()
    try:
        address = '{}:{}'.format(*server.server_address)
        with pytest.raises(RuntimeError, match='another program has that port'):
            reach.check_server(TASK, address)
        assert not reach.is_server(address)
    finally:
        server.shutdown()
        server.server_close()


def test_a_server():
    (address,) = free_addresses(1)
    assert not reach.is_server(address)
    server = tf.train.Server({'worker': [address]})
    assert reach.is_server(address)
    reach.check_server(TASK, address)
    del server


def test_the_greeting():
    """The preface of HTTP/2, as RFC 9113 gives it, and an empty frame of type 4, SETTINGS."""
    said = []
    with listening(lambda greeting: said.append(greeting) or b'') as address:
        assert not reach.is_server(address)
    preface = '505249202a20485454502f322e300d0a0d0a534d0d0a0d0a'
    assert said == [bytes.fromhex(f'{preface} 000000 04 00 00000000')]


def test_a_name():
    assert reach.described(TASK, '127.0.0.1:1') == f'{TASK} at 127.0.0.1:1'
    assert reach.described(TASK, '[::1]:1') == f'{TASK} at [::1]:1'
    told = f'{TASK} at no-such-host.invalid:1 (the name no-such-host.invalid does not resolve)'
    assert reach.described(TASK, 'no-such-host.invalid:1') == told
    assert not reach.listens('no-such-host.invalid:1')


def test_all_are_asked_at_the_same_time(monkeypatch):
    """Servers of TensorFlow's answer; others, and addresses without anyone, cost no time each."""
    monkeypatch.setattr(reach, '_ANSWER_WITHIN', 1)
    here, nobody = free_addresses(2)
    server = tf.train.Server({'worker': [here]}, 'worker', 0)  # noqa: F841
    by_name = f'localhost:{here.rpartition(":")[2]}'
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(listening(answer)) for answer in NO_ANSWERS.values()]
        others += [stack.enter_context(listening()) for _ in range(20)]
        others += [nobody, 'no-such-host.invalid:1', '192.0.2.1:1']  # the last one is for examples
        start = time.monotonic()
        assert reach.that_answer([*others, here, by_name]) == {here, by_name}
        assert 1 <= time.monotonic() - start < 5
    start = time.monotonic()
    assert reach.that_answer([here]) == {here} and not reach.that_answer([])
    assert time.monotonic() - start < 0.9
