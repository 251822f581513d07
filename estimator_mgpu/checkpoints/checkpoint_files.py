"""What is wrong with the files of a model_dir's checkpoints, in a sentence. Nothing is changed.

In: a model_dir, or an error of TensorFlow's. Out: an error that says which file is concerned, which
checkpoint is complete, and what to do.

The checkpoints themselves are those of one device, as variables keep their names and shapes:
training can go on from them on any number of devices, or without this package.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.errors import step_errors
from estimator_mgpu.tf_internals import op_types, private
from estimator_mgpu.tf_internals.error_messages import reason_in_sentence

# TensorFlow's errors of a file that can't be written. What writes summaries raises RuntimeError.
_WRITE_ERRORS = (
    tf.errors.FailedPreconditionError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    RuntimeError,
)
# Those of a file that can't be read, from any op.
_READ_ERRORS = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.OutOfRangeError)
# Those of a checkpoint that can't be read, from an op that restores variables.
_RESTORE_ERRORS = (
    *_READ_ERRORS,
    tf.errors.FailedPreconditionError,
    tf.errors.PermissionDeniedError,
)
_IN_PATTERNS = {*'*?[\\'} - {os.sep}  # characters that make a path a pattern


def check_name(path: str) -> None:
    """Raises ValueError if TensorFlow would take a path for a pattern.

    It then finds no checkpoint in a directory `run[1]`, evaluates initial values, and can't go on
    training; and with those in `run*` it deletes the old checkpoints in `run2`.
    """
    special = sorted(_IN_PATTERNS.intersection(path))
    if special:
        raise ValueError(
            f'{path!r} has {" and ".join(special)}, and TensorFlow takes paths of checkpoints for '
            f'patterns: it would miss some, or take others. Give a name without '
            f'{" ".join(sorted(_IN_PATTERNS))}.'
        )


def check(model_dir: str) -> None:
    """Raises ValueError if the file `checkpoint` of a model_dir names no checkpoint that is there.

    TensorFlow would begin anew, or evaluate initial values, with no more than a line in the log.
    """
    file = os.path.join(model_dir, 'checkpoint')
    if not tf.io.gfile.exists(file):
        return
    path = _last_checkpoint(model_dir)
    if not path:
        raise ValueError(f"{file}, which names the last checkpoint, can't be read. {_remedy(file)}")

    # A V1 checkpoint is one file, without an index.
    if not tf.io.gfile.exists(f'{path}.index') and not tf.io.gfile.glob(path):
        raise ValueError(f'{file} names {path}, and {path}.index is not there. {_remedy(file)}')


@contextlib.contextmanager
def checked_files(
    model_dir: str, path: str | None = None, warm_start: Any = None
) -> Iterator[None]:
    """Checks the files that a call will read, and explains errors with files that it raises.

    An error that is explained keeps its class, and has TensorFlow's as its cause.

    Args:
      model_dir: where files are written.
      path: the checkpoint to read, by default the last one of the model_dir.
      warm_start: an Estimator's settings of what its variables start from, or None.
    """
    if path is None:
        check(model_dir)
    else:
        check_name(path)
        if tf.io.gfile.isdir(path):
            raise ValueError(
                f'checkpoint_path={path!r} is a directory. Give a checkpoint in it: '
                f'tf.train.latest_checkpoint({path!r}), say.'
            )
    if warm_start is not None:  # from a directory, or from a checkpoint
        check_name(warm_start.ckpt_to_initialize_from)
        check(warm_start.ckpt_to_initialize_from)

    try:
        yield
    except (*_RESTORE_ERRORS, *_WRITE_ERRORS) as raised:
        error = step_errors.original(raised)
        if _op_type(error) == op_types.CHECKPOINT_READ:
            if not isinstance(error, _RESTORE_ERRORS) or _is_of_other_variables(error):
                raise
            checkpoint = _restored_path(error) or path or _last_checkpoint(model_dir)
            raise _unreadable(error, checkpoint) from error
        if not is_of_writing(error, model_dir):
            raise
        raise _unwritable(error, model_dir) from error


def explain_restore_errors(saver: Any) -> None:
    """Lets a saver say which checkpoint it can't restore, also after a fault.

    A file that is too short raises OutOfRangeError, which would be taken for the end of the data.
    """
    is_wrapped = 'restore' in vars(saver)
    if isinstance(saver, tf.train.Saver) and not is_wrapped:
        saver.restore = functools.partial(_restore, saver.restore)


def _restore(restore: Any, session: tf.Session, path: str) -> None:
    try:
        _check_shapes(session.graph, path)
        restore(session, path)
    except _RESTORE_ERRORS as error:
        if _is_of_other_variables(error):
            raise
        raise _unreadable(error, path) from error


def _check_shapes(graph: tf.Graph, path: str) -> None:
    """Raises ValueError if variables of a graph have other shapes in a checkpoint.

    TensorFlow lets a resource variable take any shape, whatever the model's other ops expect.
    """
    try:
        saved = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except (tf.errors.OpError, RuntimeError, ValueError):
        return  # The saver says the same, by an error of the right class.
    restored = _restored_names(graph)
    others = []
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        name = variable.op.name
        shape = saved.get(name) if name in restored else None
        if shape is not None and not variable.shape.is_compatible_with(shape):
            others.append(f'{name} has {shape}, and the model {variable.shape.as_list()}')
    if others:
        more = f' (and {len(others) - 1} more)' if len(others) > 1 else ''
        raise ValueError(
            f'The checkpoint {path} is of a model with other shapes: there, {others[0]}{more}. '
            'Use a new model_dir for this model, or build the model as it was.'
        )


def _restored_names(graph: tf.Graph) -> set[str]:
    """What a graph restores from a checkpoint whose path it's given, by the names in that.

    A saver may restore a variable from another name than its own.
    """
    names: set[str] = set()
    for op in graph.get_operations():
        if op.type == op_types.CHECKPOINT_READ and private.constant_value(op.inputs[0]) is None:
            in_checkpoint = private.constant_value(op.inputs[1])
            names.update(map(tf.compat.as_text, () if in_checkpoint is None else in_checkpoint))
    return names


def _op_type(error: Exception) -> str | None:
    """The type of the op that has failed; None for an error of something else."""
    return getattr(getattr(error, 'op', None), 'type', None)


def _is_of_other_variables(error: Exception) -> bool:
    """Whether a checkpoint's files are as they should be, but another model's."""
    return 'not found in checkpoint' in reason_in_sentence(error)


def _restored_path(error: tf.errors.OpError) -> str | None:
    """The path that an op restores from, if the graph has it, as that of a warm start does."""
    path = private.constant_value(error.op.inputs[0])
    return None if path is None else tf.compat.as_text(path)


def is_of_writing(error: Exception, model_dir: str) -> bool:
    """Whether an error is about a file in the model_dir that can't be written."""
    op_type = _op_type(error)
    is_ours = op_type is None or op_type in op_types.CHECKPOINT_WRITES  # None for summaries
    if not is_ours or not isinstance(error, _WRITE_ERRORS):
        return False

    # A RuntimeError of TensorFlow's says 'FILE; No space left on device'. Others may be anybody's.
    reason = reason_in_sentence(error)
    if isinstance(error, RuntimeError) and '; ' not in reason:
        return False
    # It begins with a file in the model_dir, or with a directory that this is in.
    path = reason.partition('; ')[0].removesuffix(' is not a directory').rstrip('/') + '/'
    directory = model_dir.rstrip('/') + '/'
    return path.startswith(directory) or directory.startswith(path)


