"""What is wrong with the files of a model_dir's checkpoints, in a sentence. Nothing is changed.

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

from estimator_mgpu.tf_internals import op_types, private

# TensorFlow's errors of a file that can't be written, and of one that can't be read.
_WRITING = (
    tf.errors.FailedPreconditionError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    RuntimeError,  # of what writes summaries
)
_READING = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.OutOfRangeError)
# Also of one that can't be read, if it's an op that restores variables which fails.
_RESTORING = (*_READING, tf.errors.FailedPreconditionError, tf.errors.PermissionDeniedError)
# What TensorFlow puts before a reason: the task, how many errors there are, and which this is.
_FROM = re.compile(r'From /job:|\d+ root error\(s\) found')
_FIRST = re.compile(r'\s*\(0\) [A-Z_ ]+: ')
_SPECIAL = {*'*?[\\'} - {os.sep}  # in patterns


def check_name(path: str) -> None:
    """Raises ValueError if TensorFlow would take a path for a pattern.

    It then finds no checkpoint in a directory `run[1]`, evaluates initial values, and can't go on
    training; and with those in `run*` it deletes the old checkpoints in `run2`.
    """
    if special := sorted(_SPECIAL & {*path}):
        raise ValueError(
            f'{path!r} has {" and ".join(special)}, and TensorFlow takes paths of checkpoints for '
            f'patterns: it would miss some, or take others. Give a name without '
            f'{" ".join(sorted(_SPECIAL))}.'
        )


def check(model_dir: str) -> None:
    """Raises ValueError if the file `checkpoint` of a model_dir names no checkpoint that is there.

    TensorFlow would begin anew, or evaluate initial values, with no more than a line in the log.
    """
    file = os.path.join(model_dir, 'checkpoint')
    if not tf.io.gfile.exists(file):
        return
    path = _last(model_dir)
    if not path:
        raise ValueError(f"{file}, which names the last checkpoint, can't be read. {_remedy(file)}")
    # A V1 checkpoint is one file, without an index.
    if not tf.io.gfile.exists(f'{path}.index') and not tf.io.gfile.glob(path):
        raise ValueError(f'{file} names {path}, and {path}.index is not there. {_remedy(file)}')


@contextlib.contextmanager
def explained(model_dir: str, path: str | None = None, warm_start: Any = None) -> Iterator[None]:
    """Says of TensorFlow's errors which file is concerned, what is kept, and what to do.

    An error keeps its class, and has TensorFlow's as its cause.

    Args:
      model_dir: where files are written.
      path: the checkpoint to read, by default the last one of the model_dir.
      warm_start: an Estimator's settings of what its variables start from.
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
    except (*_RESTORING, *_WRITING) as error:
        if _op_type(error) == op_types.CHECKPOINT_READ:
            if not isinstance(error, _RESTORING) or _of_other_variables(error):
                raise
            raise _unreadable(error, _restored(error) or path or _last(model_dir)) from error
        # Summaries are written without an op.
        writes = _op_type(error) in (None, *op_types.CHECKPOINT_WRITES) and isinstance(
            error, _WRITING
        )
        # TensorFlow's own have 'FILE; No space left on device', say; others may be anybody's.
        named = '; ' in _reason(error) or not isinstance(error, RuntimeError)
        if not (writes and named) or not _concerns(_reason(error), model_dir):
            raise
        raise _unwritable(error, model_dir) from error


def _op_type(error: Exception) -> str | None:
    """The type of the op that has failed; None for an error of something else."""
    return getattr(getattr(error, 'op', None), 'type', None)


def _unwritable(error: Exception, model_dir: str) -> Exception:
    """The error to raise for a model_dir that can't be written to."""
    name = os.path.basename(_last(model_dir))
    kept = 'There is no checkpoint yet'
    if name in _complete(model_dir):
        kept = f'The checkpoints are kept, and training goes on from {name}'
    return _like(
        error,
        f"{model_dir} can't be written to: {_reason(error)}. {kept}. Make room there, or let this "
        'process write there, and start again.',
    )


