"""What is at a task's address. We connect there ourselves: gRPC would wait, or say too little."""

from __future__ import annotations

import contextlib
import socket
import time

_PATIENCE = 60  # seconds after which a server that hasn't answered never will
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
    """Describes a task that can't be reached: its address, and why, if that's known."""
    host, port = _host_and_port(address)
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

    Args:
      task: the task's name, for the error.
      address: where the task should be.

    Returns:
      Whether it is one; False if nothing listens there any more.
    """
    remedy = 'End it, or give another port in TF_CONFIG on every machine.'
    start = time.monotonic()
    answer = _answer(address)
    while answer is None:
        if not listens(address):
            return False
        if time.monotonic() > start + _PATIENCE:
            raise RuntimeError(
                f'{task} listens at {address}, but has not answered in {_PATIENCE} seconds: its '
                f'process is stopped, or another program has that port. {remedy}'
            )
        time.sleep(1)
        answer = _answer(address)

    if not _is_settings(answer):
        raise RuntimeError(
            f'{task} should be at {address}, but another program has that port, which answers '
            f'{answer[:20]!r}. {remedy}'
        )
    return True


def _is_settings(frame: bytes) -> bool:
    """Whether it's the beginning of a frame of HTTP/2 that has the type SETTINGS."""
    return frame[3:4] == bytes([_SETTINGS])


def _answer(address: str) -> bytes | None:
    """What a server says first; None if it says nothing, or breaks off the connection."""
    with contextlib.suppress(OSError), _connect(address) as connection:
        connection.sendall(_GREETING)
        answer = connection.recv(64)
        # If nothing listens there, a connection may be one to itself, and gets back what it sent.
        if not _GREETING.startswith(answer):
            return answer
    return None


def _connect(address: str) -> socket.socket:
    return socket.create_connection(_host_and_port(address), timeout=_TIMEOUT)


def _host_and_port(address: str) -> tuple[str, int]:
    """Returns the host and the port."""
    host, _, port = address.rpartition(':')
    return host.strip('[]'), int(port)
