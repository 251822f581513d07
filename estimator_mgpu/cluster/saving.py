"""Which tasks save a part of each checkpoint, whether one is being saved, or was to be the last.

The chief saves all resource variables, as a saver doesn't see on which task they are: its ops are
on none, and `place_on_chief` puts them on the chief. A saver lets a task save itself what it finds
there: reference variables, parts of variables that have a
partitioner, and variables and iterators that a program has put there. Such a task has to see the
chief's model_dir.
"""

from __future__ import annotations

import os
import sys
import traceback
import uuid
from collections.abc import Callable
from types import FrameType

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster.notes import Notes
from estimator_mgpu.devices import CHIEF, device_spec, machine_of
from estimator_mgpu.tf_internals import graphs, op_types, private

_CANNOT_READ = (
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
)


def place_on_chief(graph: tf.Graph) -> None:
    """Places ops on the chief that are on no task, such as a saver's, unless they belong elsewhere.

    Those that use a variable or another resource belong to it, and so do ops that are colocated.
    """
    for op in graph.get_operations():
        if device_spec(op.device).job is not None:
            continue
        uses_state = any(
            tensor.dtype == tf.resource or graphs.is_reference_variable(tensor)
            for tensor in op.inputs
        )
        colocated = set(graphs.colocated_with(op)) - {op.name}  # A variable names itself.
        if not uses_state and not colocated:
            private.set_device(op, CHIEF + op.device)


def saving_tasks(graph: tf.Graph) -> set[str]:
    """Returns the names of the tasks that write and read parts of checkpoints."""
    writes = [op for op in graph.get_operations() if op.type in op_types.CHECKPOINT_WRITES]
    return {machine_of(op.device) for op in writes}


def check_model_dir(graph: tf.Graph, model_dir: str, notes_on: Callable[..., Notes]) -> None:
    """Raises ValueError if a task that saves a part of each checkpoint doesn't see the model_dir.

    The graph has a saver, and `notes_on` is that of a `Task`.
    """
    names = sorted(saving_tasks(graph) - {CHIEF})
    if not names:
        return

    directory = os.path.join(model_dir, f'.{uuid.uuid4().hex}')
    tf.io.gfile.makedirs(directory)
    try:
        path = os.path.join(directory, 'file')
        with tf.io.gfile.GFile(path, 'w') as file:
            file.write('')
        for name in names:
            try:
                with notes_on(name, seconds=60) as notes, notes.graph.as_default():
                    with tf.device(f'{name}/cpu:0'):
                        notes.session.run(tf.io.read_file(path))
            except _CANNOT_READ as error:
                raise ValueError(
                    f'{name} has variables or iterators that it saves itself, and does not see '
                    f'model_dir={model_dir!r} of {CHIEF}. Give a directory of a file system of all '
                    'machines. The chief saves all if there are only resource variables, which '
                    'tf.disable_v2_behavior() turns off, without a partitioner, and the program '
                    'puts none on another task.'
                ) from error
    finally:
        tf.io.gfile.rmtree(directory)


def is_saving() -> bool:
    """Whether a thread of this process is in the method `save` of a `tf.train.Saver`."""
    stacks = [traceback.walk_stack(frame) for frame in sys._current_frames().values()]
    return any(_is_in(frame, tf.train.Saver, 'save') for stack in stacks for frame, _ in stack)


def is_of_end(error: BaseException) -> bool:
    """Whether an error was raised as hooks came to their end, one of which saves the last step."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(_is_in(frame, tf.train.SessionRunHook, 'end') for frame in frames)


def _is_in(frame: FrameType, of: type, method: str) -> bool:
    """Whether a frame is that of a method of a class, or of a user's subclass."""
    code = frame.f_code
    if code.co_name != method or not code.co_argcount:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), of)
