"""Drops this process's connections to other tasks, so that TensorFlow makes new ones.

If a machine loses its power, nobody closes its connections. When its task starts again at another
address with the same name, or behind a proxy, TensorFlow still sends to the old machine, and waits
for an answer for a quarter of an hour. gRPC has an option for that, which TensorFlow doesn't set.
Of a connection that is shut down it hears at once; then it resolves the name anew, and connects.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterable

from estimator_mgpu.cluster import reach

_DESCRIPTORS = '/proc/self/fd'  # on Linux; elsewhere, nothing is dropped
_IPV4_IN_IPV6 = '::ffff:'  # how an IPv4 address begins at a socket that is for both

Peer = tuple[str, int]
"""An IP address and a port."""


def peers_at(addresses: Iterable[str]) -> set[Peer]:
    """Where connections to these addresses lead, as far as their names are known now."""
    found = set()
    for address in addresses:
        # The name of a host that has gone may not resolve.
        for *_, (ip, port, *_) in reach.resolved(address) or ():
            found.add((str(ip), int(port)))
    return found


def drop(peers: Collection[Peer]) -> None:
    """Shuts down all TCP connections of this process that lead to one of these peers."""
    if not os.path.isdir(_DESCRIPTORS):
        return
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # Others may close it meanwhile.
            _shut_down(int(name), peers)


def _shut_down(descriptor: int, peers: Collection[Peer]) -> None:
    """Shuts down what a file descriptor is, if it's a connection to one of these peers."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if connection.type != socket.SOCK_STREAM:
            return
        ip, port, *_ = connection.getpeername()
        if (ip.removeprefix(_IPV4_IN_IPV6), port) in peers:
            connection.shutdown(socket.SHUT_RDWR)
