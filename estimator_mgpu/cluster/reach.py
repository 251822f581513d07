"""What is at a task's address. We connect there ourselves: gRPC would wait, or say too little."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

_TIMEOUT = 5  # seconds, for each connection
_ANSWER_WITHIN = 2  # seconds, for all servers that are asked together
# What a client of HTTP/2, as gRPC is, says first; a server's first frame is of the type SETTINGS.
_GREETING = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4


def listens(address: str) -> bool:
    """Whether something listens at an address."""
    with contextlib.suppress(OSError):
        _connect(address).close()
        return True
    return False


def described(name: str, address: str) -> str:
    """Describes a task that can't be reached: its address, and why, if that's known."""
    if resolved(address) is None:
        return f'{name} at {address} (the name {host_of(address)} does not resolve)'
    return f'{name} at {address}'


def resolved(address: str) -> list[Any] | None:
    """What `socket.getaddrinfo` gives for an address; None if its name doesn't resolve."""
    with contextlib.suppress(OSError):
        return socket.getaddrinfo(*_host_and_port(address), type=socket.SOCK_STREAM)
    return None


def host_of(address: str) -> str:
    """Returns the host of an address."""
    return _host_and_port(address)[0]


def is_server(address: str) -> bool:
    """Whether a server of TensorFlow's, or of gRPC's at least, answers at an address."""
    answer = _answer(address)
    return answer is not None and _is_settings(answer)


def that_answer(addresses: Iterable[str]) -> set[str]:
    """Returns those of some addresses where a server of TensorFlow's, or of gRPC's, answers.

    All are asked at the same time, without threads, which Python doesn't start as it ends.
    """
    answered = set()
    end = time.monotonic() + _ANSWER_WITHIN
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for address in addresses:
            for begun in _begun_connections(address):
                stack.enter_context(begun)
                selector.register(begun, selectors.EVENT_WRITE, address)

        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(end - time.monotonic()):
                connection: Any = key.fileobj
                selector.unregister(connection)
                with contextlib.suppress(OSError):  # Nobody may be there.
                    if key.events == selectors.EVENT_WRITE:
                        connection.sendall(_GREETING)
                        selector.register(connection, selectors.EVENT_READ, key.data)
                    elif _is_settings(connection.recv(64)):
                        answered.add(key.data)
    return answered


def check_server(name: str, address: str) -> None:
    """Raises RuntimeError if what answers at a task's address is no server of TensorFlow's.

    It returns if nothing answers: that may also be the task's process, while it's stopped.
    """
    answer = _answer(address)
    if answer is not None and not _is_settings(answer):
        raise RuntimeError(
            f'{name} should be at {address}, but another program has that port, which answers '
            f'{answer[:20]!r}. End it, or give another port in TF_CONFIG on every machine.'
        )


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


def _begun_connections(address: str) -> list[socket.socket]:
    """Returns connections to all that an address's name leads to, without waiting for them."""
    begun = []
    for family, kind, protocol, _, place in resolved(address) or ():
        with contextlib.suppress(OSError):  # This machine may have no IPv6.
            connection = socket.socket(family, kind, protocol)
            connection.setblocking(False)
            connection.connect_ex(place)
            begun.append(connection)
    return begun


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(':')
    return host.strip('[]'), int(port)