def _unwritable(error: Exception, model_dir: str) -> Exception:
    """The error to raise for a model_dir that can't be written to."""
    name = last_checkpoint_name(model_dir)
    kept = 'There is no checkpoint yet'
    if name in _complete_checkpoints(model_dir):
        kept = f'The checkpoints are kept, and training goes on from {name}'
    return _with_text(
        error,
        f"{model_dir} can't be written to: {reason_in_sentence(error)}. {kept}. Make room there, "
        'or let this process write there, and start again.',
    )


def _unreadable(error: Exception, path: str) -> Exception:
    """The error to raise for a checkpoint that can't be restored."""
    directory, name = os.path.split(path)
    remedy = _remedy(os.path.join(directory, 'checkpoint'), unusable=name)
    reason = reason_in_sentence(error)
    return _with_text(error, f"The checkpoint {path} can't be read: {reason}. {remedy}")


def _with_text(error: Exception, text: str) -> Exception:
    """An error of the same class with another text.

    OutOfRangeError becomes DataLossError, as it would be taken for the end of the data.
    """
    if isinstance(error, tf.errors.OutOfRangeError):
        return tf.errors.DataLossError(None, None, text)
    for kind in (*_WRITE_ERRORS, *_READ_ERRORS):
        if isinstance(error, kind) and issubclass(kind, tf.errors.OpError):
            return kind(None, None, text)
    return RuntimeError(text)


def _remedy(file: str, unusable: str = '') -> str:
    """What to do about a checkpoint, or about the file `checkpoint`, that can't be read.

    Args:
      file: the path of the file `checkpoint`.
      unusable: the name of the checkpoint that can't be read; '' if it's the file.
    """
    directory = os.path.dirname(file)
    usable = [name for name in _complete_checkpoints(directory) if name != unusable]
    remove = f'remove the checkpoint ({unusable}.*) and ' if unusable else ''
    if not usable:
        return (
            f'No other checkpoint in {directory} has all its files: to begin anew, {remove}remove '
            f'{file}.'
        )
    latest = usable[-1]
    return (
        f'{latest} has all its files: to go on from it, {remove}write model_checkpoint_path: '
        f'"{latest}" as the only line of {file}.'
    )


def _complete_checkpoints(directory: str) -> list[str]:
    """Names the checkpoints in a directory whose files are all there, the latest step last.

    The files of one are `model.ckpt-6.index`, `model.ckpt-6.data-00000-of-00002`, and
    `model.ckpt-6.data-00001-of-00002`, say.
    """
    try:
        files = set(tf.io.gfile.listdir(directory))
    except tf.errors.OpError:  # There is no such directory.
        return []

    data_files: dict[str, list[str]] = {}  # by the name of the checkpoint
    for file in sorted(files):
        match = re.fullmatch(r'(.+)\.data-\d{5}-of-\d{5}', file)
        if match:
            data_files.setdefault(match[1], []).append(file)

    complete = []
    for name, parts in data_files.items():
        count = int(parts[0][-5:])
        if f'{name}.index' in files and len(parts) == count:
            complete.append(name)
    return sorted(complete, key=_step_of)


def _step_of(name: str) -> int:
    """The step in a checkpoint's name, such as 6 in `model.ckpt-6`; 0 if there is none."""
    match = re.search(r'-(\d+)$', name)
    return int(match[1]) if match else 0


def last_checkpoint_name(model_dir: str) -> str:
    """The name of a model_dir's last checkpoint, such as `model.ckpt-6`; '' without one."""
    return os.path.basename(_last_checkpoint(model_dir))


def _last_checkpoint(model_dir: str) -> str:
    """The path of the checkpoint that a model_dir's file `checkpoint` names; '' without one."""
    try:
        state = tf.train.get_checkpoint_state(model_dir)
    except ValueError:  # The file is empty.
        return ''
    return state.model_checkpoint_path if state else ''
