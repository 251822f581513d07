"""Clusters whose machines are processes on this machine."""

from __future__ import annotations

import contextlib
import socket


def free_addresses(count):
    """Addresses of this machine at which nothing listens."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(('127.0.0.1', 0))) for _ in range(count)]
        return ['{}:{}'.format(*one.getsockname()) for one in free]


def tf_configs(count):
    """The TF_CONFIG of each of so many machines: those of a chief, and of workers."""
    chief, *workers = free_addresses(count)
    cluster = {'chief': [chief], **({'worker': workers} if workers else {})}
    tasks = [('chief', 0), *(('worker', index) for index in range(count - 1))]
    return [{'cluster': cluster, 'task': {'type': job, 'index': i}} for job, i in tasks]
