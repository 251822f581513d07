"""What TensorFlow's errors say is wrong."""

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import error_messages

pytestmark = pytest.mark.core

MADE_AT = """Graph execution error:

Detected at node 'ReadFile' defined at (most recent call last):
    File "train.py", line 7, in <module>
      main()
Node: 'ReadFile'
"""
MISSING = '/data/words; No such file or directory'
REMOTE = (
    'Additional GRPC error information from remote target /job:worker/replica:0/task:0 while '
    'calling /tensorflow.WorkerService/RecvTensor:'
)
# By what is special in them: what TensorFlow 2.21 says, the reason, and all that it says is wrong.
MESSAGES = {
    'one op': (
        f'{MADE_AT}{MISSING}\n\t [[{{{{node ReadFile}}}}]]',
        MISSING,
        MISSING,
    ),
    'after another error': (
        f'{MADE_AT}{MISSING}\n\t [[{{{{node ReadFile}}}}]]\nRecent warning and error logs:\n'
        '  OP_REQUIRES failed at py_func.cc:422 : UNKNOWN: KeyError: 3\n'
        'Traceback (most recent call last):\n  File "train.py", line 9, in look_up\n'
        "Node: 'PyFunc'\n",
        MISSING,
        MISSING,
    ),
    'of a task': (
        f'{MADE_AT}From /job:worker/replica:0/task:0:\n{MISSING}\n\t [[{{{{node ReadFile}}}}]]',
        MISSING,
        f'From /job:worker/replica:0/task:0: {MISSING}',
    ),
    'of several tasks': (
        f'{MADE_AT}{MADE_AT}=====================\n'
        f'NOT_FOUND: From /job:worker/replica:0/task:0:\n{MISSING}\n\t [[{{{{node ReadFile}}}}]]\n'
        f'{REMOTE}\n:UNKNOWN:Error received from peer {{grpc_message:"{MISSING}"}}\n'
        '=====================',
        MISSING,
        f'NOT_FOUND: From /job:worker/replica:0/task:0: {MISSING} {REMOTE}',
    ),
    'of several ops': (
        f'{MADE_AT}2 root error(s) found.\n  (0) NOT_FOUND: {MISSING}\n'
        '\t [[{{node ReadFile}}]]',
        MISSING,
        f'2 root error(s) found. (0) NOT_FOUND: {MISSING}',
    ),
    'without an op': (f'{MISSING}\n\tFailed to flush', MISSING, f'{MISSING} Failed to flush'),
}


@pytest.mark.parametrize('message, reason, summary', MESSAGES.values(), ids=MESSAGES)
def test_messages(message, reason, summary):
    error = tf.errors.NotFoundError(None, None, message)
    assert error_messages.reason(error) == reason
    assert error_messages.summary(error) == f'NotFoundError: {summary}'


def test_errors_without_a_message():
    error = tf.errors.AbortedError(None, None, '')
    assert error_messages.reason(error) == 'AbortedError'


def test_errors_of_python():
    assert error_messages.reason(ValueError('Boo')) == 'Boo'
    assert error_messages.summary(ValueError('Boo')) == 'ValueError: Boo'


def test_long_messages_are_cut():
    error = tf.errors.AbortedError(None, None, 'x' * 1000)
    assert error_messages.summary(error) == f'AbortedError: {"x" * 400} ...'


@pytest.mark.parametrize(
    'text, is_of_input',
    [
        ('OOM [[{{node IteratorGetNext}}]]', True),
        ('OOM\n\t [[{{node PyFunc}}]]\n\t [[scope/IteratorGetNext_1]]', True),
        ('OOM\n\t [[{{node MatMul}}]]\n\t [[IteratorGetNext/_17]]', False),
        ('OOM [[{{node replicate/tower_0/MatMul}}]]', False),
    ],
)
def test_errors_of_an_input_pipeline(text, is_of_input):
    """Not those of an op to which TensorFlow was sending a batch."""
    error = tf.errors.ResourceExhaustedError(None, None, text)
    assert error_messages.is_of_input(error) == is_of_input


def test_the_traceback_of_another_error_is_none():
    message, _, _ = MESSAGES['after another error']
    assert error_messages.python_traceback(tf.errors.NotFoundError(None, None, message)) == []


def test_the_memory_of_another_error_is_none():
    """A hook's error is of no op, whatever was logged of ops before."""
    logs = 'Recent warning and error logs:\n  OP_REQUIRES failed [[{{node MatMul}}]]'
    of_hook = tf.errors.ResourceExhaustedError(None, None, f'too many files\n{logs}')
    assert not error_messages.is_of_step_memory(of_hook)
    of_op = tf.errors.ResourceExhaustedError(
        None, None, f'OOM when allocating [[{{{{node MatMul}}}}]]\n{logs}; No space left on device'
    )
    assert error_messages.is_of_step_memory(of_op)
