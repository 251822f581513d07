"""What is at a task's address, by a connection of our own: gRPC would wait, or say too little."""

from __future__ import annotations

import contextlib
import socket
import time

_PATIENCE = 60  # seconds in which a server that is well has answered
_TIMEOUT = 5  # seconds, for each connection
# What a client of HTTP/2, as gRPC is, says first; a server's first frame is of the type SETTINGS.
_GREETING = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4


def listens(address: str) -> bool:
    """Whether something listens at an address."""
    with contextlib.suppress(OSError):
        _connect(address).close()
        return True
    return False


def described(task: str, address: str) -> str:
    """A task with its address, and why it can't be reached, if that's known."""
    host, port = _parts(address)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return f'{task} at {address} (the name {host} does not resolve)'
    return f'{task} at {address}'


def is_server(address: str) -> bool:
    """Whether a server of TensorFlow's, or of gRPC's at least, answers at an address."""
    answer = _answer(address)
    return answer is not None and _is_settings(answer)


def check_server(task: str, address: str) -> bool:
    """Raises RuntimeError if what listens at a task's address is no server of TensorFlow's.

    Returns:
      Whether it is one; False if nothing listens there any more.
    """
    start = time.monotonic()
    remedy = 'End it, or give another port in TF_CONFIG on every machine.'
    while (answer := _answer(address)) is None:
        if not listens(address):
            return False
        if time.monotonic() > start + _PATIENCE:
            raise RuntimeError(
                f'{task} listens at {address}, but has not answered in {_PATIENCE} seconds: its '
                f'process is stopped, or another program has that port. {remedy}'
            )
        time.sleep(1)
    if not _is_settings(answer):
        raise RuntimeError(
            f'{task} should be at {address}, but another program has that port, which answers '
            f'{answer[:20]!r}. {remedy}'
        )
    return True


def _is_settings(frame: bytes) -> bool:
    return frame[3:4] == bytes([_SETTINGS])


def _answer(address: str) -> bytes | None:
    """What a server says first; None if it says nothing, or breaks off the connection."""
    with contextlib.suppress(OSError), _connect(address) as connection:
        connection.sendall(_GREETING)
        answer = connection.recv(64)
        # Where nothing listens, a connection may be one to itself.
        return None if _GREETING.startswith(answer) else answer
    return None


def _connect(address: str) -> socket.socket:
    return socket.create_connection(_parts(address), timeout=_TIMEOUT)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(':')
    return host.strip('[]'), int(port)
