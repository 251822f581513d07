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
from collections.abc import Collection

_DESCRIPTORS = '/proc/self/fd'  # on Linux; elsewhere, nothing is dropped


def drop(ports: Collection[int]) -> None:
    """Shuts down all TCP connections of this process that lead to one of these ports.

    Args:
      ports: those of the tasks.
    """
    if not os.path.isdir(_DESCRIPTORS):
        return
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # Others may close it meanwhile.
            _shut_down(int(name), ports)


def _shut_down(descriptor: int, ports: Collection[int]) -> None:
    """Shuts down what a file descriptor is, if it's a connection to one of these ports."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if connection.getpeername()[1] in ports:
            connection.shutdown(socket.SHUT_RDWR)
