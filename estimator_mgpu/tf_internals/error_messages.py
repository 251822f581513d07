"""What is wrong, out of the message of an error that a session has raised.

TensorFlow puts before it where the op was made, and after it the op's name. If several tasks or ops
have failed, it tells one after another:

    Graph execution error:

    Detected at node 'ReadFile' defined at (most recent call last):
        File "train.py", line 7, in <module>
    Node: 'ReadFile'
    =====================
    NOT_FOUND: From /job:worker/replica:0/task:0:
    /data/words; No such file or directory
             [[{{node ReadFile}}]]
    Additional GRPC error information from remote target /job:worker/replica:0/task:0 ...

Here the reason is '/data/words; No such file or directory'.
"""

from __future__ import annotations

import errno
import os
import re

import tensorflow.compat.v1 as tf

_LONGEST_SUMMARY = 400  # characters
# Lines that say where ops were made and what they are called, and those in which gRPC repeats all.
_NO_REASON = re.compile(
    r':|Graph execution error|Detected at node|File "|Original stack trace|Node: |\[\[\{\{node'
)
# Lines that come before a reason: on which task it was, and how many errors there are.
_HEADING = re.compile(r'(\(\d+\) )?([A-Z_]+: )?From /job:|\d+ root error\(s\) found')
# How a reason may begin: the number of the error, and its code.
_NUMBER_AND_CODE = re.compile(r'\(\d+\) [A-Z_ ]+: ')
# The op that takes a batch out of a dataset. If a function of the dataset has failed, it's named
# after the function's op. What others receive of it has another name: `IteratorGetNext/_17`.
_INPUT_OP = re.compile(r'\[\[(\{\{node )?\S*IteratorGetNext(_\d+)?(\}\})?\]\]')

# An op of a graph that a session runs.
_ANY_OP = re.compile(r'\[\[(\{\{node )?[^\[\]{}\s]+(\}\})?\]\]')
# An op of a graph or of a function that has failed.
_NODE = re.compile(r'\[\[\{\{node ([^\s{}]+)\}\}')
# What Python has to say of a function of the user's, before what TensorFlow says of its op.
_PYTHON_TRACEBACK = re.compile(
    r'^Traceback \(most recent call last\):$.*?(?=^\s*\[\[|\Z)', re.M | re.S
)
# With this, TensorFlow appends what was logged lately in this process, also of other errors, once a
# server of a cluster has run in it.
_RECENT_LOGS = '\nRecent warning and error logs:'
# What is too small, or too large, where it isn't memory: files, and the messages of gRPC.
_NO_MEMORY = (
    os.strerror(errno.ENOSPC),
    os.strerror(errno.EDQUOT),
    os.strerror(errno.EMFILE),
    os.strerror(errno.ENFILE),
    'larger than max',
)

# What TensorFlow appends as it replaces an UnavailableError of an op that isn't declared to use the
# network.
_REPLACED = 'originally returned UnavailableError, and was replaced by InternalError'
# Part of the name of a call between tasks. Errors of other services, such as file systems, don't
# mean that a task is lost.
_CALL_OF_TASK = '/tensorflow.WorkerService/'
# Where an error begins that is one of several: how one task lost another one, or its session.
_LOST_TASK = re.compile(
    r'^\s*(\(\d+\) (ABORTED|UNAVAILABLE): |(ABORTED|UNAVAILABLE): From /job:)', re.MULTILINE
)


def reason(error: Exception) -> str:
    """Returns the first thing that an error says is wrong, such as 'FILE; No space left on device'.

    If it says nothing, that's the name of the error's class.
    """
    for line in _lines(error):
        if not _HEADING.match(line):
            return _NUMBER_AND_CODE.sub('', line, count=1)
    return type(error).__name__


def reason_in_sentence(error: Exception) -> str:
    """An error's `reason` without a full stop, to be part of a sentence."""
    return reason(error).rstrip('.')


def node_name(error: Exception) -> str | None:
    """The name of the first node that an error is about; None if it names none."""
    match = _NODE.search(_message(error))
    return None if match is None else match[1]


def python_traceback(error: Exception) -> list[str]:
    """The lines of Python's traceback, if a Python function that an op calls has failed; else [].

    If ops on several devices needed its result, TensorFlow repeats all of it for each of them.
    """
    match = _PYTHON_TRACEBACK.search(_message(error))
    lines = [] if match is None else match[0].splitlines()
    return [line for line in lines if line.strip()]


def is_of_input(error: Exception) -> bool:
    """Whether an input pipeline has failed, rather than what is computed from its batches."""
    return bool(_INPUT_OP.search(_message(error)))


def is_of_xla_on_cpus(error: Exception) -> bool:
    """Whether XLA, which was to compile all ops that it can, refuses several CPU devices."""
    return 'Multiple CPU devices [' in _message(error)


def is_of_step_memory(error: tf.errors.OpError) -> bool:
    """Whether memory was too small for an op that a session has run, but not for the input.

    An error of a subclass, which this package makes, says already what would help. One that a hook
    or an input_fn raises is of no op.
    """
    if type(error) is not tf.errors.ResourceExhaustedError:
        return False
    message = _message(error)
    is_of_op = error.op is not None or bool(_ANY_OP.search(message))
    if not is_of_op or is_of_input(error):
        return False
    return not any(other in message for other in _NO_MEMORY)


def is_of_lost_task(error: tf.errors.OpError) -> bool:
    """Whether a step has failed because one task lost another, whatever the error's class is.

    The class is that of the first error that TensorFlow heard of: that of an op that was cancelled,
    say. Those of other tasks are in the message, also behind what one of them has logged lately.
    """
    was_replaced = _REPLACED in error.message and _CALL_OF_TASK in error.message
    return was_replaced or bool(_LOST_TASK.search(error.message))


def summary(error: Exception) -> str:
    """Returns an error's class and all that it says is wrong, on one line of limited length."""
    text = ' '.join(_lines(error))
    if len(text) > _LONGEST_SUMMARY:
        text = f'{text[:_LONGEST_SUMMARY]} ...'
    return f'{type(error).__name__}: {text}'


def _message(error: Exception) -> str:
    """What an error says of itself."""
    message = getattr(error, 'message', None) or str(error)
    return message.partition(_RECENT_LOGS)[0]


def _lines(error: Exception) -> list[str]:
    """The lines of an error's message that say what is wrong."""
    lines = [line.strip(' \t=') for line in _message(error).splitlines()]
    start = 0
    for number, line in enumerate(lines):
        if line.startswith('Node: '):  # The last one ends what is said of where ops were made.
            start = number + 1
    return [line for line in lines[start:] if line and not _NO_REASON.match(line)]