def watch(scaffold: tf.train.Scaffold) -> tf.train.Scaffold:
    """Lets a scaffold's saver say which checkpoint it can't restore, also after a fault.

    A file that is too short raises OutOfRangeError, which would be taken for the end of the data.
    """
    finalize = scaffold.finalize

    def finalize_and_watch() -> Any:
        result, saver = finalize(), scaffold.saver
        if isinstance(saver, tf.train.Saver) and 'restore' not in vars(saver):
            saver.restore = functools.partial(_restore, saver.restore)
        return result

    scaffold.finalize = finalize_and_watch
    return scaffold


def _restore(restore: Any, session: tf.Session, path: str) -> None:
    try:
        restore(session, path)
    except _RESTORING as error:
        if _of_other_variables(error):
            raise
        raise _unreadable(error, path) from error


def _of_other_variables(error: Exception) -> bool:
    """Whether a checkpoint's files are as they should be, but another model's."""
    return 'not found in checkpoint' in _reason(error)


def _unreadable(error: Exception, path: str) -> Exception:
    """The error to raise for a checkpoint that can't be restored."""
    directory, name = os.path.split(path)
    remedy = _remedy(os.path.join(directory, 'checkpoint'), name)
    return _like(error, f"The checkpoint {path} can't be read: {_reason(error)}. {remedy}")


def _remedy(file: str, without: str = '') -> str:
    """What to do about a checkpoint, or about the file `checkpoint`, that is of no use."""
    directory = os.path.dirname(file)
    names = [name for name in _complete(directory) if name != without]
    remove = f'remove the checkpoint ({without}.*) and ' if without else ''
    if not names:
        return (
            f'No other checkpoint in {directory} has all its files: to begin anew, {remove}remove '
            f'{file}.'
        )
    return (
        f'{names[-1]} has all its files: to go on from it, {remove}write model_checkpoint_path: '
        f'"{names[-1]}" as the only line of {file}.'
    )


def _complete(directory: str) -> list[str]:
    """Names the checkpoints in a directory whose files are all there, the latest step last."""
    try:
        files = {*tf.io.gfile.listdir(directory)}
    except tf.errors.OpError:  # There is no such directory.
        return []
    shards: dict[str, list[str]] = {}
    for file in sorted(files):
        if match := re.fullmatch(r'(.+)\.data-\d{5}-of-\d{5}', file):
            shards.setdefault(match[1], []).append(file)
    complete = [
        name
        for name, found in shards.items()
        if f'{name}.index' in files and len(found) == int(found[0][-5:])
    ]
    return sorted(complete, key=lambda name: int((re.findall(r'-(\d+)$', name) or [0])[0]))


def _last(model_dir: str) -> str:
    """The path of the checkpoint that a model_dir's file `checkpoint` names; '' without one."""
    try:
        state = tf.train.get_checkpoint_state(model_dir)
    except ValueError:  # It's empty.
        return ''
    return state.model_checkpoint_path if state else ''


def _restored(error: tf.errors.OpError) -> str | None:
    """The path that an op restores from, if the graph has it, as that of a warm start does."""
    path = private.constant_value(error.op.inputs[0])
    return None if path is None else tf.compat.as_text(path)


def _concerns(reason: str, model_dir: str) -> bool:
    """Whether a reason is of a file in the model_dir, or of a directory that it is in."""
    path = reason.partition('; ')[0].removesuffix(' is not a directory').rstrip('/') + '/'
    directory = model_dir.rstrip('/') + '/'
    return path.startswith(directory) or directory.startswith(path)


def _reason(error: Any) -> str:
    """What is the matter, without where in the graph: 'FILE; No space left on device', say."""
    lines = getattr(error, 'message', str(error)).splitlines()
    where = [number for number, line in enumerate(lines) if line.startswith('Node: ')]
    told = lines[where[-1] + 1 :] if where else lines
    reasons = [line for line in told if line.strip() and not _FROM.match(line)]
    return _FIRST.sub('', reasons[0]).rstrip('.') if reasons else type(error).__name__


def _like(error: Exception, text: str) -> Exception:
    """Makes an error of the same class, but for OutOfRangeError, which would end the data."""
    if isinstance(error, tf.errors.OutOfRangeError):
        return tf.errors.DataLossError(None, None, text)
    for kind in (*_WRITING[:-1], *_READING):
        if isinstance(error, kind):
            return kind(None, None, text)
    return RuntimeError(text)
